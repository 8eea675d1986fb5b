"""DFLOP: the best of all splits by the paper's formula, and even microbatches on any replicas."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.common.extras import MissingPackageError
from resilient.planners.costs.correction import UNCORRECTED, Observation
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Configuration, Parallelism, Place, Replica, Setting
from resilient.planners.published.dflop.planner import Dflop, stage_weights
from resilient.planners.published.dflop.vector_packing import peak
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_budget import MemoryBudget
from tests.resilient.planners.jobs_of_planners import COSTS, after_failures, check_places, learnt, setting, table, unit


def used(job: Setting, found: Configuration, batch: SampleTable, place: Place, replicas: Sequence[Replica]) -> float:
    """The largest part that is used of what a stage of any replica has left."""
    most = 0.0
    for number, (each, budget) in enumerate(zip(replicas, MemoryBudget.of_each(job, found, replicas), strict=True)):
        assert budget is not None
        own = np.flatnonzero(place.replica == number)
        microbatch = place.microbatch[own]
        most = max(most, budget.used(batch[own], microbatch, microbatch, each.num_microbatches))
    return most


def test_a_model_that_does_not_fit_is_refused() -> None:
    message = (
        "num_nodes must be enough for 'dflop', got 8 of 2 devices; use more nodes, a smaller microbatch, or another "
        "planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Dflop().configure(setting(memory_bytes=1000), table(50))


@settings(max_examples=25, deadline=None)
@given(after_failures(), st.integers(0, 60), st.integers(0, 100))
def test_places_on_the_replicas_that_failures_leave(replicas: list[Replica], count: int, seed: int) -> None:
    planner, job = Dflop(), setting()
    found = planner.configure(job, table(50))
    batch = table(count, seed)
    assignment = planner.assign(job, found, batch, replicas)
    check_places(assignment, planner.assign(job, found, batch, replicas), count, replicas)
    _, microbatch, speeds = slots(replicas)
    first = np.flatnonzero(microbatch == 0)
    weights = stage_weights(job, found, batch)
    place = assignment.units[LLM]
    reached = peak(weights, first[place.replica] + place.microbatch, speeds)
    longest = longest_first(np.rint(weights.max(axis=0) * 1e6), speeds)
    assert reached <= peak(weights, longest, speeds) * (1 + 1e-6)


def test_a_replica_with_half_the_speed_and_half_the_microbatches_has_half_the_work() -> None:
    job = setting()
    found = Dflop().configure(job, table(50))
    draw = np.random.default_rng(0)
    batch = SampleTable(units={name: Lengths.of(draw.integers(50, 500, 400)) for name in found.units})
    replicas = [Replica(num_microbatches=8), Replica(num_microbatches=4, speed=0.5)]
    place = Dflop().assign(job, found, batch, replicas).units[LLM]
    weights = stage_weights(job, found, batch)
    work = weights[weights.sum(axis=1).argmax()]
    fast, slow = np.bincount(place.replica, work)
    assert fast / slow == pytest.approx(2, rel=0.02)


def test_processes_agree_unless_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    job, batch, replicas = setting(), table(20), [Replica(num_microbatches=4)]
    found = Dflop().configure(job, table(50))
    Dflop().assign(job, found, batch, replicas)
    with pytest.raises(MissingPackageError, match=r"^Dflop\(time_limit_s=\.\.\.\) needs highspy, "):
        Dflop(time_limit_s=60).assign(job, found, batch, replicas)


def test_jobs_that_fit_are_not_refused() -> None:
    """With 800 kB devices every job fits, and every batch but those in which a sample does not fit alone."""
    batches = [(table(64, seed), table(32, seed)) for seed in range(21)]
    job, refused = setting(800_000), list[str]()
    for known, batch in batches:
        found = Dflop().configure(job, known)
        try:
            Dflop().assign(job, found, batch, degraded_replicas(job, found, 2))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) <= 3
    assert all(message.startswith("tokens of sample ") for message in refused)


def test_large_microbatches_are_kept_apart_where_memory_is_short() -> None:
    units = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        "llm": Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=6)
    lengths = {"vision": np.zeros(6, dtype=np.int64), "llm": np.array([1000, 1000, 1000, 100, 100, 100])}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    replicas = [Replica(num_microbatches=6)]
    # A stage of four layers holds two microbatches: room for 1500 tokens of them beside its state.
    large, short = setting(4 * 16_000 + 4 * 100 * 2100), setting(4 * 16_000 + 4 * 100 * 1500)
    place = Dflop().assign(large, found, batch, replicas).units[LLM]
    assert used(large, found, batch, place, replicas) == pytest.approx(2000 / 2100)
    place = Dflop().assign(short, found, batch, replicas).units[LLM]
    assert used(short, found, batch, place, replicas) == pytest.approx(1100 / 1500)
    assert place.microbatch.tolist() == [0, 2, 4, 1, 3, 5]


def test_a_sample_that_needs_all_the_room_is_next_to_empty_microbatches() -> None:
    units = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        "llm": Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=6)
    lengths = {"vision": np.zeros(11, dtype=np.int64), "llm": np.array([1400, *[200] * 10])}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    # A stage of four layers holds two microbatches: room for 1500 tokens of them beside its state.
    job, replicas = setting(4 * 16_000 + 4 * 100 * 1500), [Replica(num_microbatches=6)]
    assignment = Dflop().assign(job, found, batch, replicas)
    assert evaluate(job, found, assignment, batch, replicas).peak_bytes <= 4 * 16_000 + 4 * 100 * 1500
    assert set(assignment.units[LLM].microbatch.tolist()) == {0, 2, 3, 4, 5}


TRUTH = CostModel(units=(unit("vision", 4, 0.0003, 1e-6), unit("llm", 8, 0.002, 3e-5)))


def true_peak(job: Setting, found: Configuration, batch: SampleTable, replicas: list[Replica], planner: Dflop) -> float:
    """What the slowest microbatch truly takes, of the job as it is known."""
    _, microbatch, speeds = slots(replicas)
    place = planner.assign(job, found, batch, replicas).units[LLM]
    bucket = np.flatnonzero(microbatch == 0)[place.replica] + place.microbatch
    return peak(stage_weights(replace(job, costs=TRUTH, correction=UNCORRECTED), found, batch), bucket, speeds)


def test_measured_times_level_what_costs_have_wrong() -> None:
    job = setting()
    found = Dflop().configure(job, table(50))
    corrected = learnt(job, TRUTH, found)
    replicas = [Replica(num_microbatches=5), Replica(num_microbatches=3, speed=0.7)]
    before, after = (
        np.array([true_peak(at, found, table(60, seed), replicas, Dflop()) for seed in range(10)])
        for at in (job, corrected)
    )
    assert (after <= before * 1.005).all()
    assert after.mean() < 0.95 * before.mean()


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 7), seed=st.integers(0, 99), speed=st.sampled_from([1.0, 0.5]))
def test_the_best_buckets_of_corrected_times_are_truly_no_slower(count: int, seed: int, speed: float) -> None:
    # Lengths at which the factors were learnt exactly: one in each bucket.
    draw = np.random.default_rng((count, seed))
    lengths = {name: np.rint(2 ** draw.integers(4, 12, count).astype(float)).astype(np.int64) for name in COSTS.by_name}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    job = setting()
    found = Dflop().configure(job, table(50))
    seen = [
        Observation(unit=name, tp=spread.tp, tokens=int(length), predicted_ms=before, actual_ms=after)
        for name, spread in found.units.items()
        for length, before, after in zip(
            lengths[name],
            COSTS.by_name[name].work(spread.tp).of(batch.units[name]).tolist(),
            TRUTH.by_name[name].work(spread.tp).of(batch.units[name]).tolist(),
            strict=True,
        )
    ]
    corrected = replace(job, correction=UNCORRECTED.observe(seen))
    replicas = [Replica(num_microbatches=2), Replica(num_microbatches=1, speed=speed)]
    before, after = (true_peak(at, found, batch, replicas, Dflop(time_limit_s=60)) for at in (job, corrected))
    assert after <= before * (1 + 2e-6)


def test_replicas_that_are_alike_deal_out_long_microbatches() -> None:
    units = {name: Parallelism(dp=2, pp=1, stage_layers=(count,)) for name, count in (("vision", 4), (LLM, 8))}
    lengths = np.array([4000, 3900, 3800, 3700, 50, 50, 50, 50])
    batch = SampleTable(units={name: Lengths.of(lengths) for name in units})
    found = Configuration(units=units, num_microbatches=4)
    place = Dflop().assign(setting(), found, batch, [Replica(num_microbatches=4)] * 2).units[LLM]
    assert sorted(place.replica[[0, 3]].tolist() + place.replica[[1, 2]].tolist()) == [0, 0, 1, 1]
    assert place.replica[0] == place.replica[3]
    assert place.microbatch.tolist()[:4] == [0, 0, 1, 1]
