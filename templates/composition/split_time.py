"""The split of a step's microbatches over pipelines. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

_NEVER = 1 << 62
"""More than any time."""
_GUESSES = 8
"""So many times to look at are guessed; then halves decide, so that none takes much longer than by halves alone."""


@compiled
def split(fill: Ints, slowest: Ints, round_size: Ints, rows: Ints, num_microbatches: int) -> Ints:
    """Return the microbatches of each pipeline, as :func:`.batch_split.split_rows` says.

    Args:
        fill: Of the lines (:mod:`.batch_split`) that there are. [rows, lines]
        slowest: Likewise.
        round_size: Likewise.
        rows: The row of each pipeline, one or more.
        num_microbatches: Of all of them together, one each at least.
    """
    num_each = _num_each(rows, len(fill))
    kinds: Ints = np.flatnonzero(num_each)
    step_ns = _least_ns(fill, slowest, round_size, kinds, num_each, num_microbatches)
    least, more, without = np.zeros((3, len(fill)), dtype=np.int64)
    left_over = num_microbatches
    for kind in kinds:
        least[kind] = max(1, ((step_ns - 1 - fill[kind]) // slowest[kind] * round_size[kind]).max())
        by_then = ((step_ns - fill[kind]) // slowest[kind] * round_size[kind]).max()
        more[kind] = max(0, by_then - least[kind])
        # What completes a round that ends then anyway costs nothing.
        done_ns = (fill[kind] + -(-least[kind] // round_size[kind]) * slowest[kind]).min()
        without[kind] = done_ns if done_ns < step_ns else _NEVER
        left_over -= num_each[kind] * least[kind]
    counts = least[rows]
    # By then all get done, so there is somebody for what is left over.
    while left_over > 0:
        next_kind = kinds[0]
        for kind in kinds:
            if _is_before(without, more, kind, next_kind):
                next_kind = kind
        of, at = more[next_kind], without[next_kind]
        for index in range(len(rows)):
            if more[rows[index]] == of and without[rows[index]] == at:
                taken = min(left_over, of)
                counts[index] += taken
                left_over -= taken
        for kind in kinds:
            if more[kind] == of and without[kind] == at:
                more[kind] = 0
    return counts


@compiled
def latest_finish(fill: Ints, slowest: Ints, round_size: Ints, rows: Ints, num_microbatches: int) -> int:
    """Return when the last pipeline is done under :func:`split`, with its arguments."""
    num_each = _num_each(rows, len(fill))
    kinds: Ints = np.flatnonzero(num_each)
    latest = _least_ns(fill, slowest, round_size, kinds, num_each, num_microbatches)
    for kind in kinds:
        latest = max(latest, (fill[kind] + slowest[kind]).min())
    return latest


@compiled
def latest_finish_with_slow(
    fill: Ints,
    slowest: Ints,
    round_size: Ints,
    rows: Ints,
    num_microbatches: int,
    slow_rows: Ints,
    fast_rows: Ints,
    idlest: Ints,
    factors: Floats,
    most_slow: int,
) -> int:
    """Return a time before which the last pipeline is not done, where it is not known which of them have slow nodes.

    By any time, pipelines with slow nodes get through as much less, at least, as those do that lose least by it.

    Args:
        fill: As of :func:`split`, as are the next four. Those that slow nodes may be in have the first line only.
        slowest: Likewise.
        round_size: Likewise.
        rows: Likewise.
        num_microbatches: Likewise.
        slow_rows: The rows of pipelines that slow nodes may be in.
        fast_rows: For each of these the row of the line, first of its row, that it has without any.
        idlest: What the idlest node of each of these takes for a round.
        factors: For each pipeline that has slow nodes, by how much its slowest one takes longer, at least.
        most_slow: The most pipelines that have slow nodes.
    """
    num_each = _num_each(rows, len(fill))
    kinds: Ints = np.flatnonzero(num_each)
    low = high = latest_finish(fill, slowest, round_size, rows, num_microbatches)
    step = low // 64 + 1
    pipelines = fill, slowest, round_size, kinds, num_each, slow_rows, fast_rows, idlest, factors, most_slow
    while _done_with_slow(*pipelines, high) < num_microbatches:
        low, high, step = high + 1, high + step, 2 * step
    while low < high:
        middle = (low + high) // 2
        if _done_with_slow(*pipelines, middle) < num_microbatches:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _done_with_slow(
    fill: Ints,
    slowest: Ints,
    round_size: Ints,
    kinds: Ints,
    num_each: Ints,
    slow_rows: Ints,
    fast_rows: Ints,
    idlest: Ints,
    factors: Floats,
    most_slow: int,
    tau_ns: int,
) -> int:
    """Return what is done by a time at most, of pipelines of which some have slow nodes: at least one by each."""
    done = 0
    for kind in kinds:
        most = 1
        for line in range(fill.shape[1]):
            most = max(most, (tau_ns - fill[kind, line]) // slowest[kind, line] * round_size[kind, line])
        done += num_each[kind] * most
    # Those with the lines that nothing is below are no more than have slow nodes, and they are those that gain most.
    gains, fast = np.empty(len(slow_rows), dtype=np.int64), 0
    for index in range(len(slow_rows)):
        row, without = slow_rows[index], fast_rows[index]
        most = max(1, (tau_ns - fill[row, 0]) // slowest[row, 0] * round_size[row, 0])
        gains[index] = most - max(1, (tau_ns - fill[without, 0]) // slowest[without, 0] * round_size[without, 0])
        fast += num_each[row]
    fast -= most_slow
    for index in np.argsort(gains):
        if fast <= 0:
            break
        done -= min(fast, num_each[slow_rows[index]]) * gains[index]
        fast -= num_each[slow_rows[index]]
    for factor in factors:
        least_lost = _NEVER
        for index in range(len(slow_rows)):
            row = slow_rows[index]
            left, slow = tau_ns - fill[row, 0], max(slowest[row, 0], int(idlest[index] * factor))
            most = max(1, left // slowest[row, 0] * round_size[row, 0])
            least_lost = min(least_lost, most - max(1, left // slow * round_size[row, 0]))
        done -= least_lost
    return done


@compiled
def first_done(fill: Ints, slowest: Ints, round_size: Ints, rows: Ints, counts: Ints) -> Ints:
    """Return which of its lines each pipeline is done first with, of equal ones the first.

    Args:
        fill: Of the lines that there are. [rows, lines]
        slowest: Likewise.
        round_size: Likewise.
        rows: The row of each pipeline.
        counts: Its microbatches.
    """
    chosen = np.empty(len(rows), dtype=np.int64)
    for index in range(len(rows)):
        row, least = rows[index], _NEVER
        for line in range(fill.shape[1]):
            done_ns = fill[row, line] + -(-counts[index] // round_size[row, line]) * slowest[row, line]
            if done_ns < least:
                chosen[index], least = line, done_ns
    return chosen


@compiled
def _num_each(rows: Ints, num_rows: int) -> Ints:
    """Return how many pipelines have each row: they get through the same, so only one of them is looked at."""
    num_each = np.zeros(num_rows, dtype=np.int64)
    for row in rows:
        num_each[row] += 1
    return num_each


@compiled
def _is_before(without: Ints, more: Ints, kind: int, other: int) -> bool:
    """Return whether pipelines of a kind get what is left over before those of another."""
    if more[kind] == 0 or more[other] == 0:
        return more[kind] > more[other]
    if (without[kind] == _NEVER) != (without[other] == _NEVER):
        return without[kind] == _NEVER
    if more[kind] != more[other]:
        return more[kind] > more[other]
    return without[kind] > without[other]


@compiled
def _least_ns(fill: Ints, slowest: Ints, round_size: Ints, kinds: Ints, num_each: Ints, num_microbatches: int) -> int:
    """Return the least time in which pipelines get through all microbatches, at least one each.

    What they do changes only when a layout is done with one round more. Seen from afar it grows evenly with the time,
    so a few guesses come close, each by what was lacking, or too much, at the one before.
    """
    first = kinds[0]
    low, high = 0, (fill[first] + -(-num_microbatches // round_size[first]) * slowest[first]).min()
    per_ns = 0.0
    for kind in kinds:
        per_ns += num_each[kind] * (round_size[kind] / slowest[kind]).max()
    guess, guesses = int(num_microbatches / per_ns), _GUESSES
    while low < high:
        middle = min(max(low, guess), high - 1) if guesses > 0 else (low + high) // 2
        guesses -= 1
        done = 0
        before, after = 0, _NEVER
        for kind in kinds:
            most = 1
            for line in range(fill.shape[1]):
                rounds = (middle - fill[kind, line]) // slowest[kind, line]
                most = max(most, rounds * round_size[kind, line])
                ends = fill[kind, line] + rounds * slowest[kind, line]
                before, after = max(before, ends), min(after, ends + slowest[kind, line])
            done += num_each[kind] * most
        if done >= num_microbatches:
            high = before
        else:
            low = after
        guess = middle + int((num_microbatches - done) / per_ns)
    return low
