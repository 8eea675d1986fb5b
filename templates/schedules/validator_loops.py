"""Compiled loops of the validator beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Op

# the compiled code knows plain numbers
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _REDUCE = map(int, Op)
_NONE, _INPUTS, _ALL = map(int, Backward)

TWICE, UNORDERED, STRANGE, EARLY, MISSING, FULL, OVERTAKEN = range(1, 8)
"""What is wrong with an action; 0: nothing."""

NUM_FOUND = 5
"""A problem, its row and position, and up to two numbers that it is told by."""


@compiled
def _first_left(rows: Ints, at: Ints, row: int, among: Flags) -> int:
    """Return the first action of some that a row does not have yet."""
    return int(np.flatnonzero((rows == row) & (at == 0) & among)[0])


@compiled
def check_rows(
    codes: Ints,
    ends: Ints,
    backward_of: Ints,
    stage_rows: Ints,
    number: Ints,
    rows: Ints,
    needs: Ints,
    first_more: Ints,
    more: Ints,
    computes: Flags,
    found: Ints,
) -> None:
    """Check each row for itself: it has its actions, each once, after what it needs of the row.

    Args:
        codes: Of a schedule. [num_actions, 5]
        ends: Of the rows. [num_rows]
        backward_of: Of each stage.
        stage_rows: Of each stage.
        number: As in ``Requirements``, like the next four.
        rows: Likewise.
        needs: Likewise.
        first_more: Likewise.
        more: Likewise.
        computes: Whether what has a number is a computation.
        found: Filled with the first problem, or with zeros. [NUM_FOUND]
    """
    at = np.zeros(len(rows), dtype=np.int64)  # in its row, counted from 1
    left = np.zeros((len(ends) + 1, 2), dtype=np.int64)  # of each row's computations, and of the rest
    for each in range(len(rows)):
        left[rows[each], 0 if computes[each] else 1] += 1
    for row in range(len(ends)):
        start = ends[row - 1] if row else 0
        lowest = -1
        found[1] = row
        for here in range(start, ends[row]):
            found[2] = here - start
            if codes[here, 0] == _REDUCE:
                stage, index = codes[here, 1], codes[here, 2]
                for before in range(start, here):
                    if codes[before, 0] == _REDUCE and codes[before, 1] == stage and codes[before, 2] == index:
                        found[0], found[3] = TWICE, before - start
                        return
                if backward_of[stage] != _ALL or stage_rows[stage] != row:
                    found[0] = STRANGE
                    return
                if lowest >= 0 and index >= lowest:
                    found[0], found[3] = UNORDERED, lowest
                    return
                if left[row, 0]:
                    found[0], found[3] = EARLY, _first_left(rows, at, row, computes)
                    return
                lowest = index
                continue
            own = number[here]
            if rows[own] != row:
                found[0] = STRANGE
                return
            if at[own]:
                found[0], found[3] = TWICE, at[own] - 1
                return
            for need in needs[own]:
                if need >= 0 and not at[need]:
                    found[0], found[3] = EARLY, need
                    return
            for need in more[first_more[own] : first_more[own + 1]]:
                if not at[need]:
                    found[0], found[3] = EARLY, need
                    return
            at[own] = here - start + 1
            left[row, 0 if computes[own] else 1] -= 1
        found[2] = ends[row] - start
        if left[row].any():
            found[0], found[3] = MISSING, _first_left(rows, at, row, computes if left[row, 0] else ~computes)
            return


@compiled
def check_memory(codes: Ints, ends: Ints, backward_of: Ints, parts: Ints, most: Ints, found: Ints) -> None:
    """Count the cells that rows keep for their backwards.

    Args:
        codes: Of a schedule whose rows are right. [num_actions, 5]
        ends: Of the rows. [num_rows]
        backward_of: Of each stage.
        parts: Of each stage's cells. [num_stages, num_cells]
        most: That a row may keep. [num_rows]
        found: Filled with the first problem, or with zeros. [NUM_FOUND]
    """
    num_ended = np.zeros(parts.shape, dtype=np.int64)
    for row in range(len(ends)):
        start = ends[row - 1] if row else 0
        in_flight = 0
        for here in range(start, ends[row]):
            op, stage, index = codes[here, 0], codes[here, 1], codes[here, 2]
            if op == _F and backward_of[stage] != _NONE:
                in_flight += 1
            elif op in (_B, _W) or (op == _I and backward_of[stage] == _INPUTS):
                num_ended[stage, index] += 1
                in_flight -= num_ended[stage, index] == parts[stage, index]
            if in_flight > most[row]:
                found[:] = FULL, row, here - start, most[row], in_flight
                return


@compiled
def run_dry(
    codes: Ints,
    ends: Ints,
    num_stages: int,
    num_cells: int,
    num_parts: int,
    num_flows: int,
    positions: Ints,
    found: Ints,
) -> None:
    """Run all rows as far as they come, with sends that never block and receives that do.

    Args:
        codes: Of a schedule whose rows are right: each message is sent once, so that all of a border's have their
            places. [num_actions, 5]
        ends: Of the rows. [num_rows]
        num_stages: Of the graph.
        num_cells: Likewise.
        num_parts: Likewise.
        num_flows: Likewise.
        positions: Filled with the action of each row at which the run ended. [num_rows]
        found: Filled with the first problem, or with zeros. [NUM_FOUND]
    """
    sent = np.zeros((2, num_stages, num_cells * num_parts), dtype=np.int64)
    num_sent = np.zeros((2, num_stages), dtype=np.int64)
    num_received = np.zeros((2, num_stages), dtype=np.int64)
    flow_sent = np.zeros((2, num_flows), dtype=np.bool_)
    progress = True
    while progress:
        progress = False
        for row in range(len(ends)):
            start = ends[row - 1] if row else 0
            while start + positions[row] < ends[row]:
                op, stage, index, part, flow = codes[start + positions[row]]
                way, message = int(op in (_SEND_B, _RECV_B)), index * num_parts + part
                if op in (_SEND_F, _SEND_B):
                    if flow >= 0:
                        flow_sent[way, flow] = True
                    else:
                        target = stage - 1 if way else stage + 1
                        sent[way, target, num_sent[way, target]] = message
                        num_sent[way, target] += 1
                elif op in (_RECV_F, _RECV_B) and flow >= 0:
                    if not flow_sent[way, flow]:
                        break
                elif op in (_RECV_F, _RECV_B):
                    if num_received[way, stage] == num_sent[way, stage]:
                        break
                    first = sent[way, stage, num_received[way, stage]]
                    if first != message:
                        found[:] = OVERTAKEN, row, positions[row], first // num_parts, first % num_parts
                        return
                    num_received[way, stage] += 1
                positions[row] += 1
                progress = True
