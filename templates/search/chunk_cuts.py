"""Compiled loops of cuts with several stages in each row: which cut of two chunks keeps all rows within limits.

Two chunks that follow each other are cut together, row by row: for each end of the first chunk's stage the end of the
second one's that leaves least to later rows. No other end need be remembered. (Where a stage that begins later has
larger messages, not all cuts of interleaved chunks are found.)

Import it where it is needed: it loads numba.
"""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.search.chunk_rows import (
    NO_TIME,
    Room,
    left_to_rows,
    row_fits,
    times_of_layers,
)
from resilient.templates.search.stage_cost_model import UNLIMITED, SingleDeviceCosts


@compiled
def _needed(fits: int, plain: int, again: int) -> int:
    """Return the time that a row needs, by what :func:`row_fits` says; more than any time where nothing fits.

    Args:
        fits: That.
        plain: Time with activations kept.
        again: What of it is done again with checkpoints.
    """
    return plain if fits == 0 else plain + again if fits > 0 else NO_TIME


@compiled
def _needed_where_turning(costs: SingleDeviceCosts, room: Room, i: int, middle: int, end: int, plain: int) -> int:
    """Return the same of the last row, whose stages, of layers ``i .. middle - 1 .. end - 1``, follow each other."""
    if plain > room.time or room.memory >= UNLIMITED:
        return plain
    last = len(room.moments) - 1
    moments, others = room.moments[last : last + 1].copy(), room.others[last : last + 1]
    moments[0, :, 4:] -= moments[0, :, 2:3] * costs.within[middle, 1]  # what is handed on is held once
    memory = room.memory + costs.within[middle, 0]
    fits = row_fits(room.tables.stages, moments, others, 0, i, middle, middle, end, memory)
    again = others[0, 1] - others[0, 0]
    for first, until in ((i, middle), (middle, end)):
        plain_time, again_time = times_of_layers(costs, 0, first, until)
        again += again_time - plain_time
    return _needed(fits, plain, again)


@compiled
def _turned(costs: SingleDeviceCosts, room: Room) -> Room:
    """Return rows that hold no more than they do wherever the last one's second stage goes on with the first one's."""
    moments, last, tables = room.moments.copy(), len(room.moments) - 1, room.tables
    if room.memory >= UNLIMITED:
        return room
    moments[last, :, 4:] -= moments[last, :, 2:3] * costs.within[:, 1].max()
    memory = room.memory + costs.within[:, 0].max()
    return Room(tables, room.source, moments, room.others, room.time, memory, room.first_end)


@compiled
def cut_pair(costs: SingleDeviceCosts, room: Room, first: int, end: int, middles: Ints, ends: Ints) -> int:
    """Cut layers ``first .. end - 1`` into two chunks within the limits.

    Args:
        costs: Of layers.
        room: The rows; two chunks.
        first: First layer.
        end: One past the last one.
        middles: Where the second chunk may begin, in the order in which that is tried.
        ends: Where the stages found end. [2, rows]

    Returns:
        0 where a cut was found, else the least time under which more can be tried.
    """
    num_rows, left, next_time = room.source.shape[1], left_to_rows(costs, room), NO_TIME
    lacking = int(costs.work[end] - costs.work[first] - left[0, 0])
    if end - first > left[0, 1]:
        return NO_TIME
    if lacking > 0:
        return room.time + (lacking + num_rows - 1) // num_rows
    farthest = np.empty((num_rows + 1, end - first + 1), dtype=np.int64)
    came_from = np.empty((num_rows + 1, end - first + 1), dtype=np.int64)
    for middle in middles:
        farthest[:, : middle - first + 1] = -1
        farthest[0, 0] = middle
        for row in range(num_rows):
            lacking = _next_row(costs, room, row, first, middle, end, left[row + 1], farthest, came_from)
            next_time = min(next_time, lacking)
        if farthest[num_rows, middle - first] == end:
            at = middle - first
            for row in range(num_rows - 1, -1, -1):
                ends[0, row], ends[1, row] = first + at, farthest[row + 1, at]
                at = came_from[row + 1, at]
            return 0
    return next_time


