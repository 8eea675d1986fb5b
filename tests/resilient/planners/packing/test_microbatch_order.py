"""The order of microbatches: times are those of the simulation, and no order that is known is better."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.microbatch_order import fill_intervals, pipeline_ms, reorder
from resilient.templates.common.arrays import Floats
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate


@st.composite
def times(draw: st.DrawFn) -> tuple[Floats, Floats]:
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    forward = rng.lognormal(0, draw(st.sampled_from([0.0, 0.3, 1.0])), shape)
    return forward, forward * rng.uniform(0, 2, (shape[0], 1))


@settings(max_examples=60, deadline=None)
@given(times(), st.randoms(use_true_random=False))
def test_times_are_those_of_the_simulation(given_times: tuple[Floats, Floats], draw: Random) -> None:
    forward, backward = given_times
    order = list(range(forward.shape[1]))
    draw.shuffle(order)
    schedule = generate(ScheduleKind.ONE_F_ONE_B, *forward.shape)
    costs = ActionCosts(forward_ms=forward[:, order], backward_input_ms=backward[:, order])
    assert pipeline_ms(order, forward, backward) == simulate(schedule, costs).iteration_ms


@settings(max_examples=60, deadline=None)
@given(times())
def test_no_known_order_is_better(given_times: tuple[Floats, Floats]) -> None:
    forward, backward = given_times
    order = reorder(forward, backward)
    count = forward.shape[1]
    assert sorted(order.tolist()) == list(range(count))
    np.testing.assert_array_equal(order, reorder(forward, backward))
    found = pipeline_ms(order, forward, backward)
    heuristic = fill_intervals(forward, backward)
    ascending = np.argsort((forward + backward).sum(axis=0), kind="stable")
    for other in (range(count), ascending, heuristic):
        assert found <= pipeline_ms(other, forward, backward)
    assert sorted(heuristic.tolist()) == list(range(count))
    stages = len(forward)
    sizes = np.rint(forward * 1e6) + np.rint(backward * 1e6)
    ranks = np.argsort(sizes.sum(axis=0), kind="stable")
    if stages > 1 and count >= 2 * stages - 1:
        assert heuristic[0] == ranks[0]
        assert set(heuristic[count - stages + 1 :]) == set(ranks[1:stages])
    else:
        np.testing.assert_array_equal(heuristic, ranks)


def test_the_search_beats_thirty_random_orders() -> None:
    draw = np.random.default_rng(3)
    gains: list[float] = []
    for _ in range(5):
        forward = np.stack([draw.lognormal(0, 0.6, 24) * 10, *np.full((5, 24), 12.0)])
        best = min(pipeline_ms(draw.permutation(24), forward, 2 * forward) for _ in range(30))
        gains.append(best / pipeline_ms(reorder(forward, 2 * forward), forward, 2 * forward))
    assert min(gains) > 1.02


def test_forwards_fill_the_intervals() -> None:
    forward = np.array([[1.0, 2.0, 6.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    backward = np.array([[1.0, 2.0, 6.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    # Microbatch 0 is back from the other stage after 2 + 2 ms: 4 fits. Then 4 is, 3 ms after 0 is done: 3 fits.
    assert fill_intervals(forward, backward).tolist() == [0, 4, 3, 2, 1]


def test_later_intervals_last_until_the_next_gradient_is_back() -> None:
    forward = np.array([[1.0, 2.0, 6.0, 3.0, 4.0], [5.0] * 5])
    # Microbatch 0 is back after 5 + 5 ms: 2 fits best. The first stage is done with 0 after 12 ms, and 2 is back from
    # the second after 21 ms: of 3 and 4 ms, 4 is nearer to 9 ms.
    assert fill_intervals(forward, forward).tolist() == [0, 2, 4, 3, 1]


def test_times_that_do_not_fit_are_refused() -> None:
    message = (
        "forward_ms and backward_ms must be [num_stages, num_microbatches] with times >= 0, got shapes (1, 2) and "
        "(1, 2), times down to -1.0; give one time per stage and microbatch"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        reorder([[1.0, -1.0]], [[1.0, 1.0]])
