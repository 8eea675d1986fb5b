"""Entrain: a configuration that is fast in simulation, and places with deferral on any replicas."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import Correction, Factor, buckets
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Assignment, Configuration, Parallelism, Replica
from resilient.planners.published.baselines.mean_microbatch import in_order
from resilient.planners.published.entrain.planner import Entrain
from resilient.planners.published.entrain.search import entrain_configurations
from resilient.planners.stages.degraded_replicas import degraded_replicas
from tests.resilient.planners.jobs_of_planners import (
    COSTS,
    after_failures,
    check_places,
    learnt,
    setting,
    table,
    unit,
    with_attention,
)
from tests.resilient.planners.published.entrain.jobs import MODELS, drawn, job


def test_few_samples_are_noted() -> None:
    assert Entrain().configure(setting(), table(500)).notes == ()
    (note,) = Entrain().configure(setting(), table(10)).notes
    assert re.fullmatch(r"only batches of \d+ samples agree on \(\d+, \d+\) devices, and got 10; give more", note)


def even_units(vision_ms: float = 0.0) -> CostModel:
    """Two equal units without other degrees; for each call of a layer the encoder takes so long beside."""
    plain = unit("llm", 8, 0.002, 0.0)
    units: list[UnitCosts] = []
    for name, fixed in (("vision", vision_ms), (LLM, 0.0)):
        curve = replace(plain.layers[0].curves[0], forward=Curve(linear=0.002, fixed=fixed))
        layers = tuple(replace(layer, curves=(curve,)) for layer in plain.layers)
        units.append(replace(plain, name=name, degrees=((1, 1),), layers=layers))
    return CostModel(units=tuple(units))


def test_an_allocation_on_the_edge_is_chosen_only_where_there_is_no_other_one() -> None:
    """Shares of one replica are 2.5 and 3.5 of six devices; of two, 1.25 and 1.75 of three."""
    vision, text = np.tile([40, 60], 100), np.full(200, 70)
    samples = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(text)})
    for microbatch, dp in ((64, 2), (128, 1)):
        at = replace(job(even_units(), 3, batch=128), microbatch=microbatch)
        found = Entrain().configure(at, samples)
        assert found.units[LLM].dp == dp
        if dp == 2:
            assert found.notes == ()
        else:
            (note,) = found.notes
            assert note.startswith("batches of 128 samples do not agree on (")


def test_what_a_call_takes_beside_counts_for_the_allocation() -> None:
    """Half of the encoder's time: without it, its share would lie on the edge between one and two of six devices."""
    vision, text = np.tile([40, 60], 100), np.full(200, 150)
    samples = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(text)})
    found = Entrain().configure(replace(job(even_units(19.2), 3, batch=64), microbatch=64), samples)
    assert [each.num_devices for each in found.units.values()] == [2, 4]
    assert found.notes == ()


@settings(max_examples=25, deadline=None)
@given(after_failures(), st.integers(0, 60), st.integers(0, 100))
def test_places_on_the_replicas_that_failures_leave(replicas: list[Replica], count: int, seed: int) -> None:
    planner, at = Entrain(), setting()
    found = planner.configure(at, table(100))
    batch = table(count, seed)
    assignment = planner.assign(at, found, batch, replicas)
    check_places(assignment, planner.assign(at, found, batch, replicas), count, replicas)
    early, late = assignment.units["vision"], assignment.units[LLM]
    assert (early.replica == late.replica).all()
    assert set((late.microbatch - early.microbatch).tolist()) <= {0, 1}
    evaluate(at, found, assignment, batch, replicas)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.5, 0.75, 1.0]), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 100))
def test_replicas_get_samples_by_the_plain_rule(speeds: list[float], count: int, seed: int) -> None:
    configuration = Configuration(
        units={"vision": Parallelism(dp=1, pp=1, stage_layers=(4,)), LLM: Parallelism(dp=1, pp=1, stage_layers=(8,))},
        num_microbatches=3,
    )
    at, batch = setting(), table(count, seed)
    encoder = COSTS.by_name["vision"].work().of(batch.units["vision"])
    llm = COSTS.by_name[LLM].work().of(batch.units[LLM])
    load, expected = [0.0] * len(speeds), [0] * count
    for sample in sorted(range(count), key=lambda sample: -encoder[sample]):
        least = {speed: min((load[r], r) for r in range(len(speeds)) if speeds[r] == speed) for speed in speeds}
        expected[sample] = min(((has + llm[sample]) / speed, r) for speed, (has, r) in least.items())[1]
        load[expected[sample]] += llm[sample]
    replicas = [Replica(num_microbatches=3, speed=speed) for speed in speeds]
    found = Entrain().assign(at, configuration, batch, replicas)
    assert found.units[LLM].replica.tolist() == expected


def test_all_encoders_place_samples_alike() -> None:
    at = job(MODELS["three"], 8)
    batch = drawn(at.costs, 64)
    configuration = Entrain().configure(at, batch)
    assignment = Entrain().assign(at, configuration, batch, [Replica(num_microbatches=8)] * 2)
    assert assignment.units["vision"] is assignment.units["audio"]
    assert (assignment.units["vision"].microbatch != assignment.units[LLM].microbatch).any()