@compiled
def _next_row(
    costs: SingleDeviceCosts,
    room: Room,
    row: int,
    first: int,
    middle: int,
    end: int,
    left_rows: Ints,
    farthest: Ints,
    came_from: Ints,
) -> int:
    """Fill in where a row's stages can end; later ones take as much as is ``left_rows`` and a layer each at least.

    Returns the least time of a row under which that would be more.
    """
    following, next_time, limited = room.source.shape[1] - 1 - row, NO_TIME, room.memory < UNLIMITED
    # numbers, and no calls with costs and rooms: what a call takes counts here
    stages, moments, others, memory = room.tables.stages, room.moments, room.others, room.memory
    work, forward, next_backward, time = costs.work, costs.forward, costs.next_backward, room.time
    source, second_source, others_again = room.source[0, row], room.source[1, row], others[row, 1] - others[row, 0]
    left_time, left_layers = left_rows[0], left_rows[1] - middle - end
    for at in range(middle - following - first):
        begin = farthest[row, at]
        if begin < 0:
            continue
        i, j, stop = first + at, begin, end - following
        beside = costs.send[source, i] + costs.send[second_source, begin] + others[row, 0] - work[i] - work[begin]
        if following == 0:
            needed = beside + work[middle] + work[end]
            if limited and needed <= time:
                fits = row_fits(stages, moments, others, row, i, middle, begin, end, memory)
                again = others_again + (forward[middle] - forward[i]) * (next_backward[i] < middle)
                needed = _needed(fits, needed, again + (forward[end] - forward[begin]) * (next_backward[begin] < end))
            if needed > time:
                next_time = min(next_time, needed)
            elif end > farthest[row + 1, middle - first]:
                farthest[row + 1, middle - first], came_from[row + 1, middle - first] = end, at
            continue
        longest = time - beside - work[i + 1]
        stop = max(begin, min(stop, int(np.searchsorted(work, longest, side="right")) - 1))
        if stop < end - following:
            next_time = min(next_time, time + int(work[stop + 1] - longest))
        half = stop  # often all that there is time for fits
        again = others_again + (forward[i + 1] - forward[i]) * (next_backward[i] == i)
        while j < stop:
            needed = beside + work[i + 1] + work[half]
            if limited:
                fits = row_fits(stages, moments, others, row, i, i + 1, begin, half, memory)
                needed = _needed(fits, needed, again + (forward[half] - forward[begin]) * (next_backward[begin] < half))
            if needed <= time:
                j = half
            else:
                stop, next_time = half - 1, min(next_time, needed)
            half = (j + stop + 1) >> 1
        for i_end in range(i + 1, min(middle - following, room.first_end if row == 0 else middle) + 1):
            reached, to_come = farthest[row + 1, i_end - first], work[middle] - work[i_end] + work[end]
            left = to_come - work[j]
            again = others_again + (forward[i_end] - forward[i]) * (next_backward[i] < i_end)
            while j > max(begin, reached):
                needed, left = beside + work[i_end] + work[j], to_come - work[j]
                if limited and needed <= time and left <= left_time and left_layers + i_end + j >= 0:
                    fits = row_fits(stages, moments, others, row, i, i_end, begin, j, memory)
                    needed = _needed(fits, needed, again + (forward[j] - forward[begin]) * (next_backward[begin] < j))
                if needed <= time:
                    break
                j, next_time = j - 1, min(next_time, needed)
            if j == begin:
                break
            if j <= reached or left_layers + i_end + j < 0:
                continue
            if left > left_time:
                next_time = min(next_time, time + (left - left_time + following - 1) // following)
            else:
                farthest[row + 1, i_end - first], came_from[row + 1, i_end - first] = j, at
    return int(next_time)


@compiled
def cut_there_and_back(costs: SingleDeviceCosts, room: Room, ends: Ints) -> int:
    """Cut all layers into two chunks, of which the second one leads back up the rows, within the limits.

    The first row has the first and the last stage, so rows are gone through from both ends of the layers inwards.

    Args:
        costs: Of layers.
        room: The rows; two chunks.
        ends: Where the stages found end. [2, rows]

    Returns:
        0 where a cut was found, else the least time under which more can be tried.
    """
    num_rows, num_layers, left = room.source.shape[1], len(costs.work) - 1, left_to_rows(costs, _turned(costs, room))
    lacking = int(costs.work[num_layers] - left[0, 0])
    if num_layers > left[0, 1]:
        return NO_TIME
    if lacking > 0:
        return room.time + (lacking + num_rows - 1) // num_rows
    begins = np.full((num_rows + 1, num_layers + 1), num_layers + 1)  # of the second stage, the least one
    came_from = np.empty((num_rows + 1, num_layers + 1), dtype=np.int64)
    begins[0, 0] = num_layers
    next_time, limited, work = NO_TIME, room.memory < UNLIMITED, costs.work
    stages, moments, others, memory = room.tables.stages, room.moments, room.others, room.memory
    forward, next_backward, time = costs.forward, costs.next_backward, room.time
    for row in range(num_rows):
        following, source, second_source = num_rows - 1 - row, room.source[0, row], room.source[1, row]
        others_again = others[row, 1] - others[row, 0]
        left_time, left_layers = left[row + 1, 0], left[row + 1, 1]
        for i in range(row, num_layers):
            end = begins[row, i]
            if end > num_layers:
                continue
            earliest = int(np.searchsorted(work, work[end] - time))
            if earliest > 0:
                next_time = min(next_time, work[end] - work[earliest - 1])
            for i_end in range(i + 1, min(end - 2 * following, room.first_end + 1 if row == 0 else end)):
                beside = work[i_end] - work[i] + costs.send[source, i] + others[row, 0] + work[end]
                if following == 0:  # the second stage begins where the first one ends
                    beside += costs.send[second_source, i_end] - work[i_end]
                    needed = _needed_where_turning(costs, room, i, i_end, end, beside)
                    if needed > time:
                        next_time = min(next_time, needed)
                    elif i_end < begins[row + 1, i_end]:
                        begins[row + 1, i_end], came_from[row + 1, i_end] = i_end, i
                    continue
                j, again = max(earliest, i_end + 2 * following), others_again
                again += (forward[i_end] - forward[i]) * (next_backward[i] < i_end)
                while j < min(end, begins[row + 1, i_end]):
                    needed = beside + costs.send[second_source, j] - work[j]
                    if limited and needed <= time:
                        fits = row_fits(stages, moments, others, row, i, i_end, j, end, memory)
                        needed = _needed(fits, needed, again + (forward[end] - forward[j]) * (next_backward[j] < end))
                    if needed <= time:
                        break
                    j, next_time = j + 1, min(next_time, needed)
                earliest = j
                if j == end:
                    break
                if j - i_end > left_layers:
                    continue
                lacking = work[j] - work[i_end] - left_time
                if lacking > 0:
                    next_time = min(next_time, time + (lacking + following - 1) // following)
                elif j < begins[row + 1, i_end]:
                    begins[row + 1, i_end], came_from[row + 1, i_end] = j, i
    for i_end in range(num_layers + 1):
        if begins[num_rows, i_end] == i_end:
            for row in range(num_rows - 1, -1, -1):
                before = came_from[row + 1, i_end]
                ends[0, row], ends[1, row] = i_end, begins[row, before]
                i_end = before
            return 0
    return next_time


@compiled
def even_chunk(costs: SingleDeviceCosts, room: Room, first: int, end: int, ends: Ints) -> None:
    """Cut a chunk within the limits so that stages and rows are as even as can be: the least sum of squared times.

    Args:
        costs: Of layers.
        room: The rows; one chunk, for which there is a cut within the limits.
        first: First layer.
        end: One past the last one.
        ends: Where the stages found end. [rows]
    """
    num_rows, size, limited = room.source.shape[1], end - first, room.memory < UNLIMITED
    stages, moments, others = room.tables.stages, room.moments, room.others
    least = np.full((num_rows + 1, size + 1), np.inf)
    came_from = np.zeros((num_rows + 1, size + 1), dtype=np.int64)
    least[0, 0] = 0.0
    for row in range(num_rows):
        following = num_rows - 1 - row
        for at in range(size - following):
            if least[row, at] == np.inf:
                continue
            for until in range(at + 1, size - following + 1):
                i, j = first + at, first + until
                if row == 0 and j > room.first_end:
                    break
                own, again = times_of_layers(costs, room.source[0, row], i, j)
                whole = own + others[row, 0]
                if limited and whole <= room.time:
                    fits = row_fits(stages, moments, others, row, i, i, i, j, room.memory)
                    own = own if fits == 0 else again if fits > 0 else NO_TIME
                    whole = own + others[row, int(fits > 0)]
                if whole > room.time:
                    break
                total = least[row, at] + float(own) * own + float(whole) * whole
                if total < least[row + 1, until]:
                    least[row + 1, until], came_from[row + 1, until] = total, at
    at = size
    for row in range(num_rows - 1, -1, -1):
        ends[row] = first + at
        at = came_from[row + 1, at]
