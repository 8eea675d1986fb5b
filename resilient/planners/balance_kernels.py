"""Compiled loops of :mod:`resilient.planners.post_balance`. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.planners.balance import Floats
from resilient.planners.kernels import compiled
from resilient.planners.samples import Ints

_EXACT = 1e-12
"""Relative width at which the bisection ends: whole costs below 10^11 are told apart."""


@compiled
def _ends(costs: Floats, speeds: Floats, bound: float, ends: Ints) -> bool:
    """Fill instance after instance with ascending costs, as many as take it at most ``bound``; return whether all fit.

    More samples make the longest no shorter: whether a batch fits is found by halving.
    """
    start, count = 0, len(costs)
    for instance in range(len(speeds)):
        low, high = start, count
        while low < high:
            middle = (low + high + 1) // 2
            if (middle - start) * costs[middle - 1] <= bound * speeds[instance]:
                low = middle
            else:
                high = middle - 1
        ends[instance] = start = low
    return start == count


@compiled
def fill_ascending(costs: Floats, speeds: Floats, low: float, high: float) -> Ints:
    """Return the instance of each sample under the least bound, between ``low`` and ``high``, that holds all.

    Args:
        costs: Ascending. [num_samples]
        speeds: [num_instances]
        low: The bound is not less.
        high: All fit under it, but for rounding.
    """
    ends, best = np.zeros(len(speeds), dtype=np.int64), np.zeros(len(speeds), dtype=np.int64)
    while not _ends(costs, speeds, high, best):
        high *= 1 + _EXACT
    if _ends(costs, speeds, low, ends):
        best[:] = ends
        high = low
    while high - low > _EXACT * high:
        middle = (low + high) / 2
        if _ends(costs, speeds, middle, ends):
            best[:] = ends
            high = middle
        else:
            low = middle
    chosen = np.empty(len(costs), dtype=np.int64)
    start = 0
    for instance in range(len(speeds)):
        chosen[start : best[instance]] = instance
        start = best[instance]
    return chosen


@compiled
def fill_by_key(items: Floats, order: Ints, speeds: Floats, tolerance: float) -> Ints:
    """Give items in order to the instance first by (tolerances, squares, position), from a heap of all."""
    count = len(speeds)
    steps, squares, total = np.zeros(count), np.zeros(count), np.zeros(count)
    heap = np.arange(count)
    chosen = np.empty(len(items), dtype=np.int64)
    for item in order:
        top = heap[0]
        chosen[item] = top
        total[top] += items[item]
        steps[top] = np.floor(total[top] / speeds[top] / tolerance)
        squares[top] += items[item] ** 2 / speeds[top]
        hole = 0
        while True:
            child = 2 * hole + 1
            if child >= count:
                break
            if child + 1 < count and _before(heap[child + 1], heap[child], steps, squares):
                child += 1
            if _before(top, heap[child], steps, squares):
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = top
    return chosen


@compiled
def _before(one: int, other: int, steps: Floats, squares: Floats) -> bool:
    if steps[one] != steps[other]:
        return steps[one] < steps[other]
    if squares[one] != squares[other]:
        return squares[one] < squares[other]
    return one < other
