"""The compiled loop that makes cuts with several stages in each row better, bound by bound.

Import it where it is needed: it loads numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.search.chunk_rows import NO_TIME, times_of_layers
from resilient.templates.search.stage_cost_model import SingleDeviceCosts

_FARTHEST = 2
"""Layers by which a move shifts a bound at most."""

_SHIFTS = 2 * _FARTHEST + 1

_PLAIN, _AGAIN, _PUT_OFF, _HELD, _KEPT, _WAITING, _USED, _INPUTS, _INPUTS_WAITING, _LARGEST = range(10)
"""What is known of a stage: its times, twice what its schedule puts off, and its bytes as costs have them."""

_TIME, _FILLS, _LACKS = range(3)
"""What is known of a row: its time, what of that fills the pipeline, and the bytes that it lacks."""


class Rows(NamedTuple):
    """The rows of a pipeline.

    Args:
        counts: Microbatches that the rows keep of each chunk at each of some moments: those whose backward, or the
            first part of it, is not over, and those that wait between the parts. [chunks, rows, moments, 2]
        source: Where messages before them come from, as the first dimension of the costs' ``send``. [stages]
        stages: The stages of each row. [rows, chunks]
        memory: Most bytes of a row; 0 for no limit.
        checkpoints: Whether rows may checkpoint.
        num_microbatches: Of the step that is to be short.
    """

    counts: Ints
    source: Ints
    stages: Ints
    memory: int
    checkpoints: bool
    num_microbatches: int


@compiled
def move_bounds(costs: SingleDeviceCosts, rows: Rows, moves: Ints, cuts: Ints) -> None:
    """Move the bounds of cuts as long as that makes a step shorter, or less lack, by the best of the moves each time.

    Args:
        costs: Of layers.
        rows: What they are cut for.
        moves: What bounds can move by; the first by nothing. [moves, stages + 1]
        cuts: Those to begin with, which are changed. [cuts, stages + 1]
    """
    # Of moves only the rows are looked at that they change. Numbers, and no views of arrays: what these take counts.
    num_rows, num_chunks = rows.stages.shape
    stages, counts, within, memory, checkpoints = rows.stages, rows.counts, costs.within, rows.memory, rows.checkpoints
    near = np.empty((stages.size, _SHIFTS, _SHIFTS, _LARGEST + 1), dtype=np.int64)
    changes = _changes(stages, moves)
    now, then = np.empty((num_rows, 3), dtype=np.int64), np.empty((num_rows, 3), dtype=np.int64)
    for cut in range(len(cuts)):
        bounds, lacking, took = cuts[cut], NO_TIME, np.inf
        while True:
            _rate_near(costs, rows.source, bounds, near)
            lacks_now = np.int64(0)
            for row in range(num_rows):
                _rate_row(near, stages, counts, within, bounds, moves, 0, row, memory, checkpoints, now)
                lacks_now += now[row, _LACKS]
            best = 0
            for index in range(len(moves)):
                if not _is_possible(bounds, moves, index):
                    continue
                lacks, slowest, filling, sum_filling = lacks_now, -1, 0, 0
                for row in range(num_rows):
                    if changes[index, row]:
                        _rate_row(near, stages, counts, within, bounds, moves, index, row, memory, checkpoints, then)
                        lacks += then[row, _LACKS] - now[row, _LACKS]
                if lacks > lacking:
                    continue
                for row in range(num_rows):
                    time = then[row, _TIME] if changes[index, row] else now[row, _TIME]
                    fills = then[row, _FILLS] if changes[index, row] else now[row, _FILLS]
                    sum_filling += fills
                    if time > slowest or (time == slowest and fills > filling):
                        slowest, filling = time, fills
                takes = (sum_filling - filling) / num_chunks + costs.sync[bounds[1] + moves[index, 1]]
                takes += rows.num_microbatches * slowest
                if lacks < lacking or takes < took:
                    best, lacking, took = index, lacks, takes
            if best == 0:
                break
            bounds += moves[best]


@compiled
def _changes(stages: Ints, moves: Ints) -> Flags:
    """Return whether moves change rows. [moves, rows]"""
    changes = np.zeros((len(moves), len(stages)), dtype=np.bool_)
    for index in range(len(moves)):
        for row in range(len(stages)):
            for stage in stages[row]:
                if moves[index, stage] != 0 or moves[index, stage + 1] != 0:
                    changes[index, row] = True
    return changes


@compiled
def _is_possible(bounds: Ints, moves: Ints, index: int) -> bool:
    """Return whether all stages have layers after a move."""
    for stage in range(len(bounds) - 1):
        if bounds[stage + 1] + moves[index, stage + 1] <= bounds[stage] + moves[index, stage]:
            return False
    return True


@compiled
def _rate_near(costs: SingleDeviceCosts, source: Ints, bounds: Ints, near: Ints) -> None:
    """Fill in what stages cost whose bounds are shifted. [stages, shifts, shifts, what is known]"""
    num_layers = bounds[-1]
    for stage in range(len(bounds) - 1):
        for first in range(_SHIFTS):
            i = bounds[stage] + first - _FARTHEST
            for end in range(_SHIFTS):
                j = bounds[stage + 1] + end - _FARTHEST
                if i < 0 or j <= i or j > num_layers:
                    continue
                of = near[stage, first, end]
                of[_PLAIN], of[_AGAIN] = times_of_layers(costs, source[stage], i, j)
                of[_PUT_OFF] = 2 * (costs.weights[j] - costs.weights[i])
                of[_HELD], of[_KEPT], of[_WAITING] = costs.held[i, j], costs.kept[i, j], costs.waiting[i, j]
                of[_USED], of[_LARGEST] = costs.workspace[i, j], costs.largest[i, j]
                of[_INPUTS], of[_INPUTS_WAITING] = costs.inputs[i, j], costs.waiting_inputs[i, j]


@compiled
def _rate_row(
    near: Ints,
    stages: Ints,
    counts: Ints,
    within: Ints,
    bounds: Ints,
    moves: Ints,
    index: int,
    row: int,
    memory: int,
    checkpoints: bool,
    rated: Ints,
) -> None:
    """Fill in how long a row of a moved cut takes, what of that fills the pipeline, and the bytes that it lacks.

    Args:
        near: As of :func:`_rate_near`.
        stages: As of :class:`Rows`, as are ``counts``, ``memory`` and ``checkpoints``.
        counts: Likewise.
        within: As of the costs.
        bounds: The cut.
        moves: As of :func:`move_bounds`.
        index: Which of them.
        row: The row.
        memory: Its memory.
        checkpoints: Whether it may checkpoint.
        rated: Where that is put. [rows, 3]
    """
    plain = again = fills = lacks = 0
    for chunk in range(stages.shape[1]):
        stage = stages[row, chunk]
        first, end = moves[index, stage] + _FARTHEST, moves[index, stage + 1] + _FARTHEST
        plain, again = plain + near[stage, first, end, _PLAIN], again + near[stage, first, end, _AGAIN]
        fills += max(0, near[stage, first, end, _PLAIN] - near[stage, first, end, _PUT_OFF])
    time = plain
    if memory > 0:
        kept = _bytes(near, stages, counts, within, bounds, moves, index, row, _KEPT, _WAITING, _USED)
        if checkpoints and kept > memory:
            kept = _bytes(near, stages, counts, within, bounds, moves, index, row, _INPUTS, _INPUTS_WAITING, _LARGEST)
            time = fills = again
        lacks = max(0, kept - memory)
    rated[row, _TIME], rated[row, _FILLS], rated[row, _LACKS] = time, fills, lacks


@compiled
def _bytes(
    near: Ints,
    stages: Ints,
    counts: Ints,
    within: Ints,
    bounds: Ints,
    moves: Ints,
    index: int,
    row: int,
    kept: int,
    waiting: int,
    used: int,
) -> int:
    """Return what a row of a moved cut holds, by which bytes of its stages count. Arguments as of :func:`_rate_row`."""
    most = held = once = 0
    num_chunks = stages.shape[1]
    for moment in range(counts.shape[2]):
        moving = 0
        for chunk in range(num_chunks):
            stage, before = stages[row, chunk], counts[chunk, row, moment, 0]
            first, end = moves[index, stage] + _FARTHEST, moves[index, stage + 1] + _FARTHEST
            moving += before * near[stage, first, end, kept]
            moving += counts[chunk, row, moment, 1] * near[stage, first, end, waiting]
            if chunk + 1 < num_chunks and stages[row, chunk + 1] == stage + 1:  # it hands on to itself
                bound = bounds[stage + 1] + moves[index, stage + 1]
                moving -= before * within[bound, 1] + within[bound, 0]
        most = max(most, moving)
    for chunk in range(num_chunks):
        stage = stages[row, chunk]
        first, end = moves[index, stage] + _FARTHEST, moves[index, stage + 1] + _FARTHEST
        held, once = held + near[stage, first, end, _HELD], max(once, near[stage, first, end, used])
    return held + most + once
