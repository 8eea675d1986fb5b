"""What parts of a device's memory samples take."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Replica
from resilient.planners.stages.memory_shares import kept_shares, unit_shares
from tests.resilient.planners.jobs_of_planners import setting


def two_units(pp: int, *, colocated: bool) -> Configuration:
    units = {
        name: Parallelism(dp=1, pp=pp, stage_layers=(count // pp,) * pp) for name, count in (("vision", 4), ("llm", 8))
    }
    return Configuration(units=units, num_microbatches=3, colocated=colocated)


def lengths(vision: list[int], llm: list[int]) -> SampleTable:
    return SampleTable(units={"vision": Lengths.of(np.array(vision)), "llm": Lengths.of(np.array(llm))})


def test_shares_count_what_stages_hold() -> None:
    # 16 kB of state and 100 bytes per token in each layer.
    job, batch = setting(1_000_000), lengths([100, 0], [100, 300])
    # The encoder's first stage holds all three microbatches, the language model's first one two.
    encoder, language = 2 * 100 * 3 / (1e6 - 32_000), 4 * 100 * 2 / (1e6 - 64_000)
    shares = kept_shares(job, two_units(2, colocated=False), batch)
    assert shares.tolist() == pytest.approx([100 * max(encoder, language), 300 * language])
    # On the same devices encoders hold all three, and the room is divided as these two need it.
    shares = kept_shares(job, two_units(2, colocated=True), batch)
    needed = 100 * 2 * 100 * 3, 400 * 4 * 100 * 2
    room = (1e6 - 96_000) / sum(needed)
    assert shares.tolist() == pytest.approx([1 / room, 300 / 400 / room])
    assert kept_shares(setting(), two_units(2, colocated=True), batch).tolist() == [0, 0]


def test_the_room_is_that_of_the_replica_that_lost_most() -> None:
    job, batch = setting(1_000_000), lengths([0], [100])
    units = {"vision": Parallelism(dp=2, pp=1, stage_layers=(4,)), "llm": Parallelism(dp=2, pp=1, stage_layers=(8,))}
    found = Configuration(units=units, num_microbatches=3)
    left = [Replica(num_microbatches=4), Replica(num_microbatches=2, devices=0.5)]
    assert kept_shares(job, found, batch).tolist() == pytest.approx([100 * 800 / (1e6 - 96_000)])
    assert kept_shares(job, found, batch, left).tolist() == pytest.approx([100 * 800 / (1e6 - 2 * 96_000)])
    # Of two ranks one is left, with as much state as before, and the whole of the optimizer.
    wide = replace(found, units={name: replace(each, dp=1, cp=2) for name, each in units.items()})
    assert kept_shares(job, wide, batch, left[1:]).tolist() == pytest.approx([100 * 800 / (1e6 - 128_000)])


def test_units_share_the_room_of_a_microbatch_where_encoders_are_replicated() -> None:
    job, batch = setting(1_000_000), lengths([100, 0], [100, 300])
    found = replace(two_units(1, colocated=True), encoders=Encoders.REPLICATED)
    room = 1e6 - 12 * 16_000
    assert kept_shares(job, found, batch).tolist() == pytest.approx([(400 * 100 + 800 * 100) / room, 800 * 300 / room])
    shares = unit_shares(job, found, batch, [Replica(num_microbatches=1)])
    assert {name: each.tolist() for name, each in shares.items()} == {
        "vision": pytest.approx([400 * 100 / room, 0]),
        "llm": pytest.approx([800 * 100 / room, 800 * 300 / room]),
    }
    # Its first stage holds two microbatches, each with all of the encoder.
    units = {**found.units, "llm": Parallelism(dp=1, pp=2, stage_layers=(4, 4))}
    free = 1e6 - (4 + 4) * 16_000
    of_first = [2 * (400 * 100 + 400 * 100) / free, 2 * 400 * 300 / free]
    assert kept_shares(job, replace(found, units=units), batch).tolist() == pytest.approx(of_first)


def test_frozen_parts_without_a_backward_keep_nothing() -> None:
    job, batch = setting(1_000_000), lengths([1000, 1000], [1, 1])
    frozen = replace(job, costs=job.costs.frozen(["vision"]))
    before, after = (kept_shares(each, two_units(1, colocated=False), batch) for each in (job, frozen))
    assert after[0] < before[0] / 100


def test_a_state_without_room_is_refused() -> None:
    message = (
        "memory_bytes must be more than the 128000 bytes of parameters, gradients and optimizer on a device, got "
        "100000; configure the job again"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kept_shares(setting(100_000), two_units(1, colocated=False), lengths([1], [1]))
