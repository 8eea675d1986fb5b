"""OrchMLLM as a planner, and the permutations between its phases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_of_planners import COSTS, after_failures, check_places, setting, table

from resilient.planners.balance import loads
from resilient.planners.orchmllm import OrchMLLM
from resilient.planners.permutations import compose, handover, invert, placement
from resilient.planners.planner import Replica
from resilient.planners.uniform import Uniform, in_order

PLANNERS = (OrchMLLM(), OrchMLLM(padded={"vision": 0.0}), OrchMLLM(padded={"vision": 0.01, "llm": 0.0}))
CONFIGURATION = OrchMLLM().configure(setting(), table(200))


def test_the_configuration_is_the_uniform_one() -> None:
    assert Uniform().configure(setting(), table(200)) == CONFIGURATION


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 60),
    replicas=after_failures(),
    seed=st.integers(0, 9),
    planner=st.sampled_from(PLANNERS),
)
def test_every_sample_has_one_place_after_failures(
    count: int, replicas: list[Replica], seed: int, planner: OrchMLLM
) -> None:
    batch = table(count, seed)
    assignment = planner.assign(setting(), CONFIGURATION, batch, replicas)
    check_places(assignment, planner.assign(setting(), CONFIGURATION, batch, replicas), count, replicas)
    turns = [place.microbatch.tolist() for place in assignment.units.values()]
    assert turns[0] == turns[1], "pipelines would wait"


@pytest.mark.parametrize("attention", [0.0, 1.0])
def test_each_phase_is_balanced_over_unequal_replicas(attention: float) -> None:
    job = setting()
    if not attention:
        units = tuple(
            replace(
                unit,
                layers=tuple(
                    replace(
                        layer,
                        curves=tuple(
                            replace(each, forward=replace(each.forward, attention=0.0)) for each in layer.curves
                        ),
                    )
                    for layer in unit.layers
                ),
            )
            for unit in COSTS.units
        )
        job = replace(job, costs=replace(COSTS, units=units))
    replicas = [Replica(num_microbatches=3), Replica(num_microbatches=2, speed=0.6), Replica(num_microbatches=3)]
    batch = table(400)
    assignment = OrchMLLM().assign(job, CONFIGURATION, batch, replicas)
    uniform = in_order(len(batch), replicas)
    for name, place in assignment.units.items():
        tokens = batch.units[name].tokens
        times = loads(tokens, place.replica, 3) / [1, 0.6, 1]
        before = loads(tokens, uniform.replica, 3) / [1, 0.6, 1]
        fair = tokens.sum() / 2.6
        assert times.max() - fair < 0.5 * (before.max() - fair)


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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 30))
def test_permutations_invert_and_compose(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    encoder = placement(draw.integers(0, 4, count))
    language = placement(draw.integers(0, 4, count))
    samples = draw.random(count)
    np.testing.assert_array_equal(compose(invert(encoder), encoder), np.arange(count))
    at_encoder, at_language = np.empty(count), np.empty(count)
    at_encoder[encoder], at_language[language] = samples, samples
    forward = handover(encoder, language)
    arrived, back = np.empty(count), np.empty(count)
    arrived[forward] = at_encoder
    np.testing.assert_array_equal(arrived, at_language)
    back[invert(forward)] = arrived
    np.testing.assert_array_equal(back, at_encoder)
    np.testing.assert_array_equal(invert(forward), handover(language, encoder))


def test_places_are_slot_after_slot_in_the_order_of_samples() -> None:
    assert placement(np.array([1, 0, 2, 0, 1])).tolist() == [2, 0, 4, 1, 3]
