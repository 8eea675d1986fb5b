"""What several pipelines are worth at most, by how many nodes they have. Import it where it is needed: it loads numba.

The knapsack is solved by halves. Pipelines in order of their sizes, dealt out in turn, make two halves that differ by
the largest size at most; so what many pipelines are worth follows from what half as many are, for few numbers of nodes
around half of theirs. Up to R pipelines of sizes up to S take log R such steps of S x S sums, however many nodes there
are.

Source: the balanced halves are the Steinitz lemma of one dimension, as in Eisenbrand and Weismantel, "Proximity results
and faster algorithms for Integer Programming using the Steinitz Lemma" (SODA'18).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled

IMPOSSIBLE = -(2**61)
"""The worth of what there is not."""


class Composed(NamedTuple):
    """Pipelines that a number of nodes is to make up.

    Args:
        fill: Of the lines (:mod:`.batch_split`) of a pipeline of each size. [sizes, lines]
        slowest: Likewise.
        round_size: Likewise.
        smallest: The first of the sizes.
        may_idle: Whether a pipeline may do with fewer nodes than it has.
        most: The most pipelines.
        least: The fewest.
        num_nodes: Of all of them together.
        num_microbatches: Of all of them together.
    """

    fill: Ints
    slowest: Ints
    round_size: Ints
    smallest: int
    may_idle: bool
    most: int
    least: int
    num_nodes: int
    num_microbatches: int


@compiled
def least_step(asked: Composed, high: int) -> int:
    """Return the least time, up to ``high``, in which the best pipelines get through all microbatches."""
    fill, slowest, low, num_lines = asked.fill, asked.slowest, 0, _num_lines(asked)
    while low < high:
        middle = (low + high) // 2
        before, after = low, high
        for row in range(len(fill)):
            for line in range(num_lines[row]):
                ends = fill[row, line] + (middle - fill[row, line]) // slowest[row, line] * slowest[row, line]
                before, after = max(before, ends), min(after, ends + slowest[row, line])
        if _get_done(asked, num_lines, middle):
            high = before
        else:
            low = after
    return low


@compiled
def _num_lines(asked: Composed) -> Ints:
    """Return how many lines the rows have; they are filled up with their last one."""
    fill, slowest, round_size = asked.fill, asked.slowest, asked.round_size
    last = fill.shape[1] - 1
    num_lines = np.ones(len(fill), dtype=np.int64)
    for row in range(len(fill)):
        for line in range(last):
            if (
                fill[row, line] != fill[row, last]
                or slowest[row, line] != slowest[row, last]
                or round_size[row, line] != round_size[row, last]
            ):
                num_lines[row] = line + 2
    return num_lines


@compiled
def is_enough(asked: Composed, tau_ns: int) -> bool:
    """Return whether the best pipelines get through all microbatches in a time."""
    return _get_done(asked, _num_lines(asked), tau_ns)


@compiled
def _get_done(asked: Composed, num_lines: Ints, tau_ns: int) -> bool:
    """Return the same, knowing how many lines the rows have."""
    fill, slowest, round_size, smallest, may_idle, most, least, num_nodes, num_microbatches = asked
    each = np.full(smallest + len(fill), IMPOSSIBLE)
    at_most = 0
    for row in range(len(fill)):
        capacity = IMPOSSIBLE
        for line in range(num_lines[row]):
            done = (tau_ns - fill[row, line]) // slowest[row, line] * round_size[row, line]
            if done >= 1:
                capacity = max(capacity, min(done, num_microbatches))
        size = smallest + row
        each[size] = max(capacity, each[size - 1]) if may_idle else capacity
        if each[size] > 0:
            at_most = max(at_most, each[size] * num_nodes // size)
    # Most times are settled by what nodes of the best size would do if they were divisible, or by what pipelines do
    # that are all of one size, but for some of the next.
    if at_most < num_microbatches:
        return False
    for count in range(max(least, 1, -(-num_nodes // (len(each) - 1))), most + 1):
        size, larger = num_nodes // count, num_nodes % count
        alike = (count - larger) * each[size] if each[size] > 0 else IMPOSSIBLE
        if larger > 0:
            alike = alike + larger * each[size + 1] if min(alike, each[size + 1]) > 0 else IMPOSSIBLE
        if alike >= num_microbatches:
            return True
    each = _small_enough(each, num_nodes, num_microbatches)
    return most_worth(each, most, least, num_nodes, num_nodes)[0] >= num_microbatches


@compiled
def _small_enough(each: Ints, num_nodes: int, worth: int) -> Ints:
    """Return what sizes are worth, without the largest: those beside which no others make up for what is missing."""
    best = 0
    for size in range(1, len(each)):
        if each[size] > 0 and (best == 0 or each[size] * best > each[best] * size):
            best = size
    end = len(each)
    while end > best + 1:
        lacking = worth * best - (num_nodes - end + 1) * each[best]
        if each[end - 1] > 0 and each[end - 1] * best >= lacking:
            break
        end -= 1
    return each[:end]


@compiled
def best_sizes(each: Ints, smallest: int, most: int, least: int, num_nodes: int, worth: int) -> Ints:
    """Return the sizes, descending, of pipelines that are worth most; the largest ones, where that leaves the choice.

    Args:
        each: What one of each number of nodes is worth, from 0 on; :data:`IMPOSSIBLE` for 0.
        smallest: The smallest size.
        most: The most pipelines.
        least: The fewest.
        num_nodes: Of all of them together.
        worth: What they are worth at least, known before.
    """
    each = _small_enough(each, num_nodes, worth)
    left, nodes, number = most, num_nodes, 0
    chosen = np.empty(most, dtype=np.int64)
    while nodes:
        # The largest size with which all others can be worth as much as is missing then.
        size = largest = min(len(each) - 1, nodes)
        others = most_worth(each, left - 1, max(least - 1, 0), nodes - largest, nodes - smallest)
        if nodes == num_nodes:
            worth = (each[smallest : largest + 1][::-1] + others).max()
        while each[size] + others[largest - size] != worth:
            size -= 1
        each = each[: size + 1]
        low, high = 1, min(left, nodes // size)
        while low < high:
            count = (low + high + 1) // 2
            rest = most_worth(each, left - count, max(least - count, 0), nodes - count * size, nodes - count * size)[0]
            if count * each[size] + rest == worth:
                low = count
            else:
                high = count - 1
        chosen[number : number + low] = size
        left, least, nodes, number = left - low, max(least - low, 0), nodes - low * size, number + low
        worth -= low * each[size]
    return chosen[:number]


@compiled
def most_worth(each: Ints, most: int, least: int, first: int, last: int) -> Ints:
    """Return what ``least`` to ``most`` pipelines are worth at most, by their nodes: from ``first`` to ``last``.

    Args:
        each: What one of each number of nodes is worth, from 0 on; :data:`IMPOSSIBLE` for 0.
        most: The most pipelines.
        least: The fewest.
        first: The fewest nodes of all of them together, at least 0.
        last: The most nodes of all of them together.
    """
    needed = _of_count(each, least, 0, last)
    # A pipeline without nodes, worth nothing, is one that is not there.
    or_none = each.copy()
    or_none[0] = 0
    begin = max(first - least * (len(each) - 1), 0) if most > least else 0
    others = _of_count(or_none, most - least, begin, last)
    return _joined(needed, others, begin - first, last - first + 1)


@compiled
def _of_count(each: Ints, count: int, first: int, last: int) -> Ints:
    """Return what so many pipelines are worth at most, of ``first`` to ``last`` nodes in total; of none at 0 alone."""
    largest = len(each) - 1
    # Halves of halves: of how many pipelines, and of which numbers of nodes their worth is asked for.
    counts, firsts, lasts = [count], [first], [min(last, count * largest)]
    while counts[-1]:
        begin = max(firsts[-1] - largest * (counts[-1] % 2), 0)
        half = counts[-1] // 2
        firsts.append(max((begin - largest + 1) // 2, 0))
        lasts.append(min((lasts[-1] + largest) // 2, half * largest))
        counts.append(half)
    firsts[-1] = 0
    worth = np.zeros(1, dtype=np.int64)
    for level in range(len(counts) - 2, -1, -1):
        first, last, odd = firsts[level], lasts[level], counts[level] % 2
        begin = max(first - largest * odd, 0)
        worth = _joined(worth, worth, 2 * firsts[level + 1] - begin, last - begin + 1)
        if odd:
            worth = _joined(worth, each, begin - first, last - first + 1)
    return worth


@compiled
def _joined(one: Ints, other: Ints, shift: int, length: int) -> Ints:
    """Return what two sets of pipelines are worth together: the greatest ``one[i] + other[j]`` at ``shift + i + j``."""
    worth = np.full(max(length, 0), IMPOSSIBLE)
    for i in range(len(one)):
        if one[i] > IMPOSSIBLE // 2:
            start, end = max(0, -shift - i), min(len(other), length - shift - i)
            if start < end:
                grown, added = worth[shift + i + start : shift + i + end], other[start:end]
                for j in range(end - start):
                    grown[j] = max(grown[j], one[i] + added[j])
    return worth
