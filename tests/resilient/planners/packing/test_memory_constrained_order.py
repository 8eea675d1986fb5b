"""Orders that memory holds: as wanted where it fits, changed where it does not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.memory_constrained_order import fastest_fitting, fit_order, order_fits, spaced
from resilient.planners.packing.microbatch_order import pipeline_ms


def held(order: npt.ArrayLike, needs: npt.ArrayLike, windows: list[int]) -> bool:
    """Whether what each stage holds in a row is never more than its room."""
    rows = np.asarray(needs, dtype=float)[:, np.asarray(order, dtype=int)].tolist()
    return all(
        sum(row[first : first + window]) <= 1
        for row, window in zip(rows, windows, strict=True)
        for first in range(len(row))
    )


# Parts of 64, whose sums are exact.
SIZES = st.lists(st.integers(0, 70), min_size=1, max_size=12)
JOBS = st.tuples(SIZES, st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 0.5, 0.25])), min_size=1, max_size=3))


@settings(deadline=None)
@given(JOBS, st.data())
def test_an_order_that_fits_stays_and_what_is_found_fits(
    job: tuple[list[int], list[tuple[int, float]]], data: st.DataObject
) -> None:
    sizes, stages = job
    needs, windows = np.outer([part for _, part in stages], sizes) / 64, [window for window, _ in stages]
    order = np.array(data.draw(st.permutations(range(len(sizes)))))
    found = fit_order(order, needs, np.array(windows))
    assert order_fits(order, needs, np.array(windows)) == held(order, needs, windows)
    if held(order, needs, windows):
        assert found is not None
        assert found.tolist() == order.tolist()
    elif found is not None:
        assert sorted(found.tolist()) == list(range(len(sizes)))
        assert held(found, needs, windows)


def test_as_many_large_ones_are_in_a_row_as_fit_beside_the_small_ones_that_follow() -> None:
    needs = np.array([[6, 4, 4, 1, 1, 1, 1, 1, 1]]) / 10
    # After 6 and 4 there would be no room for any; 6, 1 and 1 leave some for 4 and 4.
    found = fit_order(np.arange(9), needs, np.array([3]))
    assert found is not None
    assert (needs[0, found] * 10).tolist() == [6, 1, 1, 4, 4, 1, 1, 1, 1]


def test_one_that_does_not_fit_alone_has_no_order() -> None:
    assert fit_order(np.arange(2), np.array([[0.5, 1.5]]), np.array([1])) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(0, 999))
def test_the_fastest_of_those_that_fit_is_taken(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    times = draw.integers(1, 100, (2, 3, count)).astype(np.float64)
    needs, windows = draw.integers(1, 40, (3, count)) / 64, np.array([3, 2, 1])
    orders = [draw.permutation(count) for _ in range(4)]
    found = fastest_fitting(orders, needs, windows, times[0], times[1])
    fitting = [order for order in orders if held(order, needs, [3, 2, 1])]
    if found is None:
        assert not fitting
    else:
        assert held(found, needs, [3, 2, 1])
        assert all(pipeline_ms(found, *times) <= pipeline_ms(order, *times) for order in fitting)


@settings(deadline=None)
@given(JOBS, st.data())
def test_where_no_other_one_fits_there_is_none(
    job: tuple[list[int], list[tuple[int, float]]], data: st.DataObject
) -> None:
    sizes, stages = [min(size, 64) for size in job[0]], job[1]
    needs, windows = np.outer([part for _, part in stages], sizes) / 64, [window for window, _ in stages]
    order = data.draw(st.permutations(range(len(sizes))))
    position = spaced(np.array(order), needs, np.array(windows)).tolist()
    placed = np.full(max(position) + 1, len(sizes))
    placed[position] = np.arange(len(sizes))
    assert sorted(placed[placed < len(sizes)].tolist()) == list(range(len(sizes)))
    with_none = np.append(needs, np.zeros((len(stages), 1)), axis=1)
    assert held(placed, with_none, windows)
    for place, each in enumerate(placed.tolist()):
        # Whatever comes earlier in the order, and later here, would not have fitted.
        for other in order[: order.index(each)] if each < len(sizes) else order:
            if position[other] > place:
                assert not held(np.append(placed[:place], other), with_none, windows)
