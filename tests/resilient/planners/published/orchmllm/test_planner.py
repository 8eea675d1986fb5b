"""OrchMLLM as a planner."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import Correction, Factor, buckets
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches, simulated
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Configuration, Parallelism, Place, Replica
from resilient.planners.published.baselines.balanced import EncoderFirst, FullySharded
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.published.orchmllm.planner import OrchMLLM
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.device_layout import lanes_of_pipelines
from resilient.templates.common.arrays import Ints
from tests.resilient.planners.jobs_of_planners import (
    COSTS,
    after_failures,
    check_places,
    learnt,
    setting,
    table,
    with_attention,
)

PADDED = replace(COSTS, units=(replace(COSTS.units[0], padded=True), COSTS.units[1]))
CONFIGURATION = OrchMLLM().configure(setting(), table(200))
SEVERAL = replace(CONFIGURATION, num_microbatches=1000)  # than which no replica is given more


def test_the_configuration_is_the_fastest_of_those_that_spread_units_evenly() -> None:
    known = table(200)
    (batch,) = known_batches(setting(), known, 1)

    def step_ms(configuration: Configuration) -> float:
        (result,) = simulated(OrchMLLM(), setting(), configuration, [batch])
        return result.iteration_ms

    assert step_ms(CONFIGURATION) == CONFIGURATION.predicted_ms
    for each in (EncoderFirst(), FullySharded(), Uniform()):
        assert CONFIGURATION.predicted_ms <= step_ms(each.configure(setting(), known))
    assert CONFIGURATION.colocated


def test_without_stages_there_is_one_microbatch_if_the_memory_holds_it() -> None:
    alike = SampleTable(units={"vision": Lengths.of(np.full(640, 100)), "llm": Lengths.of(np.full(640, 150))})
    numbers: list[int] = []
    for memory in (None, 5_000_000, 2_000_000):
        job = replace(setting(memory), global_batch=640)
        asked_for, found = (each.configure(job, alike) for each in (EncoderFirst(), OrchMLLM()))
        assert (asked_for.units["llm"].pp, asked_for.num_microbatches) == (1, 20)
        assert found.units["llm"].pp == 1
        numbers.append(found.num_microbatches)
    assert numbers == [1, 2, 20]


def test_a_configuration_with_one_unit_after_the_other_is_left_out_where_it_does_not_fit() -> None:
    """Memory for the uniform one alone: with an encoder's activations of all microbatches there is too little."""
    at = setting(1_070_000)
    with pytest.raises(ValueError, match="'dip'"):
        EncoderFirst().configure(at, table(200))
    uniform, found = Uniform().configure(at, table(200)), OrchMLLM().configure(at, table(200))
    assert replace(found, predicted_ms=uniform.predicted_ms) == uniform


def test_what_fits_in_no_way_is_refused() -> None:
    message = (
        "num_nodes must be enough for 'orchmllm', got 8 of 2 devices; use more nodes, a smaller microbatch, or another "
        "planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OrchMLLM().configure(setting(100), table(200))


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 60),
    replicas=after_failures(),
    seed=st.integers(0, 9),
    costs=st.sampled_from([COSTS, PADDED, with_attention(PADDED, 100.0)]),
)
def test_every_sample_has_one_place_after_failures(
    count: int, replicas: list[Replica], seed: int, costs: CostModel
) -> None:
    batch, job = table(count, seed), replace(setting(), costs=costs)
    assignment = OrchMLLM().assign(job, SEVERAL, batch, replicas)
    check_places(assignment, OrchMLLM().assign(job, SEVERAL, batch, replicas), count, replicas)
    turns = [turn_of(place, replicas).tolist() for place in assignment.units.values()]
    assert turns[0] == turns[1], "pipelines would wait"


def turn_of(place: Place, replicas: list[Replica]) -> Ints:
    """When microbatches run, by those of the replica that has most."""
    counts = np.array([each.num_microbatches for each in replicas])
    return (2 * place.microbatch + 1) * counts.max() // (2 * counts[place.replica])


