"""Spreads samples over bins of unequal speed: evenly, and those that are padded by their lengths."""

from __future__ import annotations

import numpy as np

from resilient.planners.packing.balance import longest_first
from resilient.templates.common.arrays import Floats, Ints

_HALVINGS = 20
"""Of what the slowest bin may take, which is told to a millionth."""


def evenly(weights: Floats, speeds: Floats, before: Floats | None = None) -> Ints:
    """Return the bin of each item: the longest first, then exchanged, the slowest bin with others.

    Args:
        weights: What each item costs, >= 0. [num_items]
        speeds: Work per time of each bin, > 0. [num_bins]
        before: What each bin has to do before; nothing if left out. [num_bins]
    """
    from resilient.planners.own.kernels import even_out, give_after

    if before is None:
        before, chosen = np.zeros(len(speeds)), longest_first(weights, speeds)
    else:
        chosen = give_after(weights, np.argsort(-weights, kind="stable"), speeds, before)
    even_out(weights, speeds, before, chosen)
    return chosen


def by_length(costs: Floats, numbers: Ints, speeds: Floats) -> Ints:
    """Return the bin of each item, whose sequences cost as much as the costliest of their bin: alike ones together.

    Of all ways that fill bins with descending items, the fastest first, it is the one whose slowest bin takes least.

    Args:
        costs: Of one sequence of each item, >= 0. [num_items]
        numbers: Of their sequences; those that have none may be in any bin. [num_items]
        speeds: Work per time of each bin, > 0. [num_bins]
    """
    from resilient.planners.own.kernels import fill_descending

    chosen = np.zeros(len(costs), dtype=np.int64)
    there = np.flatnonzero(numbers > 0)
    order = there[np.argsort(-costs[there], kind="stable")]
    bins = np.argsort(-speeds, kind="stable")
    ordered = costs[order], numbers[order], speeds[bins]
    found, tried = np.zeros((2, len(order)), dtype=np.int64)
    low, high = 0.0, float(costs.max(initial=0.0)) * int(numbers.sum()) / float(speeds.max())
    fill_descending(*ordered, high, found)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if fill_descending(*ordered, middle, tried):
            high, found, tried = middle, tried, found
        else:
            low = middle
    chosen[order] = bins[found]
    return chosen
