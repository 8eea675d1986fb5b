"""Compiled loops of :mod:`resilient.planners.published.dhp.groups`. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.planners.packing.kernels import descending, spread
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled


@compiled
def best_fit(sizes: Floats, order: Ints) -> tuple[Ints, Ints]:
    """Put sizes, in shares of a rank, in order to the open group with the least room that is enough."""
    bins, least = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes), dtype=np.int64)
    used, smallest = np.zeros(len(sizes)), sizes.min() if len(sizes) else 0.0
    open_groups = np.empty(len(sizes), dtype=np.int64)  # that have room for the smallest
    count = num_open = 0
    for item in order:
        size, best, room = sizes[item], -1, np.inf
        for position in range(num_open):
            group = open_groups[position]
            left = least[group] - (used[group] + size)
            if 0 <= left < room:
                best, room = position, left
        if best < 0:
            best, num_open = num_open, num_open + 1
            open_groups[best] = count
            least[count] = max(1, int(np.ceil(size)))
            count += 1
        group = open_groups[best]
        bins[item] = group
        used[group] += size
        if least[group] - (used[group] + smallest) < 0:  # in their order, in which equal ones are taken
            num_open -= 1
            open_groups[best:num_open] = open_groups[best + 1 : num_open + 1]
    return bins, least[:count].copy()


@compiled
def min_max_degrees(times: Floats, least: Ints) -> Ints:
    """Stage 2: give each group as many ranks as makes the slowest group fastest.

    Groups start from the fewest ranks, and the slowest one that gets faster by it is widened until no rank helps. As
    long as it is the slowest of all, no other choice makes the slowest faster with fewer ranks for any group: it has to
    be widened at least as far. Where it cannot be, the slowest is as fast as it can be, and what is left shortens the
    wait of the others. The paper's dynamic program over groups and ranks finds the same time for the slowest; this
    needs no table.

    Args:
        times: Of each group at each degree, less one. [num_groups, num_ranks]
        least: The degree with which each group holds its sequences; their sum is at most ``num_ranks``. [num_groups]

    Returns:
        The degree of each group. [num_groups]
    """
    groups, ranks = times.shape
    chosen = least.copy()
    done = np.zeros(groups, np.bool_)
    left = ranks - least.sum()
    while left > 0:
        slowest, now = -1, 0.0
        for group in range(groups):
            if not done[group] and (slowest < 0 or times[group, chosen[group] - 1] > now):
                slowest, now = group, times[group, chosen[group] - 1]
        if slowest < 0:
            break
        done[slowest] = True
        for degree in range(chosen[slowest] + 1, chosen[slowest] + left + 1):
            if times[slowest, degree - 1] < now:
                left -= degree - chosen[slowest]
                chosen[slowest] = degree
                done[slowest] = False
                break
    return chosen


@compiled
def times_of(work: Floats, bins: Ints, num_bins: int, ring: Floats, start: Floats) -> Floats:
    """Return the time of each group at each degree. [num_bins, num_ranks]

    Args:
        work: Of each sequence, attention's time, that of the rest, and the tokens. [3, num_sequences]
        bins: The group of each.
        num_bins: Groups.
        ring: Time per token, by degree less one.
        start: Of each call, likewise.
    """
    sums = np.zeros((3, num_bins))
    for item in range(len(bins)):
        for kind in range(3):
            sums[kind, bins[item]] += work[kind, item]
    times = np.empty((num_bins, len(ring)))
    for group in range(num_bins):
        for degree in range(1, len(ring) + 1):
            share = 1.0 / degree
            around = sums[2, group] * ring[degree - 1] * (1.0 - share)
            alone = max(sums[0, group] * share, around)
            times[group, degree - 1] = sums[1, group] * share + alone + start[degree - 1]
    return times


@compiled
def fill(total: Floats, kept: Floats, order: Ints, degrees: Ints) -> Ints:
    """Give sequences in order to the group that has room and is done with it first; all -1 where one has none.

    Args:
        total: Work of each sequence. [num_sequences]
        kept: In shares of a rank, likewise.
        order: Of the sequences.
        degrees: Of the groups, which have as much room. [num_groups]
    """
    bins = np.full(len(total), -1)
    load, held = np.zeros(len(degrees)), np.zeros(len(degrees))
    for item in order:
        best, done = -1, np.inf
        for group in range(len(degrees)):
            after = (load[group] + total[item]) / degrees[group]
            if after < done and held[group] + kept[item] <= degrees[group]:
                best, done = group, after
        if best < 0:
            bins[:] = -1
            break
        bins[item] = best
        load[best] += total[item]
        held[best] += kept[item]
    return bins


@compiled
def widened(
    work: Floats, kept: Floats, ring: Floats, start: Floats, bins: Ints, num_bins: int
) -> tuple[Ints, Ints, float]:
    """Return the groups that are not empty, with the best degrees: numbers of them, degrees, the slowest's time.

    The time is infinite where there are too few ranks.
    """
    held, number = np.zeros(num_bins), np.full(num_bins, -1)
    for item in range(len(bins)):
        held[bins[item]] += kept[item]
        number[bins[item]] = 0
    used = np.flatnonzero(number == 0)
    for group in range(len(used)):
        number[used[group]] = group
    least = np.maximum(np.ceil(held[used]), 1.0).astype(np.int64)
    if least.sum() > len(ring):
        return bins, least, np.inf
    bins = number[bins]
    times = times_of(work, bins, len(used), ring, start)
    degrees = min_max_degrees(times, least)
    slowest = 0.0
    for group in range(len(used)):
        slowest = max(slowest, times[group, degrees[group] - 1])
    return bins, degrees, slowest


@compiled
def fastest_groups(
    work: Floats, kept: Floats, ring: Floats, start: Floats, bins: Ints, least: Ints
) -> tuple[Ints, Ints, float]:
    """Return the group of each sequence, the groups' degrees and the slowest's time, of all packings that are tried."""
    num_ranks, total = len(ring), work[0] + work[1]
    order = descending(total)
    times = times_of(work, bins, len(least), ring, start)
    degrees = min_max_degrees(times, least)
    best, best_ms = bins, 0.0
    for group in range(len(least)):
        best_ms = max(best_ms, times[group, degrees[group] - 1])
    static = num_ranks
    while static:
        count = min(static, len(bins))
        degree = num_ranks // static
        static //= 2
        if min(static, len(bins)) == count:
            continue
        evenly = spread(total, order, np.ones(1), np.arange(count), np.array([0, count]))
        groups, other, slowest = widened(work, kept, ring, start, evenly, count)
        if slowest == np.inf:
            evenly = fill(total, kept, order, np.full(count, degree))
            if evenly[0] < 0:
                continue
            groups, other, slowest = widened(work, kept, ring, start, evenly, count)
        if slowest < best_ms:
            best, degrees, best_ms = groups, other, slowest
    while True:
        again = fill(total, kept, order, degrees)
        if again[0] < 0:
            break
        groups, other, slowest = widened(work, kept, ring, start, again, len(degrees))
        if slowest >= best_ms:
            break
        best, degrees, best_ms = groups, other, slowest
    return best, degrees, best_ms
