"""Pairing up and nearest subset sums, against trying everything."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.matching import SubsetSums, pair_up


def all_pairings(num_rows: int, num_columns: int) -> list[tuple[int, ...]]:
    """All partners of the rows, -1 where alone."""
    choices = [*range(num_columns), *[-1] * num_rows]
    return sorted(set(permutations(choices, num_rows)))


def values(partner: tuple[int, ...], together: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> list[float]:
    found = [float(together[row, column] if column >= 0 else rows[row]) for row, column in enumerate(partner)]
    return found + [float(value) for column, value in enumerate(columns) if column not in partner]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 10_000), st.integers(1, 20))
def test_pair_up_equals_trying_all_pairings(num_rows: int, num_columns: int, seed: int, most: int) -> None:
    draw = np.random.default_rng(seed)
    together, rows, columns = (
        draw.integers(0, most, shape).astype(np.float64) for shape in ((num_rows, num_columns), num_rows, num_columns)
    )
    ways = [values(way, together, rows, columns) for way in all_pairings(num_rows, num_columns)]
    partner = tuple(pair_up(together, rows, columns).tolist())
    found = values(partner, together, rows, columns)
    assert len(set(partner) - {-1}) == sum(column >= 0 for column in partner)
    assert (max(found), sum(found)) == min((max(way), sum(way)) for way in ways)


def test_pair_up_matches_a_column_that_must_not_stay_alone() -> None:
    together = np.array([[5.0, 4.0], [9.0, 5.0]])
    rows, columns = np.array([6.0, 6.0]), np.array([7.0, 1.0])
    # Rows alone would do with 5 as well by pairing both with the second column; the first column must not stay alone.
    assert pair_up(together, rows, columns).tolist() == [0, 1]


def sums_of(weights: list[int]) -> dict[tuple[int, ...], int]:
    return {
        chosen: sum(weights[each] for each in chosen)
        for size in range(len(weights) + 1)
        for chosen in combinations(range(len(weights)), size)
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=7), min_size=1, max_size=3), st.data())
def test_nearest_equals_trying_all_subsets_where_weights_are_whole_quanta(
    groups: list[list[int]], data: st.DataObject
) -> None:
    for group in groups:
        group.append(512 - sum(group))
    targets = [[data.draw(st.integers(0, 1100)) / 2 for _ in range(3)] for _ in groups]
    weights = np.array([weight for group in groups for weight in group], dtype=np.float64)
    found = SubsetSums(weights, [len(group) for group in groups])
    subsets, sums = found.nearest(np.array(targets))
    first = 0
    for index, group in enumerate(groups):
        for subset, got, target in zip(subsets[index].tolist(), sums[index].tolist(), targets[index], strict=True):
            assert got == min(sums_of(group).values(), key=lambda each: (abs(each - target), each))
            members = found.members(index, subset)
            assert members == sorted(set(members), reverse=True)
            assert sum(group[each - first] for each in members) == got
        first += len(group)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8), st.floats(0, 1))
def test_nearest_is_off_by_no_more_than_rounding(weights: list[float], part: float) -> None:
    found = SubsetSums(np.array(weights), [len(weights)])
    target = part * sum(weights)
    subsets, sums = found.nearest(np.array([[target]]))
    exact = sum(weights[each] for each in found.members(0, int(subsets[0, 0])))
    assert abs(exact - sums[0, 0]) <= 1e-9 * sum(weights)
    best = min(abs(each - target) for each in sums_of(weights).values())  # pyright: ignore[reportArgumentType]
    assert abs(exact - target) <= best + (len(weights) + 1) * sum(weights) / 1024 + 1e-9


def test_nearest_takes_the_smaller_of_two_as_near() -> None:
    found = SubsetSums(np.array([4.0, 6.0, 6.0]), [3])
    subsets, sums = found.nearest(np.array([[5.0, 5.1, 0.0, 99.0]]))
    assert sums.tolist() == [[4.0, 6.0, 0.0, 16.0]]
    assert [found.members(0, each) for each in subsets[0].tolist()] == [[0], [1], [], [2, 1, 0]]


def test_nearest_of_nothing_is_nothing() -> None:
    found = SubsetSums(np.array([0.0, 0.0, 1.0]), [2, 0, 1])
    subsets, sums = found.nearest(np.array([[0.0], [0.0], [1.0]]))
    assert sums.tolist() == [[0.0], [0.0], [1.0]]
    assert [found.members(group, int(subset)) for group, subset in enumerate(subsets[:, 0])] == [[], [], [2]]
