"""Compiled loops that planners share. Import it where it is needed: it loads numba.

Two of them sort by hand, as a planner has 20 ms a step for 153,600 samples over 2,560 bins. Measured with
``benchmarks/planners.py kernels``: :func:`descending` takes 0.9 ms and numpy's stable sort 11 ms; :func:`spread`, with
tournaments, takes 5 to 8 ms and with heaps of :mod:`heapq`, compiled as well, 27 to 45 ms.
"""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

_DIGIT_BITS = 11
_NUM_DIGITS = 6
"""Enough for 64 bits."""


@compiled
def descending(items: Floats) -> Ints:
    """Return the order from the largest item, >= +0.0, to the smallest; equal ones by position.

    Digit by digit from the last: the bits of such numbers, read as integers, are in the numbers' order. Whole numbers
    have few digits that differ.
    """
    count = np.zeros((_NUM_DIGITS, 1 << _DIGIT_BITS), dtype=np.int64)
    low = (1 << _DIGIT_BITS) - 1
    keys, next_keys = ~items.view(np.int64), np.empty(len(items), dtype=np.int64)
    order, next_order = np.arange(len(items)), np.empty(len(items), dtype=np.int64)
    for key in keys:
        for digit in range(_NUM_DIGITS):
            count[digit, (key >> (_DIGIT_BITS * digit)) & low] += 1
    for digit in range(_NUM_DIGITS):
        if count[digit].max() == len(items):
            continue
        before = 0
        for value in range(low + 1):
            here = count[digit, value]
            count[digit, value] = before
            before += here
        for i in range(len(items)):
            value = (keys[i] >> (_DIGIT_BITS * digit)) & low
            place = count[digit, value]
            count[digit, value] = place + 1
            next_keys[place], next_order[place] = keys[i], order[i]
        keys, next_keys = next_keys, keys
        order, next_order = next_order, order
    return order


@compiled
def largest_of(items: Floats, bins: Ints, num_bins: int) -> Floats:
    """Return the largest item of each bin, 0 where there is none: 30 times as fast as numpy's ``maximum.at``."""
    found = np.zeros(num_bins)
    for i in range(len(items)):
        found[bins[i]] = max(found[bins[i]], items[i])
    return found


@compiled
def tournament_starts(starts: Ints) -> Ints:
    """Return where tournaments start, and the end, whose sizes are powers of 2 that hold groups with these starts."""
    first = np.zeros(len(starts), dtype=np.int64)
    for group in range(len(starts) - 1):
        size = 1
        while size < starts[group + 1] - starts[group]:
            size *= 2
        first[group + 1] = first[group] + size
    return first


@compiled
def set_up(lost: Ints, loser: Ints, count: int) -> None:
    """Write down a tournament in which nobody has anything yet: the leftmost has won.

    Args:
        lost: What the loser at each inner node has; those that are not there have more than any. [size, a power of 2]
        loser: Who it is: its leaf. [size]
        count: Who is there.
    """
    size = len(lost)
    for node in range(1, size):
        leaf = 2 * node + 1
        while leaf < size:
            leaf *= 2
        loser[node] = leaf - size
        lost[node] = 0 if leaf - size < count else np.iinfo(np.int64).max


@compiled
def play_again(lost: Ints, loser: Ints, root: int, end: int, leaf: int, key: int) -> tuple[int, int]:
    """Play a winner's way to the root again, without branches, now that it has more; of equal ones the left one wins.

    Args:
        lost: What the losers have, of all tournaments.
        loser: Who they are.
        root: Where the tournament starts in both.
        end: Where it ends.
        leaf: The winner.
        key: What it has now.

    Returns:
        Who wins now, and what it has.
    """
    node = end - root + leaf
    while node > 1:
        from_right = node & 1
        node >>= 1
        other_key, other = lost[root + node], loser[root + node]
        swap = other_key < key + from_right
        lost[root + node] = key if swap else other_key
        loser[root + node] = leaf if swap else other
        key = other_key if swap else key
        leaf = other if swap else leaf
    return leaf, key


