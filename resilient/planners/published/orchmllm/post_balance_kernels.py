"""Compiled loops of the post-balancing beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.planners.packing.kernels import play_again, set_up, tournament_starts
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

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
def fill_ascending(costs: Floats, speeds: Floats, low: float, high: float) -> tuple[Ints, float]:
    """Return the instance of each sample under the least bound, between ``low`` and ``high``, that holds all, and it.

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
    return chosen, high


STEP_BITS = 24
"""Of a key, for the number of tolerances; the other bits are the highest of the squares'."""


@compiled
def fill_by_key(items: Floats, order: Ints, speeds: Floats, members: Ints, starts: Ints, tolerance: float) -> Ints:
    """Give items in order to the instance first by (tolerances, squares, position).

    As in :func:`~resilient.planners.packing.kernels.spread`, each speed has a tournament of its instances, of which
    only the winner's way from its leaf to the root is played again. Both parts of a key are one integer. Of the
    winners, the one that is first with the item gets it.

    Args:
        items: Lengths, >= 0. [num_items]
        order: Of the items.
        speeds: Work per time of instances, each number once. [num_speeds]
        members: The instances of each speed, one speed after the other, ascending within. [num_instances]
        starts: Where each speed's instances start, and the end. [num_speeds + 1]
        tolerance: Lengths that count as one step; there are less than ``1 << STEP_BITS`` steps.
    """
    num_speeds, step_size = len(speeds), speeds * tolerance
    first = tournament_starts(starts)
    lost, loser = np.empty(first[-1], dtype=np.int64), np.empty(first[-1], dtype=np.int64)
    for speed in range(num_speeds):
        own = slice(first[speed], first[speed + 1])
        set_up(lost[own], loser[own], starts[speed + 1] - starts[speed])
    total, total_squares = np.zeros(len(members)), np.zeros(len(members))
    winner, squares = starts[:-1].copy(), np.zeros(1)
    bits = squares.view(np.int64)
    chosen = np.empty(len(items), dtype=np.int64)
    for item in order:
        best, key = -1, 0
        for speed in range(num_speeds):
            who = winner[speed]
            squares[0] = total_squares[who] + items[item] ** 2 / speeds[speed]
            steps = int((total[who] + items[item]) / step_size[speed])
            other_key = (steps << (63 - STEP_BITS)) + (bits[0] >> STEP_BITS)
            if best < 0 or other_key < key or (other_key == key and members[who] < members[winner[best]]):
                best, key = speed, other_key
        who = winner[best]
        chosen[item] = members[who]
        total[who] += items[item]
        total_squares[who] += items[item] ** 2 / speeds[best]
        leaf, _ = play_again(lost, loser, first[best], first[best + 1], who - starts[best], key)
        winner[best] = starts[best] + leaf
    return chosen
