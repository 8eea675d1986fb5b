"""Steps that several planners share: spreading weights over unequal bins, cutting a chain into stages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from resilient.planners.samples import Ints

Floats = npt.NDArray[np.float64]


def longest_first(weights: npt.ArrayLike, speeds: npt.ArrayLike) -> Ints:
    """Spread weights over bins: from the heaviest on, each to the bin that is done with it first.

    With equal speeds this is the longest-processing-time rule: the fullest bin holds at most 4/3 of the least possible;
    with unequal ones at most twice.

    Args:
        weights: What each item costs, ``[num_items]``, >= 0.
        speeds: Work per time of each bin, ``[num_bins]``, > 0.

    Returns:
        The bin of each item, ``[num_items]``. Equal weights go by position, equal bins by position.

    Raises:
        ValueError: There is no bin, a weight is negative or a speed is not positive.

    Source: Graham (1969); for unequal speeds Gonzalez, Ibarra and Sahni (1977).
    """
    items = np.ascontiguousarray(weights, dtype=np.float64)
    bins = np.ascontiguousarray(speeds, dtype=np.float64)
    if not bins.size or bins.min() <= 0 or items.min(initial=0.0) < 0:
        raise ValueError(
            f"weights must be >= 0 and speeds of one bin or more > 0, got weights down to {items.min(initial=0.0)} and "
            f"{bins.size} speeds down to {bins.min(initial=np.inf)}"
        )
    order = np.argsort(-items, kind="stable")
    levels, group = np.unique(bins, return_inverse=True)
    by_speed = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[by_speed], np.arange(len(levels) + 1))
    return _kernel()(items, order, levels, by_speed.astype(np.int64), starts.astype(np.int64))


def loads(weights: npt.ArrayLike, bins: Ints, num_bins: int) -> Floats:
    """Return the sum of the weights in each bin. [num_bins]"""
    return np.bincount(bins, weights=np.asarray(weights, dtype=np.float64), minlength=num_bins).astype(np.float64)


def cut_chain(costs: npt.ArrayLike, num_stages: int) -> tuple[int, ...]:
    """Cut a chain into contiguous stages such that the most expensive one costs least.

    Args:
        costs: Of each layer, ``[num_layers]``, >= 0.
        num_stages: At most one per layer.

    Returns:
        The number of layers of each stage, at least one; of equally good cuts the one with most layers in front.

    Raises:
        ValueError: More stages than layers, or none.
    """
    layers = np.asarray(costs, dtype=np.float64)
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"num_stages must be 1 to {len(layers)}, the number of layers, got {num_stages}; use fewer")
    sums = np.concatenate(([0.0], np.cumsum(layers)))
    spans = sums[None, :] - sums[:, None]  # [first, end]
    spans[np.tril_indices(len(sums))] = np.inf
    # least[k, i]: the most expensive stage when layers i.. are cut into k stages
    least = np.full((num_stages + 1, len(sums)), np.inf)
    least[0, -1] = 0.0
    for k in range(1, num_stages + 1):
        least[k] = np.maximum(spans, least[k - 1][None, :]).min(axis=1)
    bound, first, counts = least[num_stages, 0], 0, list[int]()
    for k in range(num_stages, 0, -1):
        fits = np.flatnonzero((spans[first] <= bound) & (least[k - 1] <= bound))
        counts.append(int(fits[-1]) - first)
        first = int(fits[-1])
    return tuple(counts)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return njit(cache=True)(_spread)


def _spread(items: Floats, order: Ints, levels: Floats, by_speed: Ints, starts: Ints) -> Ints:
    """Keep one heap of (load, bin) per speed; among their tops choose the earliest finish."""
    heap = by_speed.copy()
    load = np.zeros(len(by_speed))
    chosen = np.empty(len(items), dtype=np.int64)
    for item in order:
        best, finish = 0, np.inf
        for level in range(len(levels)):
            top = heap[starts[level]]
            done = (load[top] + items[item]) / levels[level]
            if done < finish or (done == finish and top < heap[starts[best]]):
                best, finish = level, done
        first, end = starts[best], starts[best + 1]
        top = heap[first]
        load[top] += items[item]
        chosen[item] = top
        hole = first
        while True:
            child = first + 2 * (hole - first) + 1
            if child >= end:
                break
            other = child + 1
            if other < end and (
                load[heap[other]] < load[heap[child]]
                or (load[heap[other]] == load[heap[child]] and heap[other] < heap[child])
            ):
                child = other
            if load[heap[child]] > load[top] or (load[heap[child]] == load[top] and heap[child] > top):
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = top
    return chosen
