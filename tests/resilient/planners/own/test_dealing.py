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
from resilient.planners.own.candidates import as_dealt, holds_longer, one_stage
from resilient.planners.own.dealing import deal_to_stage
from resilient.planners.own.least import least_ms
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
    if not holds_longer(job, shape, samples, 1.0):
        return
    replicas = degraded_replicas(job, shape, 0)
    for batch in batches:
        try:
            dealt = deal_to_stage(job, shape, batch, replicas)
        except ValueError:
            assert shape.encoders is Encoders.PARALLEL, "others have as many microbatches as they need"
            continue
        result = evaluate(job, shape, dealt, batch, replicas)
        assert job.cluster.memory_bytes is None or result.peak_bytes <= job.cluster.memory_bytes
        assert result.iteration_ms >= least_ms(job, shape, [batch]) * (1 - 1e-6)


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
    """And layers run again where one sample for each device is too much otherwise, those of the encoder first."""
    # 600 kB each, and five for each device
    samples = _table([500] * 40, [500] * 40)
    found: list[tuple[int, dict[str, float]]] = []
    for memory in (None, 3_300_000, 2_100_000, 800_000, 500_000, 300_000):
        job, shape = _of_width(1, memory)
        assignment = deal_to_stage(job, shape, samples, [Replica(num_microbatches=1)] * 8)
        found.append((int(assignment.units[LLM].microbatch.max()) + 1, dict(assignment.recompute)))
    nothing = {"vision": 0.0, "llm": 0.0}
    some, most = ({"vision": 1.0, "llm": each / 16} for each in (5, 13))
    assert found == [(1, nothing), (1, nothing), (2, nothing), (5, nothing), (5, some), (5, most)]


def test_layers_run_again_after_losses_where_more_microbatches_take_longer() -> None:
    """Gathers of parameters take long here."""
    cluster = Cluster(devices_per_node=4, memory_bytes=3_300_000, intra_node=Link(bytes_per_s=1e5))
    job = replace(setting(), cluster=cluster, num_nodes=2)
    shape = next(each for each in one_stage(job) if (each.units[LLM].dp, each.shard) == (8, 4))
    samples, few = _table([500] * 40, [500] * 40), [Replica(num_microbatches=1)] * 4
    whole, less = (deal_to_stage(job, shape, samples, replicas) for replicas in (few * 2, few))
    assert whole.units[LLM].microbatch.max() == less.units[LLM].microbatch.max() == 0
    assert max(whole.recompute.values()) == 0 < max(less.recompute.values())
    with_memory = evaluate(job, shape, less, samples, few)
    without = evaluate(job, shape, replace(less, recompute={}), samples, few)
    assert with_memory.peak_bytes <= 3_300_000 < without.peak_bytes


def test_samples_of_which_no_two_fit_together_have_a_microbatch_each() -> None:
    # All together they take less than twice the room.
    job, found = _of_width(1, 1_000_000)
    assignment = deal_to_stage(job, found, _table([500] * 3, [500] * 3), [Replica(num_microbatches=1)])
    assert sorted(assignment.units[LLM].microbatch.tolist()) == [0, 1, 2]


def test_encoders_of_one_microbatch_leave_room_for_half_of_the_replicas() -> None:
    job, found = _of_width(1, 1_000_000)
    apart = replace(found, encoders=Encoders.PARALLEL)
    batch = _table([500] * 72, [1] * 72)
    deal_to_stage(job, apart, batch, [Replica(num_microbatches=1)] * 8)
    message = r"^samples must fit into the memory of a device, each alone, got sample 0 that takes "
    with pytest.raises(ValueError, match=message):
        as_dealt(job, apart, [batch])
    assert as_dealt(job, found, [batch]).num_microbatches >= 1


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
    batch = _table([10, 10], [10, 40_000])
    with pytest.raises(ValueError, match=re.compile(f"^{message}$")):
        deal_to_stage(job, found, batch, [Replica(num_microbatches=1)])
