"""What numpy does not make of arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.arrays import alike_parts, distinct, ranges


def test_ranges_follow_one_another() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


@given(st.lists(st.integers(0, 50)))
def test_distinct_numbers_are_those_that_sorting_finds(numbers: list[int]) -> None:
    found, own = distinct(np.array(numbers, dtype=np.int64))

    expected, expected_own = np.unique(numbers, return_inverse=True)
    assert (found.tolist(), own.tolist()) == (expected.tolist(), expected_own.tolist())


@pytest.mark.parametrize(
    ("values", "cuts"),
    [
        ([], [0]),
        ([2.0], [0, 1]),
        ([3.0, 2.0, 1.5], [0, 1, 2, 3]),
        ([2.0] * 16, [0, 4, 8, 12, 16]),
        ([3.0] * 4 + [1.5] * 4 + [1.05] * 4, [0, 2, 4, 8, 12]),
        ([6.0, 5.0, 5.0, 1.1, 1.1, 1.1, 1.05, 1.01], [0, 1, 3, 6, 8]),
    ],
)
def test_numbers_are_cut_where_they_differ(values: list[float], cuts: list[int]) -> None:
    assert alike_parts(values, 4) == cuts


@given(st.lists(st.floats(1.0, 50.0)), st.integers(1, 6))
def test_parts_hold_all_numbers_and_are_as_many_as_may_be(values: list[float], most: int) -> None:
    cuts = alike_parts(sorted(values, reverse=True), most)
    assert (cuts[0], cuts[-1]) == (0, len(values))
    assert len(cuts) - 1 == min(most, len(values))
    assert all(first < end for first, end in pairwise(cuts))
