"""OrchMLLM's balancing: optimal padded batches and their bounds, a total order of loads, unequal speeds."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.published.orchmllm.post_balance import balance_padded, balance_quadratic, cost_bounds
from resilient.planners.published.orchmllm.post_balance_kernels import STEP_BITS
from resilient.templates.common.arrays import Floats, Ints

LENGTHS = st.lists(st.integers(0, 500), max_size=40)


def padded_cost(lengths: list[int], instances: Ints, num_instances: int, squared: float = 0.0) -> Floats:
    """What each instance's batch costs when padded to its longest sample. [num_instances]"""
    longest = np.zeros(num_instances)
    np.maximum.at(longest, instances, lengths)
    return np.bincount(instances, minlength=num_instances) * (longest + squared * longest**2)


def load_key(total: float, squares: float, speed: float, tolerance: float) -> tuple[int, int]:
    """What instances are ordered by: how many tolerances, then the first bits of the sum of squares."""
    bits = np.array([squares / speed]).view(np.int64)
    return int(total / (speed * tolerance)), int(bits[0]) >> STEP_BITS


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


@settings(max_examples=150, deadline=None)
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
@given(lengths=st.lists(st.integers(0, 500), min_size=1, max_size=60), num_batches=st.integers(1, 12))
def test_padded_batches_are_no_worse_than_equal_numbers_and_than_equal_sums(
    lengths: list[int], num_batches: int
) -> None:
    def worst(instances: Ints) -> float:
        return float(padded_cost(lengths, instances, num_batches).max())

    ascending = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
    found = worst(balance_padded(lengths, np.ones(num_batches)))
    assert found <= worst(ascending * num_batches // len(lengths))
    assert found <= worst(longest_first(lengths, np.ones(num_batches)))


def filled_in_order(costs: list[float], speeds: list[float]) -> float:
    """The least time of the slowest instance when instances take ascending costs in this order, by trying all."""
    best = {0: 0.0}
    for speed in speeds:
        after: dict[int, float] = {}
        for start, time in best.items():
            for end in range(start, len(costs) + 1):
                own = (end - start) * costs[end - 1] / speed if end > start else 0.0
                after[end] = min(after.get(end, np.inf), max(time, own))
        best = after
    return best[len(costs)]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 500), max_size=20),
    speeds=st.lists(st.sampled_from([0.2, 0.5, 1.0]) | st.floats(0.2, 2), min_size=1, max_size=5),
    squared=st.sampled_from([0.0, 0.01]),
)
def test_padded_batches_on_unequal_instances_are_the_best_by_speed(
    lengths: list[int], speeds: list[float], squared: float
) -> None:
    chosen = balance_padded(lengths, speeds, squared=squared)
    costs = sorted(length + squared * length**2.0 for length in lengths)
    times = padded_cost(lengths, chosen, len(speeds), squared) / np.array(speeds)
    best = min(filled_in_order(costs, sorted(speeds)), filled_in_order(costs, sorted(speeds, reverse=True)))
    assert times.max() == pytest.approx(best)
    low, high = cost_bounds(costs, speeds)
    assert low * (1 - 1e-9) <= times.max() <= high * (1 + 1e-9)


@pytest.mark.parametrize(("lengths", "slow"), [([1] * 100 + [10], [100]), ([1] * 10 + [100], list(range(10)))])
def test_slow_instances_get_long_samples_where_there_are_many_short_ones(lengths: list[int], slow: list[int]) -> None:
    """Either order of speeds alone is several times worse in one of these."""
    assert np.flatnonzero(balance_padded(lengths, [0.1, 1.0]) == 0).tolist() == slow


def by_plain_rule(lengths: list[int], speeds: list[float], tolerance: float) -> list[int]:
    """The instance of each sample: the best of the first of each speed, with the sample."""
    total, squares = np.zeros(len(speeds)), np.zeros(len(speeds))
    chosen = [0] * len(lengths)
    for item in np.argsort(-np.array(lengths), kind="stable").tolist():
        firsts = [
            min((*load_key(total[i], squares[i], speed, tolerance), i) for i, v in enumerate(speeds) if v == speed)[-1]
            for speed in set(speeds)
        ]
        length = lengths[item]
        chosen[item] = best = min(
            (*load_key(total[i] + length, squares[i] + length**2, speeds[i], tolerance), i) for i in firsts
        )[-1]
        total[best] += length
        squares[best] += length**2
    return chosen


@settings(max_examples=100, deadline=None)
@given(
    lengths=LENGTHS,
    speeds=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=6),
    tolerance=st.sampled_from([1.0, 50.0, 1e6]),
)
def test_each_sample_goes_to_the_instance_with_the_least_key(
    lengths: list[int], speeds: list[float], tolerance: float
) -> None:
    chosen = balance_quadratic(lengths, speeds, tolerance)
    assert chosen.tolist() == by_plain_rule(lengths, speeds, tolerance)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, count=st.integers(1, 6), tolerance=st.sampled_from([1.0, 50.0, 1e6]))
def test_equal_instances_are_ordered_as_the_paper_does(lengths: list[int], count: int, tolerance: float) -> None:
    """By what they have without the sample, which the paper compares."""
    total, squares = [0.0] * count, [0.0] * count
    chosen = balance_quadratic(lengths, np.ones(count), tolerance)
    for item in np.argsort(-np.array(lengths), kind="stable").tolist():
        first = min(range(count), key=lambda i: (*load_key(total[i], squares[i], 1.0, tolerance), i))
        assert chosen[item] == first
        total[first] += lengths[item]
        squares[first] += lengths[item] ** 2


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    speeds=st.lists(st.sampled_from([0.05, 0.5, 1.0]) | st.floats(0.05, 2), min_size=1, max_size=8),
    tolerance=st.floats(0.1, 1000),
)
def test_quadratic_balance_holds_its_bound_on_unequal_instances(
    lengths: list[int], speeds: list[float], tolerance: float
) -> None:
    times = loads(lengths, balance_quadratic(lengths, speeds, tolerance), len(speeds)) / speeds
    bound = (sum(lengths) + (len(speeds) - 1) * max(lengths, default=0)) / sum(speeds) + 2 * tolerance
    assert times.max() <= bound * (1 + 1e-9)


def test_a_slow_instance_does_not_get_the_longest_sample_first() -> None:
    assert balance_quadratic([8, 3, 3, 2], [0.1, 1.0, 1.0], 1.0).tolist() == [1, 2, 2, 2]


@settings(max_examples=200, deadline=None)
@given(
    keys=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=3),
    tolerance=st.integers(1, 40),
)
def test_loads_have_a_total_order(keys: list[tuple[int, int]], tolerance: int) -> None:
    one, two, three = (load_key(total, squares, 1.0, tolerance) for total, squares in keys)
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
        "lengths must be >= 0 and speeds of one instance or more > 0, got lengths down to -1.0 and 1 speeds down to "
        "1.0; leave out instances that do no work"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        balance_padded([-1], [1.0])
    message = "tolerance must be > 1.19e-07, got 0.0; a mean length is a good one"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        balance_quadratic([1], [1.0], 0.0)
