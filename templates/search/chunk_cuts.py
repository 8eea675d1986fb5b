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
def _begun(costs: SingleDeviceCosts, room: Room, row: int, i: int, j: int) -> tuple[int, int, int, int]:
    """Return the layers of a row's stage of the first of two chunks, and the row's times without the other one's."""
    plain, again = times_of_layers(costs, room.source[0, row], i, j)
    return i, j, plain + room.others[row, 0], again + room.others[row, 1]


@compiled
def _needed(
    costs: SingleDeviceCosts, room: Room, row: int, chunk: int, begun: tuple[int, int, int, int], i: int, j: int
) -> int:
    """Return the time that a row needs for layers ``i .. j - 1`` beside its other stages, those begun with them.

    More than any time, where its memory does not hold them; at least so long, where that is more than a row may take.
    """
    plain, again = times_of_layers(costs, room.source[chunk, row], i, j)
    plain += begun[2]
    if plain > room.time or room.memory >= UNLIMITED:
        return plain
    fits = row_fits(room.tables.stages, room.moments, room.others, row, begun[0], begun[1], i, j, room.memory)
    return plain if fits == 0 else again + begun[3] if fits > 0 else NO_TIME


@compiled
def _needed_where_turning(
    costs: SingleDeviceCosts, room: Room, row: int, begun: tuple[int, int, int, int], j: int
) -> int:
    """Return the same of a row whose stage of the first chunk hands on to that of the second."""
    i = begun[1]
    if room.memory >= UNLIMITED:
        return _needed(costs, room, row, 1, begun, i, j)
    moments = room.moments[row : row + 1].copy()  # what is handed on is held once
    for at in range(moments.shape[1]):
        passed = moments[0, at, 2] * costs.within[i, 1]
        moments[0, at, 4], moments[0, at, 5] = moments[0, at, 4] - passed, moments[0, at, 5] - passed
    rest = room.source[:, row : row + 1], moments, room.others[row : row + 1]
    alone = Room(room.tables, *rest, room.time, room.memory + costs.within[i, 0], room.first_end)
    return _needed(costs, alone, 0, 1, begun, i, j)


@compiled
def _turned(costs: SingleDeviceCosts, room: Room) -> Room:
    """Return rows that hold no more than they do wherever the last one's second stage goes on with the first one's."""
    moments, last, tables = room.moments.copy(), len(room.moments) - 1, room.tables
    if room.memory >= UNLIMITED:
        return room
    for at in range(moments.shape[1]):
        passed = moments[last, at, 2] * costs.within[:, 1].max()
        moments[last, at, 4], moments[last, at, 5] = moments[last, at, 4] - passed, moments[last, at, 5] - passed
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
    stages, moments, others, memory = room.tables.stages, room.moments, room.others, room.memory
    left_time, left_layers = left_rows[0], left_rows[1] - middle - end
    for at in range(middle - following - first):
        begin = farthest[row, at]
        if begin < 0:
            continue
        i, j, stop = first + at, begin, end - following
        send = costs.send[room.source[1, row], begin]
        if following == 0:
            own = _begun(costs, room, row, i, middle)
            needed = _needed(costs, room, row, 1, own, begin, end)
            if needed > room.time:
                next_time = min(next_time, needed)
            elif end > farthest[row + 1, middle - first]:
                farthest[row + 1, middle - first], came_from[row + 1, middle - first] = end, at
            continue
        least = _begun(costs, room, row, i, i + 1)
        longest = int(costs.work[begin] + room.time - least[2] - send)
        stop = max(begin, min(stop, int(np.searchsorted(costs.work, longest, side="right")) - 1))
        if stop < end - following:
            next_time = min(next_time, room.time + int(costs.work[stop + 1]) - longest)
        half = stop  # often all that there is time for fits
        while j < stop:
            needed = _needed(costs, room, row, 1, least, begin, half)
            if needed <= room.time:
                j = half
            else:
                stop, next_time = half - 1, min(next_time, needed)
            half = (j + stop + 1) >> 1
        for i_end in range(i + 1, min(middle - following, room.first_end if row == 0 else middle) + 1):
            own, reached = _begun(costs, room, row, i, i_end), farthest[row + 1, i_end - first]
            to_come = costs.work[middle] - costs.work[i_end] + costs.work[end]
            left = to_come - costs.work[j]
            while j > max(begin, reached):
                needed = own[2] + costs.work[j] - costs.work[begin] + send
                left = to_come - costs.work[j]
                possible = needed <= room.time and left <= left_time and left_layers + i_end + j >= 0
                if limited and possible:  # what a call takes counts here
                    fits = row_fits(stages, moments, others, row, i, i_end, begin, j, memory)
                    if fits > 0:
                        needed += own[3] - own[2]
                        needed += costs.forward[j] - costs.forward[begin] if costs.next_backward[begin] < j else 0
                    elif fits < 0:
                        needed = NO_TIME
                if needed <= room.time:
                    break
                j, next_time = j - 1, min(next_time, needed)
            if j == begin:
                break
            if j <= reached or left_layers + i_end + j < 0:
                continue
            if left > left_time:
                next_time = min(next_time, room.time + (left - left_time + following - 1) // following)
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
    for row in range(num_rows):
        following, send = num_rows - 1 - row, costs.send[room.source[1, row]]
        left_time, left_layers = left[row + 1, 0], left[row + 1, 1]
        for i in range(row, num_layers):
            end = begins[row, i]
            if end > num_layers:
                continue
            earliest = int(np.searchsorted(costs.work, costs.work[end] - room.time))
            if earliest > 0:
                next_time = min(next_time, costs.work[end] - costs.work[earliest - 1])
            for i_end in range(i + 1, min(end - 2 * following, room.first_end + 1 if row == 0 else end)):
                own = _begun(costs, room, row, i, i_end)
                if following == 0:  # the second stage begins where the first one ends
                    needed = _needed_where_turning(costs, room, row, own, end)
                    if needed > room.time:
                        next_time = min(next_time, needed)
                    elif i_end < begins[row + 1, i_end]:
                        begins[row + 1, i_end], came_from[row + 1, i_end] = i_end, i
                    continue
                j = max(earliest, i_end + 2 * following)
                while j < min(end, begins[row + 1, i_end]):
                    needed = own[2] + work[end] - work[j] + send[j]
                    if limited and needed <= room.time:  # what a call takes counts here
                        fits = row_fits(stages, moments, others, row, i, i_end, j, end, memory)
                        if fits > 0:
                            needed += own[3] - own[2]
                            needed += costs.forward[end] - costs.forward[j] if costs.next_backward[j] < end else 0
                        elif fits < 0:
                            needed = NO_TIME
                    if needed <= room.time:
                        break
                    j, next_time = j + 1, min(next_time, needed)
                earliest = j
                if j == end:
                    break
                if j - i_end > left_layers:
                    continue
                lacking = work[j] - work[i_end] - left_time
                if lacking > 0:
                    next_time = min(next_time, room.time + (lacking + following - 1) // following)
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
    num_rows, size = room.source.shape[1], end - first
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
                whole = _needed(costs, room, row, 0, (0, 0, room.others[row, 0], room.others[row, 1]), i, j)
                if whole > room.time:
                    break
                plain, again = times_of_layers(costs, room.source[0, row], i, j)
                own = plain if whole == plain + room.others[row, 0] else again
                total = least[row, at] + float(own) * own + float(whole) * whole
                if total < least[row + 1, until]:
                    least[row + 1, until], came_from[row + 1, until] = total, at
    at = size
    for row in range(num_rows - 1, -1, -1):
        ends[row] = first + at
        at = came_from[row + 1, at]
