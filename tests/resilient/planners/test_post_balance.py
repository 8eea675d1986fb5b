"""OrchMLLM's balancing: optimal padded batches and their bounds, a total order of loads, unequal speeds."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.post_balance import balance_padded, balance_quadratic, cost_bounds, load_key, padded_cost

LENGTHS = st.lists(st.integers(0, 500), max_size=40)
SPEEDS = st.lists(st.floats(0.2, 2), min_size=1, max_size=6)


def fits(lengths: list[int], num_batches: int, bound: float) -> bool:
    """First fit in ascending order, written down plainly."""
    batches, size = 1, 0
    for length in sorted(lengths):
        size += 1
        if size * length > bound:
            batches, size = batches + 1, 1
        if length > bound:
            return False
    return batches <= num_batches


@settings(max_examples=500, deadline=None)
@given(lengths=st.lists(st.integers(0, 500), min_size=1, max_size=40), num_batches=st.integers(1, 12))
def test_the_upper_bound_is_always_enough(lengths: list[int], num_batches: int) -> None:
    low, high = cost_bounds(lengths, np.ones(num_batches))
    assert fits(lengths, num_batches, high)
    worst = padded_cost(lengths, balance_padded(lengths, np.ones(num_batches)), num_batches).max()
    assert low <= worst <= high


def test_a_bound_without_the_padding_is_too_small() -> None:
    """Neither the mean sum nor the longest sample is enough: short samples are padded, too."""
    lengths = [1, 100, 1, 100, 1, 100]
    assert not fits(lengths, 2, sum(lengths) / 2)
    assert not fits(lengths, 2, max(lengths))
    assert fits(lengths, 2, cost_bounds(lengths, np.ones(2))[1])
    assert padded_cost(lengths, balance_padded(lengths, np.ones(2)), 2).max() == 300


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_batches=st.integers(1, 3),
    squared=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_padded_batches_are_those_of_brute_force(lengths: list[int], num_batches: int, squared: float) -> None:
    chosen = balance_padded(lengths, np.ones(num_batches), squared=squared)
    best = min(
        padded_cost(lengths, np.array(each), num_batches, squared).max()
        for each in itertools.product(range(num_batches), repeat=len(lengths))
    )
    assert padded_cost(lengths, chosen, num_batches, squared).max() == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, speeds=SPEEDS, squared=st.sampled_from([0.0, 0.01]))
def test_padded_batches_hold_the_bounds_on_unequal_instances(
    lengths: list[int], speeds: list[float], squared: float
) -> None:
    chosen = balance_padded(lengths, speeds, squared=squared)
    costs = np.array(lengths) + squared * np.array(lengths) ** 2.0
    low, high = cost_bounds(costs, speeds)
    times = padded_cost(lengths, chosen, len(speeds), squared) / np.array(speeds)
    assert chosen.shape == (len(lengths),)
    assert low * (1 - 1e-9) <= times.max() <= high * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, speeds=SPEEDS, tolerance=st.sampled_from([1.0, 50.0, 1e6]))
def test_each_sample_goes_to_the_instance_with_the_least_key(
    lengths: list[int], speeds: list[float], tolerance: float
) -> None:
    total, squares = np.zeros(len(speeds)), np.zeros(len(speeds))
    expected: dict[int, int] = {}
    for item in np.argsort(-np.array(lengths), kind="stable").tolist():
        keys = [
            (np.floor(t / v / tolerance), s, i) for i, (t, s, v) in enumerate(zip(total, squares, speeds, strict=True))
        ]
        instance = min(keys)[-1]
        expected[item] = instance
        total[instance] += lengths[item]
        squares[instance] += lengths[item] ** 2 / speeds[instance]
    chosen = balance_quadratic(lengths, speeds, tolerance)
    assert chosen.tolist() == [expected[item] for item in range(len(lengths))]


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=3),
    tolerance=st.integers(1, 40),
)
def test_loads_have_a_total_order(loads: list[tuple[int, int]], tolerance: int) -> None:
    one, two, three = (load_key(total, squares, 1.0, tolerance) for total, squares in loads)
    assert (one < two) + (two < one) + (one == two) == 1
    assert not (one <= two <= three) or one <= three


def test_sums_within_a_tolerance_of_each_other_are_no_order() -> None:
    """Why keys are needed: three loads can come each before the next, in a circle."""

    def before(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one[1] < other[1] if abs(one[0] - other[0]) < 10 else one[0] < other[0]

    circle = [(0, 3), (8, 2), (16, 1)]
    assert before(circle[1], circle[0])
    assert before(circle[2], circle[1])
    assert before(circle[0], circle[2])
    assert sorted(circle, key=lambda load: load_key(*load, 1.0, 10)) == [(8, 2), (0, 3), (16, 1)]


def test_what_cannot_be_balanced_is_an_error() -> None:
    message = (
        "lengths must be >= 0 and speeds of one instance or more > 0, got lengths down to -1.0 and 1 speeds down to 1.0"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        balance_padded([-1], [1.0])
    message = "tolerance must be > 0, got 0.0; a mean length is a good one"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        balance_quadratic([1], [1.0], 0.0)
