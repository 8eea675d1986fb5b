"""Samples are dealt to one stage in as few microbatches as the memory holds, whatever a replica is."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches
from resilient.planners.own.candidates import one_stage
from resilient.planners.own.dealing import deal_to_stage
from resilient.planners.own.least import least_ms
from resilient.planners.own.recomputation import with_room
from resilient.planners.planner import Configuration, Encoders, Replica, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import setting, table


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[Setting, Configuration]:
    cluster = Cluster(
        devices_per_node=draw(st.sampled_from([1, 2, 4])),
        memory_bytes=draw(st.sampled_from([None, 400_000, 1_000_000])),
        intra_node=Link(bytes_per_s=draw(st.sampled_from([1e7, 1e9]))),
        inter_node=Link(bytes_per_s=draw(st.sampled_from([1e6, 1e8]))),
    )
    job = replace(setting(), cluster=cluster, num_nodes=draw(st.integers(1, 6)), global_batch=draw(st.integers(1, 40)))
    return job, draw(st.sampled_from(list(one_stage(job))))


@given(_jobs(), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_what_is_dealt_fits_and_takes_no_less_than_the_least(given: tuple[Setting, Configuration], seed: int) -> None:
    job, shape = given
    samples = table(100, seed)
    batches = known_batches(job, samples, 2)
    for found in with_room(job, shape, samples, batches, 1.0):
        replicas = degraded_replicas(job, found, 0)
        for batch in batches:
            result = evaluate(job, found, deal_to_stage(job, found, batch, replicas), batch, replicas)
            assert job.cluster.memory_bytes is None or result.peak_bytes <= job.cluster.memory_bytes
            if found.num_microbatches == 1:
                assert result.iteration_ms >= least_ms(job, found, [batch]) * (1 - 1e-6)


def _of_width(width: int, memory_bytes: int | None = None) -> tuple[Setting, Configuration]:
    cluster = Cluster(devices_per_node=4, memory_bytes=memory_bytes)
    job = replace(setting(), cluster=cluster, num_nodes=2)
    return job, next(each for each in one_stage(job) if (each.units[LLM].tp, each.units[LLM].cp) == (1, width))


def _table(vision: list[int], llm: list[int]) -> SampleTable:
    return SampleTable(units={"vision": Lengths.of(np.array(vision)), "llm": Lengths.of(np.array(llm))})


def test_a_sample_is_shared_only_in_the_units_in_which_it_is_long() -> None:
    job, found = _of_width(4)
    batch = _table([500] * 16, [8000, *[500] * 15])
    assignment = deal_to_stage(job, found, batch, [Replica(num_microbatches=1)])
    degrees = {name: place.degree for name, place in assignment.units.items() if place.degree is not None}
    assert degrees["vision"].tolist() == [1] * 16
    assert degrees[LLM][0] > 1


def test_samples_go_to_as_few_microbatches_as_the_memory_holds() -> None:
    # 600 kB each, and five for each device.
    samples = _table([500] * 40, [500] * 40)
    counts: list[int] = []
    for memory in (None, 3_300_000, 2_100_000, 800_000):
        job, found = _of_width(1, memory)
        assignment = deal_to_stage(job, found, samples, [Replica(num_microbatches=1)] * 8)
        counts.append(int(assignment.units[LLM].microbatch.max()) + 1)
    assert counts == [1, 1, 2, 5]


def test_samples_of_which_no_two_fit_together_have_a_microbatch_each() -> None:
    # All together they take less than twice the room.
    job, found = _of_width(1, 1_200_000)
    assignment = deal_to_stage(job, found, _table([500] * 3, [500] * 3), [Replica(num_microbatches=1)])
    assert sorted(assignment.units[LLM].microbatch.tolist()) == [0, 1, 2]


def test_units_are_dealt_apart_where_encoders_have_other_samples() -> None:
    job, found = _of_width(1)
    found = replace(found, encoders=Encoders.PARALLEL)
    batch = _table([100] * 8 + [0] * 8, [1] * 8 + [100] * 8)
    assignment = deal_to_stage(job, found, batch, [Replica(num_microbatches=1)] * 8)
    assert sorted(assignment.units["vision"].replica[:8].tolist()) == list(range(8))
    assert sorted(assignment.units[LLM].replica[8:].tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (
            1,
            r"samples must fit into the memory of a device, each alone, got sample 1 that takes \d+\.\d\d times as "
            r"much; configure the job again, leave it out, or use more devices",
        ),
        (
            4,
            r"samples must fit into 4 ranks, each alone, got sample 1 that needs \d+; configure the job again, leave "
            r"it out, or use more devices",
        ),
    ],
)
def test_a_sample_without_room_is_refused_by_its_name(width: int, message: str) -> None:
    job, found = _of_width(width, 1_000_000)
    batch = _table([10, 10], [10, 10_000])
    with pytest.raises(ValueError, match=re.compile(f"^{message}$")):
        deal_to_stage(job, found, batch, [Replica(num_microbatches=1)])