@compiled
def spread(items: Floats, order: Ints, speeds: Floats, members: Ints, starts: Ints) -> Ints:
    """Give items in order to the bin that is done first; of equally fast bins that is the one with the least load.

    Each speed has a tournament of its bins: inner nodes hold who lost there, by load and then by position, so only the
    winner's way from its leaf to the root is played again. Loads are compared as the integers that their bits are, for
    which there are moves without branches.

    Args:
        items: Weights, >= 0. [num_items]
        order: Of the items, or of some.
        speeds: Work per time of bins, each number once. [num_speeds]
        members: The bins of each speed, one speed after the other, ascending within. [num_bins]
        starts: Where each speed's bins start, and the end. [num_speeds + 1]

    Returns:
        The bin of each item, -1 where it is not in the order. [num_items]
    """
    first = tournament_starts(starts)
    lost, loser = np.empty(first[-1], dtype=np.int64), np.empty(first[-1], dtype=np.int64)
    for speed in range(len(speeds)):
        own = slice(first[speed], first[speed + 1])
        set_up(lost[own], loser[own], starts[speed + 1] - starts[speed])
    winner, won = np.zeros(len(speeds), dtype=np.int64), np.zeros(len(speeds))
    chosen = np.full(len(items), -1)
    for item in order:
        best, finish = 0, np.inf
        for speed in range(len(speeds)):
            done = (won[speed] + items[item]) / speeds[speed]
            if done < finish or (
                done == finish and members[starts[speed] + winner[speed]] < members[starts[best] + winner[best]]
            ):
                best, finish = speed, done
        chosen[item] = members[starts[best] + winner[best]]
        won[best] += items[item]
        winner[best], won.view(np.int64)[best] = play_again(
            lost, loser, first[best], first[best + 1], winner[best], won.view(np.int64)[best]
        )
    return chosen


@compiled
def deal(items: Floats, order: Ints, first: Ints, end: Ints, turn: Ints, num_bins: int) -> Ints:
    """Give items to bins: those of a turn to as many heaps, of which the larger goes to the bin with less so far.

    Args:
        items: >= 0. [num_items]
        order: All of their positions, turn after turn, in each those of the same bins after each other.
        first: Of the bins that each item may go to. [num_items]
        end: One past the last one.
        turn: Of each item.
        num_bins: Of all items.
    """
    bins, sums = np.zeros(len(items), np.int64), np.zeros(num_bins)
    start = 0
    while start < len(order):
        one = order[start]
        stop = start + 1
        while stop < len(order) and turn[order[stop]] == turn[one] and first[order[stop]] == first[one]:
            stop += 1
        heaps = np.zeros(end[one] - first[one])
        for item in order[start:stop]:
            least = heaps.argmin()
            bins[item] = least
            heaps[least] += items[item]
        of_heap = np.empty(len(heaps), np.int64)
        of_heap[np.argsort(-heaps, kind="mergesort")] = first[one] + np.argsort(
            sums[first[one] : end[one]], kind="mergesort"
        )
        for item in order[start:stop]:
            bins[item] = of_heap[bins[item]]
        sums[of_heap] += heaps
        start = stop
    return bins


@compiled
def subset_sums(weights: Floats, starts: Ints, num_quanta: int) -> tuple[Ints, Ints, Floats]:
    """Find which sums subsets of a group have, in quanta of the group's sum, as a bit set that remembers how it grew.

    Args:
        weights: Of items, group after group, >= 0. [num_items]
        starts: Where each group starts, and the end. [num_groups + 1]
        num_quanta: Parts of a group's sum; weights are rounded to them.

    Returns:
        The items' weights in quanta, ``[num_items]``. For each group and sum in quanta, the last item of the first
        subset found with it: what is left without the item was found before it. And the sum of that subset's weights,
        not a number where there is none, ``[num_groups, num_sums]`` both.
    """
    num_groups = len(starts) - 1
    most = 0
    for group in range(num_groups):
        most = max(most, starts[group + 1] - starts[group])
    sizes = np.zeros(len(weights), dtype=np.int64)
    last = np.full((num_groups, num_quanta + most // 2 + 2), -1)
    sums = np.full(last.shape, np.nan)
    for group in range(num_groups):
        first, end = starts[group], starts[group + 1]
        total = weights[first:end].sum()
        sums[group, 0] = 0.0
        reached = 0
        for item in range(first, end):
            size = int(np.rint(weights[item] / total * num_quanta)) if total > 0 else 0
            if size == 0:
                continue
            sizes[item] = size
            for rest in range(reached, -1, -1):
                if not np.isnan(sums[group, rest]) and np.isnan(sums[group, rest + size]):
                    last[group, rest + size] = item
                    sums[group, rest + size] = sums[group, rest] + weights[item]
            reached += size
    return sizes, last, sums


@compiled
def nearest_sums(sums: Floats, wanted: Floats) -> Ints:
    """Return for each group the sums nearest to some, the smaller of two as near.

    Args:
        sums: As :func:`subset_sums` returns them.
        wanted: In quanta, >= 0. [num_groups, num_wanted]
    """
    found = np.zeros(wanted.shape, dtype=np.int64)
    num_sums = sums.shape[1]
    for group in range(wanted.shape[0]):
        for i in range(wanted.shape[1]):
            below = min(int(wanted[group, i]), num_sums - 1)
            above = below + 1
            while np.isnan(sums[group, below]):
                below -= 1
            while above < num_sums and np.isnan(sums[group, above]):
                above += 1
            nearer = above < num_sums and above - wanted[group, i] < wanted[group, i] - below
            found[group, i] = above if nearer else below
    return found
