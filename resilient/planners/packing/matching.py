"""Pairing things up, and moving work between the two of a pair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.planners.packing.balance import loads
from resilient.templates.common.arrays import Floats, Ints

QUANTA = 1024
"""Parts of the sum of all weights that :class:`SubsetSums` tells apart."""


class SubsetSums:
    """The sums that subsets of groups of weights have, told apart to 1/1024 of a group's sum.

    Args:
        weights: Group after group, ``[num_items]``, >= 0.
        counts: Of each group.
    """

    def __init__(self, weights: Floats, counts: npt.ArrayLike) -> None:
        from resilient.planners.packing.kernels import subset_sums

        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        totals = loads(weights, np.repeat(np.arange(len(starts) - 1), np.diff(starts)), len(starts) - 1)
        self._totals = np.where(totals > 0, totals, np.inf)[:, None]
        self._sizes, self._last, self._sums = subset_sums(np.ascontiguousarray(weights), starts, QUANTA)

    def nearest(self, targets: Floats) -> tuple[Ints, Floats]:
        """Find for each group subsets whose sums, in quanta, are nearest to targets; of two as near the smaller one.

        Args:
            targets: The sums that are wanted, >= 0. [num_groups, num_targets]

        Returns:
            The subsets, for :meth:`members`, and the sums of their weights without rounding.
        """
        from resilient.planners.packing.kernels import nearest_sums

        subset = nearest_sums(self._sums, targets / self._totals * QUANTA)
        return subset, np.take_along_axis(self._sums, subset, axis=1)

    def members(self, group: int, subset: int) -> list[int]:
        """Return the positions of a subset's weights among all, descending."""
        found: list[int] = []
        while subset:
            found.append(int(self._last[group, subset]))
            subset -= int(self._sizes[found[-1]])
        return found


def pair_up(together: Floats, rows_alone: Floats, columns_alone: Floats) -> Ints:
    """Pair rows with columns, or leave them alone, such that the largest value there is then is least.

    The values are those of pairs, and of rows and columns that stay alone. Of the ways with the least largest value,
    one with the least sum of values is chosen.

    Args:
        together: The value of each pair, ``[num_rows, num_columns]``.
        rows_alone: Of each row that stays alone.
        columns_alone: Of each column that stays alone.

    Returns:
        The column of each row, -1 where it stays alone. [num_rows]
    """
    num_rows, num_columns = together.shape
    if not num_rows or not num_columns:
        return np.full(num_rows, -1)
    table = np.full((num_rows + num_columns,) * 2, np.inf)
    table[:num_rows, :num_columns] = together
    table[np.arange(num_rows), num_columns + np.arange(num_rows)] = rows_alone
    table[num_rows + np.arange(num_columns), np.arange(num_columns)] = columns_alone
    table[num_rows:, num_columns:] = -np.inf  # stand-ins that are not needed
    partner = match_all(table)[:num_rows]
    return np.where(partner < num_columns, partner, -1)


def match_all(table: Floats) -> Ints:
    """Match each row with a column such that the largest value there is then is least, and then their sum.

    Args:
        table: The value of each pair; infinite where it must not be, minus infinity where it does not count. Some
            matching of finite values has to exist. [num, num]

    Returns:
        The column of each row.

    Source: bisection over the values, each time a test for a perfect matching; a bottleneck assignment (Gross 1959).
    """
    from scipy.optimize import linear_sum_assignment  # pyright: ignore[reportMissingTypeStubs]
    from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]
    from scipy.sparse.csgraph import maximum_bipartite_matching  # pyright: ignore[reportMissingTypeStubs]

    real = table[np.isfinite(table)]
    least = max(table.min(axis=1).max(), table.min(axis=0).max())
    values = np.unique(real[real >= least])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if (maximum_bipartite_matching(csr_array(table <= values[middle])) < 0).any():
            low = middle + 1
        else:
            high = middle
    costs = np.where(table <= values[low], np.maximum(table, 0), np.inf) if len(values) else np.zeros_like(table)
    return np.asarray(linear_sum_assignment(costs)[1]).astype(np.int64)