def test_work_is_more_even_than_in_order_and_the_step_shorter() -> None:
    draw = np.random.default_rng(1)
    vision = draw.lognormal(5, 0.7, 256).astype(np.int64)
    text = draw.lognormal(4.5, 0.7, 256).astype(np.int64)
    batch = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision // 4 + text)})
    at = replace(setting(), global_batch=256, microbatch=8)
    configuration = next(entrain_configurations(at, batch))
    replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
    unplanned = Assignment(units=dict.fromkeys(batch.units, in_order(256, replicas)))
    plain = evaluate(at, configuration, unplanned, batch, replicas)
    planned = evaluate(at, configuration, Entrain().assign(at, configuration, batch, replicas), batch, replicas)
    assert planned.iteration_ms < 0.95 * plain.iteration_ms
    assert planned.std_ms["vision"] < 0.2 * plain.std_ms["vision"]
    assert planned.std_ms[LLM] < 0.4 * plain.std_ms[LLM]


@pytest.mark.parametrize("seed", range(3))
def test_what_was_learnt_makes_the_true_step_shorter(seed: int) -> None:
    """Attention takes thirty times what is usual, and was predicted to take nothing."""
    at, truth, batch = (
        replace(setting(), costs=with_attention(COSTS, 0.0)),
        with_attention(COSTS, 30.0),
        table(400, seed),
    )
    configuration, replicas = Entrain().configure(setting(), table(200)), [Replica(num_microbatches=4)] * 4
    spread = configuration.units[LLM]
    steps: list[float] = []
    slowest: list[float] = []
    for known in (at, learnt(at, truth, configuration)):
        found = Entrain().assign(known, configuration, batch, replicas)
        steps.append(evaluate(replace(at, costs=truth), configuration, found, batch, replicas).iteration_ms)
        true_ms = truth.by_name[LLM].work(spread.tp, spread.cp).of(batch.units[LLM])
        slowest.append(float(loads(true_ms, found.units[LLM].replica, 4).max()))
    assert steps[1] < 0.99 * steps[0]
    assert slowest[1] < 0.98 * slowest[0]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.sampled_from([0.3, 1.0]), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_once_learnt_the_true_times_of_replicas_hold_their_bound(count: int, speeds: list[float], seed: int) -> None:
    """None is done more than a longest sample for each after the mean: it would have gone to another."""
    configuration = Entrain().configure(setting(), table(200))
    of_bucket = np.random.default_rng(seed).uniform(0.3, 3.0, 126)
    factors = {
        (name, spread.tp, bucket): Factor(value=float(of_bucket[bucket]), num_steps=1)
        for name, spread in configuration.units.items()
        for bucket in range(126)
    }
    at, batch = replace(setting(), correction=Correction(factors=factors)), table(count, seed)
    replicas = [Replica(num_microbatches=4, speed=speed) for speed in speeds]
    place = Entrain().assign(at, configuration, batch, replicas).units[LLM]
    lengths, spread = batch.units[LLM], configuration.units[LLM]
    true_ms = COSTS.by_name[LLM].work(spread.tp, spread.cp).of(lengths) * of_bucket[buckets(lengths.longest)]
    done = loads(true_ms, place.replica, len(speeds)) / speeds
    assert done.max() <= (true_ms.sum() + (len(speeds) - 1) * true_ms.max()) / sum(speeds) * (1 + 1e-9)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_the_step_is_shorter_than_in_order_on_what_failures_leave(lost: int) -> None:
    configuration = replace(next(entrain_configurations(setting(), table(200))), num_microbatches=16)
    replicas = degraded_replicas(setting(), configuration, lost)
    assert any(each.speed < 1 for each in replicas)
    at, steps = replace(setting(), global_batch=256), np.zeros(2)
    for seed in range(5):
        batch = table(256, seed)
        unplanned = Assignment(units=dict.fromkeys(batch.units, in_order(256, replicas)))
        for index, found in enumerate((Entrain().assign(at, configuration, batch, replicas), unplanned)):
            steps[index] += evaluate(at, configuration, found, batch, replicas).iteration_ms
    assert steps[0] < 0.9 * steps[1]


def test_microbatches_are_small_where_memory_is() -> None:
    draw = np.random.default_rng(1)
    vision = draw.lognormal(5, 0.8, 32).astype(np.int64)
    batch = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision // 4 + 10)})
    spread = {name: Parallelism(dp=1, pp=1, stage_layers=(layers,)) for name, layers in (("vision", 4), (LLM, 8))}
    configuration = Configuration(units=spread, num_microbatches=32)

    def used(memory: int | None) -> int:
        at = replace(setting(memory), global_batch=32)
        places = Entrain().assign(at, configuration, batch, [Replica(num_microbatches=32)])
        return len(set(places.units["vision"].microbatch.tolist()))

    # The encoder holds its own, that which the language model has, and one for deferral.
    state, kept = 4 * 16_000, 400 * int(vision.sum())
    assert used(None) == used(2**40) < 10
    assert [used(state + 3 * kept // number + 100) for number in (12, 14)] == [12, 14]
