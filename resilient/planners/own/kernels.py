"""Compiled loops of :mod:`resilient.planners.own.spreading`. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

_EVEN = 1 + 5e-4
"""Times an even share: what takes no longer is not made more even."""

_LESS = 1 - 1e-9
"""Times as long has to take what is changed: rounding alone changes nothing."""


_MOST = 10_000_000
"""Items and exchanges that are looked at, which takes some 50 ms."""


@compiled
def even_out(items: Floats, speeds: Floats, before: Floats, chosen: Ints) -> None:
    """Have the slowest bin, time after time, swap an item for a smaller one, or give it away, so that both take less.

    It is the exchange after which the slower of both takes least, or the first one that is even enough.

    Args:
        items: Weights, >= 0. [num_items]
        speeds: Work per time of bins. [num_bins]
        before: What bins have to do before. [num_bins]
        chosen: The bin of each item; changed. [num_items]
    """
    num_items, num_bins = len(items), len(speeds)
    load = before.copy()
    for item in range(num_items):
        load[chosen[item]] += items[item]
    enough = _EVEN * load.sum() / speeds.sum()
    tried = 0
    while tried < _MOST:
        tried += num_items
        slow = int(np.argmax(load / speeds))
        least, given, taken, to = _LESS * load[slow] / speeds[slow], -1, -1, slow
        for item in range(num_items):
            if chosen[item] != slow or least <= enough:
                continue
            # Beyond the items are none: one for each bin.
            for other in range(num_items + num_bins):
                tried += 1
                fast = chosen[other] if other < num_items else other - num_items
                more = items[item] - (items[other] if other < num_items else 0.0)
                ms = max((load[slow] - more) / speeds[slow], (load[fast] + more) / speeds[fast])
                if fast != slow and ms < least:
                    least, given, taken, to = ms, item, other, fast
                    if ms <= enough:
                        break
        if given < 0:
            return
        more = items[given]
        chosen[given] = to
        if taken < num_items:
            more -= items[taken]
            chosen[taken] = slow
        load[slow] -= more
        load[to] += more


@compiled
def give_after(items: Floats, order: Ints, speeds: Floats, before: Floats) -> Ints:
    """Give items in order to the bin that is done with it first, which has something to do before.

    Args:
        items: Weights, >= 0. [num_items]
        order: Of the items.
        speeds: Work per time of bins. [num_bins]
        before: What bins have to do before. [num_bins]
    """
    chosen, load = np.empty(len(items), np.int64), before.copy()
    for item in order:
        chosen[item] = np.argmin((load + items[item]) / speeds)
        load[chosen[item]] += items[item]
    return chosen


@compiled
def fill_descending(costs: Floats, numbers: Ints, speeds: Floats, bound: float, chosen: Ints) -> bool:
    """Fill bins one after the other with items whose sequences cost as much as the costliest; return whether all fit.

    Args:
        costs: Of one sequence of each item, in descending order. [num_items]
        numbers: Of their sequences. [num_items]
        speeds: Work per time of bins. [num_bins]
        bound: What a bin takes at most, a time.
        chosen: The bin of each item; filled. [num_items]
    """
    item = 0
    for place in range(len(speeds)):
        first, count = item, 0
        while item < len(costs) and (count + numbers[item]) * costs[first] <= bound * speeds[place]:
            chosen[item] = place
            count += numbers[item]
            item += 1
    return item == len(costs)
