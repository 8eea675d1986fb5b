"""Checks that a schedule can run and computes a whole step; says where one cannot.

It shares nothing with what makes schedules, so that each checks the other. The loops over all actions are compiled
(:mod:`resilient.templates.schedules.validator_loops`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from resilient.templates.schedules.action_table import action_table
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Op, Schedule

if TYPE_CHECKING:
    from resilient.templates.schedules.validator_loops import Wanted


class ScheduleError(ValueError):
    """A schedule cannot run. The message shows rows by time around the failing actions, which are in brackets."""

    def __init__(self, problem: str, schedule: Schedule, failing: Sequence[tuple[int, int]]) -> None:
        super().__init__(f"{problem}\n{action_table(schedule, failing)}" if failing else problem)


def validate(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Check that a schedule can run and computes a whole step (or, without any backward, a whole evaluation).

    Each stage runs every cell of its lane that has samples: the forward when all that it needs is there, the backward
    part by part, each whole or in two halves, when its gradient is. Gradients are summed after a row's last backward,
    in descending order of states. Every message that is received was sent, over each border of a lane in the same
    order; between units messages may overtake each other. A dry run with blocking receives ends.

    Args:
        schedule: The schedule.
        max_in_flight: Per row, the most (stage, cell) pairs that may wait for their backward at once.

    Raises:
        ScheduleError: It cannot; the message shows where.
    """
    from resilient.templates.schedules.validator_loops import NUM_FOUND, Seen, check

    graph = schedule.graph
    for stage, row in enumerate(graph.row_of):
        if row < 0:
            lane, number = graph.stages[stage]
            raise ScheduleError(f"stage {f'{lane}:' if lane.unit else ''}{number} is in no row", schedule, [])
    limits = np.full(graph.num_rows, len(schedule.codes)) if max_in_flight is None else np.asarray(max_in_flight)
    wanted = _wanted(schedule)
    found = np.zeros(NUM_FOUND, dtype=np.int64)
    positions = np.zeros(graph.num_rows, dtype=np.int64)
    ends, codes = np.asarray(schedule.ends, dtype=np.int64), schedule.codes.astype(np.int64)
    seen = Seen(np.zeros(wanted.actions.shape, np.int64), np.zeros(wanted.messages.shape, np.int64))
    check(codes, ends, graph.tables, wanted, seen, limits.astype(np.int64), positions, found)
    _raise(schedule, *found.tolist())
    check_ended(schedule, positions.tolist())


def _wanted(schedule: Schedule) -> Wanted:
    """Return the actions that the step has; a backward that stands in two halves somewhere is to be in two."""
    from resilient.templates.schedules.validator_loops import Wanted

    tables, codes = schedule.graph.tables, schedule.codes
    row_of, backward_of, lane_of = tables.row_of, tables.backward_of, tables.lane_of
    of_cell = tables.parts[lane_of]
    num_parts = int(of_cell.max(initial=1))
    some, each = of_cell > 0, np.arange(num_parts) < of_cell[:, :, None]
    split = np.zeros(each.shape, bool)
    halves = codes[(codes[:, 0] == Op.BACKWARD_INPUT) | (codes[:, 0] == Op.BACKWARD_WEIGHT)]
    split[halves[:, 1], halves[:, 2], halves[:, 3]] = True
    crossed = (lane_of[1:] == lane_of[:-1]) & (row_of[1:] != row_of[:-1])
    before, after = np.append(False, crossed)[:, None], np.append(crossed, False)[:, None]
    trained = (backward_of > Backward.NONE)[:, None]
    trained_before = np.append(False, trained[:-1])[:, None]
    whole, inputs = ((backward_of == kind)[:, None, None] for kind in (Backward.ALL, Backward.INPUTS))
    actions = np.zeros((len(row_of), Op.REDUCE, *each.shape[1:]), bool)
    actions[:, Op.FORWARD, :, 0] = some
    actions[:, Op.BACKWARD] = each & whole & ~split
    actions[:, Op.BACKWARD_INPUT] = each & (inputs | whole & split)
    actions[:, Op.BACKWARD_WEIGHT] = each & whole & split
    actions[:, Op.RECV_F, :, 0] = some & before
    actions[:, Op.SEND_F, :, 0] = some & after
    actions[:, Op.RECV_B] = each & (after & trained)[:, :, None]
    actions[:, Op.SEND_B] = each & (before & trained_before)[:, :, None]
    flows = tables.flows
    apart = row_of[flows[:, 0]] != row_of[flows[:, 3]]
    returns = apart & (backward_of[flows[:, 0]] > Backward.NONE)
    messages = np.zeros((Op.REDUCE, len(flows)), bool)
    messages[[Op.SEND_F, Op.RECV_F]], messages[[Op.SEND_B, Op.RECV_B]] = apart, returns
    return Wanted(actions, messages)


def _raise(
    schedule: Schedule, problem: int, row: int, position: int, op: int, stage: int, index: int, part: int, flow: int
) -> None:
    """Say in words what was found, if anything; the last five numbers are the other action that it is about."""
    from resilient.templates.schedules import validator_loops as loops

    actions = schedule.row(row)
    action = actions[position] if position < len(actions) else None
    here = [(row, position)]
    if problem == loops.TWICE:
        raise ScheduleError(f"{action} stands twice", schedule, [(row, index), *here])
    if problem == loops.UNORDERED:
        raise ScheduleError(f"{action} must come before state {index}'s", schedule, here)
    if problem == loops.STRANGE:
        raise ScheduleError(f"{action} has no place in row {row}", schedule, here)
    if problem == loops.EARLY:
        raise ScheduleError(f"{action} must come after {schedule.named(op, stage, index, part, flow)}", schedule, here)
    if problem == loops.MISSING:
        raise ScheduleError(f"{schedule.named(op, stage, index, part, flow)} is missing", schedule, here)
    if problem == loops.FULL:
        text = f"row {row} must keep at most {stage} microbatches in flight, got {index}"
        raise ScheduleError(text, schedule, here)
    if problem == loops.OVERTAKEN:
        sent = f"{index}.{part}" if part else index
        raise ScheduleError(f"{action} comes when microbatch {sent} was sent before it", schedule, here)


def check_ended(schedule: Schedule, positions: Sequence[int]) -> None:
    """Check that a run came to the end of every row.

    Args:
        schedule: What was run.
        positions: Per row, the action that could not run, or one past the last one.

    Raises:
        ScheduleError: It did not.
    """
    lengths = np.diff(schedule.ends, prepend=0).tolist()
    blocked = [(row, at) for row, (at, length) in enumerate(zip(positions, lengths, strict=True)) if at < length]
    if blocked:
        waiting = ", ".join(str(schedule.rows[row][position]) for row, position in blocked)
        raise ScheduleError(f"deadlock: {waiting} wait for messages that are never sent", schedule, blocked)
