"""Compiled loops of :mod:`resilient.planners.groups`. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.planners.balance import Floats
from resilient.planners.kernels import compiled
from resilient.planners.samples import Ints


@compiled
def best_fit(sizes: Floats, order: Ints) -> tuple[Ints, Ints]:
    """Put sizes, in shares of a rank, in order to the open group with the least room that is enough."""
    bins, least = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    used = np.zeros(len(sizes))
    count = 0
    for item in order:
        size, best, room = sizes[item], -1, np.inf
        for group in range(count):
            left = least[group] - (used[group] + size)
            if 0 <= left < room:
                best, room = group, left
        if best < 0:
            best = count
            least[best] = max(1, int(np.ceil(size)))
            count += 1
        bins[item] = best
        used[best] += size
    return bins, least[:count].copy()


@compiled
def min_max_degrees(times: Floats, least: Ints) -> Ints:
    """Run the dynamic program over groups and ranks, take the fewest ranks that reach its value, widen with the rest.

    ``reach[i, j]``: the slowest of the first i groups, on at most j ranks.
    """
    groups, ranks = times.shape
    reach = np.full((groups + 1, ranks + 1), np.inf)
    reach[0] = 0.0
    before = 0
    for i in range(1, groups + 1):
        fewest = least[i - 1]
        for j in range(before + fewest, ranks + 1):
            value = np.inf
            for degree in range(fewest, j - before + 1):
                value = min(value, max(reach[i - 1, j - degree], times[i - 1, degree - 1]))
            reach[i, j] = value
        before += fewest
    bound, left = reach[groups, ranks], ranks
    chosen = np.empty(groups, dtype=np.int64)
    for i in range(groups, 0, -1):
        degree = least[i - 1]
        while times[i - 1, degree - 1] > bound:
            degree += 1
        chosen[i - 1] = degree
        left -= degree
    while left > 0:
        slowest, wider = -1, 0
        for group in range(groups):
            now = times[group, chosen[group] - 1]
            if slowest >= 0 and now <= times[slowest, chosen[slowest] - 1]:
                continue
            for degree in range(chosen[group] + 1, chosen[group] + left + 1):
                if times[group, degree - 1] < now:
                    slowest, wider = group, degree
                    break
        if slowest < 0:
            break
        left -= wider - chosen[slowest]
        chosen[slowest] = wider
    return chosen
