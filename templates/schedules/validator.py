"""Checks that a schedule can run and computes a whole step; says where one cannot.

It shares nothing with what makes schedules, so that each checks the other. The loops over all actions are compiled
(:mod:`resilient.templates.schedules.validator_loops`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.schedules.action_table import action_table
from resilient.templates.schedules.requirements import Requirements, requirements
from resilient.templates.schedules.schedule import Schedule


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
        ValueError: ``max_in_flight`` is not of the graph's rows.
    """
    from resilient.templates.schedules import validator_loops as loops

    graph, tables = schedule.graph, schedule.graph.tables
    for stage, row in enumerate(graph.row_of):
        if row < 0:
            lane, number = graph.stages[stage]
            raise ScheduleError(f"stage {f'{lane}:' if lane.unit else ''}{number} is in no row", schedule, [])
    asked = requirements(schedule)
    ends, codes = np.asarray(schedule.ends, dtype=np.int64), schedule.codes.astype(np.int64)
    found = np.zeros(loops.NUM_FOUND, dtype=np.int64)
    loops.check_rows(
        codes,
        ends,
        tables.backward_of,
        tables.row_of,
        asked.number,
        asked.row,
        asked.needs,
        asked.first_more,
        asked.more,
        asked.computes,
        found,
    )
    _raise(schedule, asked, *found.tolist())
    if max_in_flight is not None:
        if len(max_in_flight) != graph.num_rows:
            rows = f"list each of the {graph.num_rows} rows"
            raise ArgumentError("max_in_flight", rows, len(max_in_flight), "list one number per row")
        most = np.asarray(max_in_flight, dtype=np.int64)
        loops.check_memory(codes, ends, tables.backward_of, tables.parts[tables.lane_of], most, found)
        _raise(schedule, asked, *found.tolist())
    positions = np.zeros(graph.num_rows, dtype=np.int64)
    num_stages, _, num_cells, num_parts = asked.shape
    loops.run_dry(codes, ends, num_stages, num_cells, num_parts, asked.num_flows, positions, found)
    _raise(schedule, asked, *found.tolist())
    check_ended(schedule, positions.tolist())


def _raise(
    schedule: Schedule, asked: Requirements, problem: int, row: int, position: int, number: int, other: int
) -> None:
    """Say in words what was found, if anything."""
    from resilient.templates.schedules import validator_loops as loops

    if not problem:
        return
    actions = schedule.row(row)
    action = actions[position] if position < len(actions) else None
    here = [(row, position)]
    if problem == loops.TWICE:
        raise ScheduleError(f"{action} stands twice", schedule, [(row, number), *here])
    if problem == loops.UNORDERED:
        raise ScheduleError(f"{action} must come before state {number}'s", schedule, here)
    if problem == loops.STRANGE:
        raise ScheduleError(f"{action} has no place in row {row}", schedule, here)
    if problem == loops.EARLY:
        raise ScheduleError(f"{action} must come after {asked.action(schedule, number)}", schedule, here)
    if problem == loops.MISSING:
        raise ScheduleError(f"{asked.action(schedule, number)} is missing", schedule, here)
    if problem == loops.FULL:
        text = f"row {row} must keep at most {number} microbatches in flight, got {other}"
        raise ScheduleError(text, schedule, here)
    if problem == loops.OVERTAKEN:
        sent = f"{number}.{other}" if other else number
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
