"""The compiled loop that makes cuts with several stages in each row better, bound by bound.

Import it where it is needed: it loads numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.search.chunk_rows import times_of_layers
from resilient.templates.search.stage_cost_model import SingleDeviceCosts

_FARTHEST = 2
"""Layers by which a move shifts a bound at most."""

_SHIFTS = 2 * _FARTHEST + 1

_PLAIN, _AGAIN, _PUT_OFF, _HELD, _KEPT, _WAITING, _USED, _INPUTS, _INPUTS_WAITING, _LARGEST = range(10)
"""What is known of a stage: its times, twice what its schedule puts off, and its bytes as costs have them."""


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
        moves: What bounds can move by. [moves, stages + 1]
        cuts: Those to begin with, which are changed. [cuts, stages + 1]
    """
    num_stages = cuts.shape[1] - 1
    near = np.empty((num_stages, _SHIFTS, _SHIFTS, _LARGEST + 1), dtype=np.int64)
    still = np.zeros(num_stages + 1, dtype=np.int64)
    for bounds in cuts:
        _rate_near(costs, rows, bounds, near)
        lacking, took = _step(costs, rows, near, bounds, still)
        while True:
            best = -1
            for index in range(len(moves)):
                if not _possible(bounds, moves[index]):
                    continue
                lacks, takes = _step(costs, rows, near, bounds, moves[index])
                if lacks < lacking or (lacks == lacking and takes < took):
                    best, lacking, took = index, lacks, takes
            if best < 0:
                break
            bounds += moves[best]
            _rate_near(costs, rows, bounds, near)


@compiled
def _possible(bounds: Ints, move: Ints) -> bool:
    least = 1
    for stage in range(len(bounds) - 1):
        least = min(least, bounds[stage + 1] + move[stage + 1] - bounds[stage] - move[stage])
    return least > 0


@compiled
def _rate_near(costs: SingleDeviceCosts, rows: Rows, bounds: Ints, near: Ints) -> None:
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
                of[_PLAIN], of[_AGAIN] = times_of_layers(costs, rows.source[stage], i, j)
                of[_PUT_OFF] = 2 * (costs.weights[j] - costs.weights[i])
                of[_HELD], of[_KEPT], of[_WAITING] = costs.held[i, j], costs.kept[i, j], costs.waiting[i, j]
                of[_USED], of[_LARGEST] = costs.workspace[i, j], costs.largest[i, j]
                of[_INPUTS], of[_INPUTS_WAITING] = costs.inputs[i, j], costs.waiting_inputs[i, j]


@compiled
def _step(costs: SingleDeviceCosts, rows: Rows, near: Ints, bounds: Ints, move: Ints) -> tuple[int, float]:
    """Return the bytes that a moved cut lacks, and how long its step takes."""
    num_rows, num_chunks = rows.stages.shape
    lacking, slowest, filling, sum_filling = 0, -1, 0, 0
    for row in range(num_rows):
        plain = again = 0
        for stage in rows.stages[row]:
            of = near[stage, move[stage] + _FARTHEST, move[stage + 1] + _FARTHEST]
            plain, again = plain + of[_PLAIN], again + of[_AGAIN]
        checkpoints = False
        if rows.memory > 0:
            kept = _bytes(costs.within, rows, near, row, bounds, move, 0)
            checkpoints = rows.checkpoints and kept > rows.memory
            if checkpoints:
                kept = _bytes(costs.within, rows, near, row, bounds, move, 1)
            lacking += max(0, kept - rows.memory)
        time, fills = again if checkpoints else plain, 0
        for stage in rows.stages[row]:
            of = near[stage, move[stage] + _FARTHEST, move[stage + 1] + _FARTHEST]
            fills += of[_AGAIN] if checkpoints else max(0, of[_PLAIN] - of[_PUT_OFF])
        sum_filling += fills
        if time > slowest or (time == slowest and fills > filling):
            slowest, filling = time, fills
    fill = (sum_filling - filling) / num_chunks
    return lacking, fill + costs.sync[bounds[1] + move[1]] + rows.num_microbatches * slowest


@compiled
def _bytes(within: Ints, rows: Rows, near: Ints, row: int, bounds: Ints, move: Ints, again: int) -> int:
    """Return what a row of a moved cut holds, with activations kept or with checkpoints."""
    kept, waiting, used = (_INPUTS, _INPUTS_WAITING, _LARGEST) if again else (_KEPT, _WAITING, _USED)
    most = held = once = 0
    num_chunks = rows.stages.shape[1]
    for moment in range(rows.counts.shape[2]):
        moving = 0
        for chunk, stage in enumerate(rows.stages[row]):
            of, count = (
                near[stage, move[stage] + _FARTHEST, move[stage + 1] + _FARTHEST],
                rows.counts[chunk, row, moment],
            )
            moving += count[0] * of[kept] + count[1] * of[waiting]
            if chunk + 1 < num_chunks and rows.stages[row, chunk + 1] == stage + 1:  # it hands on to itself
                moving -= count[0] * within[bounds[stage + 1] + move[stage + 1], 1]
                moving -= within[bounds[stage + 1] + move[stage + 1], 0]
        most = max(most, moving)
    for stage in rows.stages[row]:
        of = near[stage, move[stage] + _FARTHEST, move[stage + 1] + _FARTHEST]
        held, once = held + of[_HELD], max(once, of[used])
    return held + most + once