@settings(max_examples=40, deadline=None)
@given(
    times=st.sampled_from([0.0, 1.0, 100.0]),
    replicas=st.lists(
        st.builds(Replica, num_microbatches=st.integers(1, 4), speed=st.sampled_from([0.1, 0.6, 1.0])),
        min_size=1,
        max_size=5,
    ),
    count=st.integers(0, 80),
    seed=st.integers(0, 9),
)
def test_each_turn_of_each_phase_is_balanced_over_unequal_replicas(
    times: float, replicas: list[Replica], count: int, seed: int
) -> None:
    """To less than a longest sample for each replica beside the mean, shared by all, and two tolerances.

    Speeds that differ by less than a fifth are taken to be equal.
    """
    job, batch = replace(setting(), costs=with_attention(COSTS, times)), table(count, seed)
    assignment = OrchMLLM().assign(job, SEVERAL, batch, replicas)
    rates = np.array([each.speed / each.num_microbatches for each in replicas])
    most = max(each.num_microbatches for each in replicas)
    for turn in range(most):
        here = np.array(
            [
                any((2 * m + 1) * most // (2 * each.num_microbatches) == turn for m in range(each.num_microbatches))
                for each in replicas
            ]
        )
        for name, place in assignment.units.items():
            own = turn_of(place, replicas) == turn
            tokens = batch.units[name].tokens[own]
            held = loads(tokens, place.replica[own], len(replicas)) / rates
            assert not held[~here].any()
            even = (tokens.sum() + (here.sum() - 1) * tokens.max(initial=0)) / rates[here].sum()
            tolerance = max(float(tokens.mean()), 1.0) / rates[here].mean() if len(tokens) else 0.0
            assert held.max() <= 1.2 * (even + 2 * tolerance * (times > 0)) * (1 + 1e-9)


@pytest.mark.parametrize("times", [1.0, 100.0])
def test_padded_batches_are_balanced_by_what_they_take_padded(times: float) -> None:
    padded, packed = (replace(setting(), costs=with_attention(costs, times)) for costs in (PADDED, COSTS))
    replicas, steps = [Replica(num_microbatches=1)] * 6, np.zeros(2)
    for seed in range(5):
        batch = table(60, seed)
        for index, known in enumerate((padded, packed)):
            assignment = OrchMLLM().assign(known, CONFIGURATION, batch, replicas)
            steps[index] += evaluate(padded, CONFIGURATION, assignment, batch, replicas).iteration_ms
    assert steps[0] < 0.9 * steps[1]


@pytest.mark.parametrize(("lanes", "pipelines"), [(3, 4), (5, 4), (8, 3), (2, 5)])
def test_an_encoder_with_another_number_of_replicas_is_balanced_over_its_own(lanes: int, pipelines: int) -> None:
    units = {
        "vision": Parallelism(dp=lanes, pp=1, stage_layers=(4,)),
        "llm": Parallelism(dp=pipelines, pp=1, stage_layers=(8,)),
    }
    configuration = Configuration(units=units, num_microbatches=2)
    replicas, loaded = [Replica(num_microbatches=2)] * pipelines, list[float]()
    bounds = lanes_of_pipelines(units["vision"], units["llm"], pipelines)
    for seed in range(5):
        batch = table(200, seed)
        place = OrchMLLM().assign(setting(), configuration, batch, replicas).units["vision"]
        held = loads(batch.units["vision"].tokens, place.replica, pipelines)
        # By groups of pipelines and lanes that have nothing to do with others.
        group = np.unique(bounds[:, 0], return_inverse=True)[1]
        of_lane = loads(held, group, group.max() + 1) / [
            bounds[group == each, 1].max() - bounds[group == each, 0].min() for each in range(group.max() + 1)
        ]
        loaded.append(of_lane.max() * lanes / held.sum())
    assert np.mean(loaded) < 1.05


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_balance_is_better_than_none_on_what_failures_leave(lost: int) -> None:
    """On replicas of which some have twice as many microbatches then."""
    job, replicas = replace(setting(), global_batch=256), degraded_replicas(setting(), CONFIGURATION, lost)
    assert len({each.num_microbatches for each in replicas}) == 2
    steps = np.zeros(2)
    for seed in range(5):
        batch = table(256, seed)
        for index, each in enumerate((OrchMLLM(), Uniform())):
            assignment = each.assign(job, CONFIGURATION, batch, replicas)
            steps[index] += evaluate(job, CONFIGURATION, assignment, batch, replicas).iteration_ms
    assert steps[0] < 0.8 * steps[1]


def test_more_microbatches_than_configured_are_for_what_does_not_fit_into_fewer() -> None:
    used: list[int] = []
    for memory in (None, 8_000_000, 1_000_000):
        replicas = [Replica(num_microbatches=2)] * 4
        units = OrchMLLM().assign(setting(memory), CONFIGURATION, table(32), replicas).units
        used.append(1 + max(int(place.microbatch.max()) for place in units.values()))
    assert used == [1, 1, 2]


@pytest.mark.parametrize("counts", [[16] * 4, [22, 22, 21, 21]])
def test_no_replica_gets_the_longest_sample_of_every_turn(counts: list[int]) -> None:
    """Nor those that are faster than others by a little, as their microbatches are fewer by one."""
    replicas, largest = [Replica(num_microbatches=count) for count in counts], list[float]()
    for seed in range(1, 4):
        batch = table(256, seed)
        place = OrchMLLM().assign(setting(), SEVERAL, batch, replicas).units["vision"]
        held = loads(batch.units["vision"].tokens, place.replica, 4)
        largest.append(held.max() / held.mean())
    assert np.mean(largest) < 1.12


def test_samples_stay_on_their_replica_where_encoders_apart_are_unequal() -> None:
    units = {
        "vision": Parallelism(dp=2, pp=1, tp=2, stage_layers=(4,)),
        "llm": Parallelism(dp=2, pp=3, tp=2, stage_layers=(3, 3, 2)),
    }
    configuration = Configuration(units=units, num_microbatches=8)
    job, replicas = replace(setting(), global_batch=256), degraded_replicas(setting(), configuration, 1)
    batch, steps = table(256), np.zeros(2)
    for seed in range(5):
        batch = table(256, seed)
        for index, each in enumerate((OrchMLLM(), Uniform())):
            assignment = each.assign(job, configuration, batch, replicas)
            assert assignment.units["vision"] is assignment.units["llm"]
            steps[index] += evaluate(job, configuration, assignment, batch, replicas).iteration_ms
    assert steps[0] < 0.95 * steps[1]
    equal = OrchMLLM().assign(job, configuration, batch, degraded_replicas(setting(), configuration, 0)).units
    assert (equal["vision"].replica != equal["llm"].replica).any()


@pytest.mark.parametrize("seed", range(3))
def test_what_was_learnt_makes_the_true_step_shorter(seed: int) -> None:
    """Attention takes ten times what is usual, and was predicted to take nothing."""
    at, truth, batch = (
        replace(setting(), costs=with_attention(COSTS, 0.0)),
        with_attention(COSTS, 10.0),
        table(400, seed),
    )
    replicas = [Replica(num_microbatches=1)] * 8
    steps: list[float] = []
    for job in (at, learnt(at, truth, CONFIGURATION)):
        assignment = OrchMLLM().assign(job, CONFIGURATION, batch, replicas)
        steps.append(evaluate(replace(at, costs=truth), CONFIGURATION, assignment, batch, replicas).iteration_ms)
    assert steps[1] < 0.97 * steps[0]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 60), num_replicas=st.integers(1, 6), seed=st.integers(0, 99))
