"""Compiled loops of the validator beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.schedules.schedule import Op

# the compiled code knows plain numbers
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _REDUCE = map(int, Op)

TWICE, UNORDERED, STRANGE, EARLY, MISSING, FULL, OVERTAKEN = range(1, 8)
"""What is wrong with an action; 0: nothing."""


@compiled
def _belongs(op: int, stage: int, split: bool, row_of: Ints, trains: bool) -> bool:
    """Return whether a stage has an action of this kind for a microbatch; ``split``: its backward is in two parts."""
    if op == _F:
        return True
    if op == _B:
        return trains and not split
    if op in (_I, _W):
        return trains and split
    if op in (_RECV_F, _SEND_B):
        return (trains or op == _RECV_F) and stage > 0 and row_of[stage - 1] != row_of[stage]
    return (trains or op == _SEND_F) and stage + 1 < len(row_of) and row_of[stage + 1] != row_of[stage]


@compiled
def _run(codes: Ints, ends: Ints, num_stages: int, num_microbatches: int, positions: Ints, found: Ints) -> None:
    """Run all rows as far as they come; each message is sent once, so that all of a border's have their places."""
    sent = np.zeros((2, num_stages, num_microbatches), dtype=np.int64)
    num_sent = np.zeros((2, num_stages), dtype=np.int64)
    num_received = np.zeros((2, num_stages), dtype=np.int64)
    progress = True
    while progress:
        progress = False
        for row in range(len(ends)):
            start = ends[row - 1] if row else 0
            while start + positions[row] < ends[row]:
                op, stage, index = codes[start + positions[row]]
                if op in (_SEND_F, _SEND_B):
                    way, target = int(op == _SEND_B), stage + (1 if op == _SEND_F else -1)
                    sent[way, target, num_sent[way, target]] = index
                    num_sent[way, target] += 1
                elif op in (_RECV_F, _RECV_B):
                    way = int(op == _RECV_B)
                    if num_received[way, stage] == num_sent[way, stage]:
                        break
                    first = sent[way, stage, num_received[way, stage]]
                    if first != index:
                        found[0], found[1], found[2], found[5] = OVERTAKEN, row, positions[row], first
                        return
                    num_received[way, stage] += 1
                positions[row] += 1
                progress = True


@compiled
def _lacks_computations(row: int, split: Flags, row_of: Ints, at: Ints, found: Ints) -> bool:
    """Find a computation of a row that is not done yet: gradients are summed after all of them."""
    for stage in range(len(row_of)):
        if row_of[stage] == row:
            for m in range(split.shape[1]):
                backward = _I if split[stage, m] else _B
                for op in (_F, backward, _W):
                    if (op != _W or split[stage, m]) and not at[stage, op, m]:
                        found[0], found[3], found[4], found[5] = EARLY, op, stage, m
                        return True
    return False


@compiled
def _lacks_actions(row: int, split: Flags, row_of: Ints, trains: bool, at: Ints, found: Ints) -> bool:
    """Find an action that a row does not have."""
    for stage in range(len(row_of)):
        if row_of[stage] == row:
            for m in range(split.shape[1]):
                for op in (_F, _RECV_F, _SEND_F, _B, _I, _RECV_B, _SEND_B, _W):
                    if _belongs(op, stage, bool(split[stage, m]), row_of, trains) and not at[stage, op, m]:
                        found[0], found[3], found[4], found[5] = MISSING, op, stage, m
                        return True
    return False


@compiled
def check(
    codes: Ints, ends: Ints, row_of: Ints, num_microbatches: int, most_in_flight: Ints, positions: Ints, found: Ints
) -> None:
    """Check each row for itself, then run all of them with sends that never block and receives that do.

    Args:
        codes: Op, stage and index of each action. [num_actions, 3]
        ends: Of the rows. [num_rows]
        row_of: Of each stage. [num_stages]
        num_microbatches: Of the step.
        most_in_flight: That a row may hold. [num_rows]
        positions: Filled with the action of each row at which the run ended. [num_rows]
        found: Filled with the first problem, its row and position, and the op, stage and index it names; 0s for none.
    """
    num_stages, num_rows = len(row_of), len(ends)
    split = np.zeros((num_stages, num_microbatches), dtype=np.bool_)
    trains = False
    for here in range(len(codes)):
        op, stage, index = codes[here]
        if op in (_I, _W):
            split[stage, index] = True
        trains = trains or op in (_B, _I)
    at = np.zeros((num_stages, _REDUCE, num_microbatches), dtype=np.int64)  # in its row, counted from 1
    for row in range(num_rows):
        start = ends[row - 1] if row else 0
        lowest, in_flight = -1, 0
        found[1] = row
        for here in range(start, ends[row]):
            op, stage, index = codes[here]
            found[2] = here - start
            if op == _REDUCE:
                for before in range(start, here):
                    if codes[before, 0] == op and codes[before, 1] == stage and codes[before, 2] == index:
                        found[0], found[5] = TWICE, before - start
                        return
                if not trains or row_of[stage] != row:
                    found[0] = STRANGE
                    return
                if lowest >= 0 and index >= lowest:
                    found[0], found[5] = UNORDERED, lowest
                    return
                lowest = index
                if _lacks_computations(row, split, row_of, at, found):
                    return
                continue
            if at[stage, op, index] and row_of[stage] == row:
                found[0], found[5] = TWICE, at[stage, op, index] - 1
                return
            if row_of[stage] != row or not _belongs(op, stage, bool(split[stage, index]), row_of, trains):
                found[0] = STRANGE
                return
            first, second = -1, -1  # ops that must have come, of this stage or of the neighbour in this row
            neighbour = stage
            backward = _I if split[stage, index] else _B
            if op == _F and stage > 0:
                same = row_of[stage - 1] == row
                first, neighbour = (_F, stage - 1) if same else (_RECV_F, stage)
            elif op in (_B, _I):
                second = _F
                if stage + 1 < num_stages:
                    same = row_of[stage + 1] == row
                    after = _I if split[stage + 1, index] else _B
                    first, neighbour = (after, stage + 1) if same else (_RECV_B, stage)
            elif op == _W:
                second = _I
            elif op == _SEND_F:
                second = _F
            elif op == _SEND_B:
                second = backward
            if first >= 0 and not at[neighbour, first, index]:
                found[0], found[3], found[4], found[5] = EARLY, first, neighbour, index
                return
            if second >= 0 and not at[stage, second, index]:
                found[0], found[3], found[4], found[5] = EARLY, second, stage, index
                return
            at[stage, op, index] = here - start + 1
        found[2] = ends[row] - start
        if _lacks_actions(row, split, row_of, trains, at, found):
            return
        for here in range(start, ends[row]):
            op = codes[here, 0]
            in_flight += (op == _F) - (op in (_B, _W))
            if in_flight > most_in_flight[row]:
                found[0], found[2], found[4], found[5] = FULL, here - start, most_in_flight[row], in_flight
                return
    _run(codes, ends, num_stages, num_microbatches, positions, found)
