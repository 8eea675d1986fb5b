"""Activations between measured points, and the tokens there is room for."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.planner import Configuration, Parallelism, Replica
from resilient.planners.stages.memory_shares import ActivationGrid, kept_shares
from tests.resilient.planners.jobs_of_planners import setting


def kept(layers: float, tp: int, tokens: float) -> float:
    """An embedding beside equal layers: linear in each alone."""
    return tokens * (100 + layers * (20 + 80 / tp))


LAYERS, TP, TOKENS = (2, 4, 8), (1, 4), (64, 1024)
GRID = ActivationGrid(
    layers=LAYERS,
    tp=TP,
    tokens=TOKENS,
    bytes=tuple(tuple(tuple(kept(layers, tp, tokens) for tokens in TOKENS) for tp in TP) for layers in LAYERS),
)


@given(layers=st.integers(2, 8), tp=st.sampled_from(TP), tokens=st.integers(64, 1024))
def test_activations_are_interpolated_inside_the_grid(layers: int, tp: int, tokens: int) -> None:
    assert GRID.activation_bytes(layers, tp, tokens) == pytest.approx(kept(layers, tp, tokens))


@given(layers=st.integers(1, 40), tokens=st.integers(1, 10000))
def test_activations_beyond_the_grid_are_those_of_the_border(layers: int, tokens: int) -> None:
    inside_layers, inside_tokens = min(max(layers, 2), 8), min(max(tokens, 64), 1024)
    border = kept(inside_layers, 1, inside_tokens)
    expected = border * layers / inside_layers * tokens / inside_tokens
    assert GRID.activation_bytes(layers, 1, tokens) == pytest.approx(expected)


def test_degrees_are_not_interpolated() -> None:
    message = "tp must be one of (1, 4), which were measured, got 2; measure it too"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GRID.activation_bytes(4, 2, 128)
    with pytest.raises(ValueError, match=re.escape("bytes must be of shape (1, 1, 1), got (1, 1, 2); measure it all")):
        ActivationGrid(layers=(2,), tp=(1,), tokens=(64,), bytes=(((1.0, 2.0),),))
    message = (
        "layers, tp and tokens must ascend from 1 or more, got (2, 1), (1,) and (64,); list each number once, in order"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ActivationGrid(layers=(2, 1), tp=(1,), tokens=(64,), bytes=(((1.0,),), ((1.0,),)))


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
    # Of two that share sequences one is left, with the whole of them and as much state as before.
    wide = replace(found, units={name: replace(each, dp=1, cp=2) for name, each in units.items()})
    assert kept_shares(job, wide, batch, left[1:]).tolist() == pytest.approx([2 * 100 * 800 / (1e6 - 128_000)])


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