def test_once_learnt_the_true_times_of_replicas_hold_their_bound(count: int, num_replicas: int, seed: int) -> None:
    """Without attention in the costs, factors that depend on lengths alone: their balance is that of true times."""
    at, batch = replace(setting(), costs=with_attention(COSTS, 0.0)), table(count, seed)
    of_bucket = np.random.default_rng(seed).uniform(0.3, 3.0, 126)
    factors = {
        (name, spread.tp, bucket): Factor(value=float(of_bucket[bucket]), num_steps=1)
        for name, spread in CONFIGURATION.units.items()
        for bucket in range(126)
    }
    job = replace(at, correction=Correction(factors=factors))
    replicas = [Replica(num_microbatches=1)] * num_replicas
    for name, place in OrchMLLM().assign(job, CONFIGURATION, batch, replicas).units.items():
        lengths, tp = batch.units[name], CONFIGURATION.units[name].tp
        true_ms = COSTS.by_name[name].work(tp).linear * lengths.tokens * of_bucket[buckets(lengths.longest)]
        held = loads(true_ms, place.replica, num_replicas)
        assert held.max() <= (true_ms.sum() + (num_replicas - 1) * true_ms.max()) / num_replicas * (1 + 1e-9)


def test_batches_go_where_their_encoder_outputs_are() -> None:
    replicas = [Replica(num_microbatches=1)] * 6
    crossed = {True: 0, False: 0}
    for seed in range(5):
        batch = table(48, seed)
        places = OrchMLLM().assign(setting(), CONFIGURATION, batch, replicas).units
        costs = replace(COSTS, units=(replace(COSTS.units[0], output_bytes=0.0), COSTS.units[1]))
        alone = OrchMLLM().assign(replace(setting(), costs=costs), CONFIGURATION, batch, replicas).units
        tokens = batch.units["vision"].tokens
        for rearranged, units in ((True, places), (False, alone)):
            outputs = np.zeros((6, 6))
            np.add.at(outputs, (units["vision"].replica, units["llm"].replica), tokens)
            np.fill_diagonal(outputs, 0)
            crossed[rearranged] += max(outputs.sum(axis=0).max(), outputs.sum(axis=1).max())
    assert crossed[True] < 0.95 * crossed[False]
