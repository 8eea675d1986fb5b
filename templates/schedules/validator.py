"""Checks that a schedule can run and computes a whole step; says where one cannot.

It shares nothing with what makes schedules, so that each checks the other. The loops over all actions are compiled
(:mod:`resilient.templates.schedules.validator_loops`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.templates.schedules.schedule import Action, Op, Schedule

_FIELDS = 6
"""Numbers by which a problem is told."""

_CONTEXT = 6
"""Positions shown before and after a failing one."""


class ScheduleError(ValueError):
    """A schedule cannot run. The message shows rows (side by side) by position, failing actions as ``>2F0<``."""

    def __init__(self, problem: str, schedule: Schedule, failing: Sequence[tuple[int, int]]) -> None:
        super().__init__(f"{problem}\n{_table(schedule, set(failing))}")


def validate(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Check that a schedule can run and computes a whole step (or, without any backward, a whole evaluation).

    Each stage is in one row and runs every microbatch once: forward before backward, whole or in two parts, each
    computation after its receive and before its send. Gradients are summed after a row's last backward, in descending
    order of states. Every message that is received was sent, over each border in the same order; and a dry run with
    blocking receives ends.

    Args:
        schedule: The schedule.
        max_in_flight: Per row, the most (stage, microbatch) pairs that may wait for their backward at once.

    Raises:
        ScheduleError: It cannot; the message shows where.
    """
    from resilient.templates.schedules.validator_loops import check

    _check_numbers(schedule)
    limits = np.full(len(schedule.ends), len(schedule.codes)) if max_in_flight is None else np.asarray(max_in_flight)
    found = np.zeros(_FIELDS, dtype=np.int64)
    positions = np.zeros(len(schedule.ends), dtype=np.int64)
    row_of, ends = np.asarray(schedule.row_of, dtype=np.int64), np.asarray(schedule.ends, dtype=np.int64)
    codes = schedule.codes.astype(np.int64)
    check(codes, ends, row_of, schedule.num_microbatches, limits.astype(np.int64), positions, found)
    _raise(schedule, *found.tolist())
    check_ended(schedule, positions.tolist())


def _raise(schedule: Schedule, problem: int, row: int, position: int, op: int, stage: int, index: int) -> None:
    """Say in words what was found, if anything; the last three numbers are the other action that it is about."""
    from resilient.templates.schedules import validator_loops as loops

    length = len(schedule.row(row))
    action = schedule.row(row)[position] if position < length else None
    other = Action(stage, Op(op), index)
    here = [(row, position)]
    if problem == loops.TWICE:
        raise ScheduleError(f"{action} stands twice", schedule, [(row, index), *here])
    if problem == loops.UNORDERED:
        raise ScheduleError(f"{action} must come before state {index}'s", schedule, here)
    if problem == loops.STRANGE:
        raise ScheduleError(f"{action} has no place in row {row}", schedule, here)
    if problem == loops.EARLY:
        raise ScheduleError(f"{action} must come after {other}", schedule, here)
    if problem == loops.MISSING:
        raise ScheduleError(f"{other} is missing", schedule, here)
    if problem == loops.FULL:
        text = f"row {row} must keep at most {stage} microbatches in flight, got {index}"
        raise ScheduleError(text, schedule, here)
    if problem == loops.OVERTAKEN:
        raise ScheduleError(f"{action} comes when microbatch {index} was sent before it", schedule, here)


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


def _check_numbers(schedule: Schedule) -> None:
    """Check what the other checks take for granted: each stage and each microbatch has an action."""
    if not len(schedule.codes):
        raise ScheduleError("a schedule must have actions, got none", schedule, [(0, 0)])
    indices = np.where(schedule.codes[:, 0] == Op.REDUCE, 0, schedule.codes[:, 2])
    large = np.flatnonzero(np.maximum(schedule.codes[:, 1], indices) >= len(schedule.codes))
    if large.size:
        row = int(np.searchsorted(schedule.ends, large[0], side="right"))
        position = int(large[0]) - (0, *schedule.ends)[row]
        action = schedule.row(row)[position]
        problem = f"{action} must have numbers below {len(schedule.codes)}, as many as there are actions"
        raise ScheduleError(problem, schedule, [(row, position)])


def _table(schedule: Schedule, failing: set[tuple[int, int]]) -> str:
    """Return rows (side by side) by position as text, near the failing positions, which are marked."""
    length = max([len(actions) for actions in schedule.rows] + [position + 1 for _, position in failing])
    shown = [i for i in range(length) if any(abs(i - position) <= _CONTEXT for _, position in failing)]
    lines = [["", *(f"row {row}" for row in range(len(schedule.rows)))]]
    for before, i in zip([-1, *shown], shown, strict=False):
        if i != before + 1:
            lines.append(["..."])
        cells = [str(actions[i]) if i < len(actions) else "" for actions in schedule.rows]
        marked = (f">{cell}<" if (row, i) in failing else f" {cell} " for row, cell in enumerate(cells))
        lines.append([str(i), *marked])
    if shown[-1] + 1 < length:
        lines.append(["..."])
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines
    )
