"""Checks that a schedule can run and computes a whole step.

Slow and plain on purpose: it shares nothing with what makes schedules, so that each checks the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from resilient.templates.schedules.schedule import Action, Op, Schedule

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
    _check_numbers(schedule)
    checks = _Needs(schedule)
    for row in range(len(schedule.rows)):
        checks.check(row)
        if max_in_flight is not None:
            _check_memory(schedule, row, max_in_flight[row])
    _dry_run(schedule)


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
    for row in range(len(schedule.ends)):
        for position, action in enumerate(schedule.row(row)):
            if max(action.stage, 0 if action.op is Op.REDUCE else action.index) >= len(schedule.codes):
                problem = f"{action} must have numbers below {len(schedule.codes)}, as many as there are actions"
                raise ScheduleError(problem, schedule, [(row, position)])


class _Needs:
    """What each row must do, once each, and what must come before it in the same row."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._row_of = schedule.row_of
        ops = {action.op for actions in schedule.rows for action in actions}
        self._trains = not ops.isdisjoint({Op.BACKWARD, Op.BACKWARD_INPUT})
        self._split = {
            (action.stage, action.index)
            for actions in schedule.rows
            for action in actions
            if action.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        }

    def check(self, row: int) -> None:
        needs = self._of(row)
        computations = [action for action in needs if action.op.computes]
        done: dict[Action, int] = {}
        lowest_state: int | None = None
        for position, action in enumerate(self._schedule.rows[row]):
            if action in done:
                raise self._error(f"{action} stands twice", (row, done[action]), (row, position))
            if action.op is Op.REDUCE and self._trains and self._row_of[action.stage] == row:
                needed = computations
                if lowest_state is not None and action.index >= lowest_state:
                    raise self._error(f"{action} must come before state {lowest_state}'s", (row, position))
                lowest_state = action.index
            elif action in needs:
                needed = needs[action]
            else:
                raise self._error(f"{action} has no place in row {row}", (row, position))
            for earlier in needed:
                if earlier not in done:
                    raise self._error(f"{action} must come after {earlier}", (row, position))
            done[action] = position
        for action in needs:
            if action not in done:
                raise self._error(f"{action} is missing", (row, len(self._schedule.rows[row])))

    def _of(self, row: int) -> dict[Action, list[Action]]:
        needs: dict[Action, list[Action]] = {}
        for stage in (stage for stage, at in enumerate(self._row_of) if at == row):
            for m in range(self._schedule.num_microbatches):
                self._add_pass(needs, stage, m, Op.FORWARD, Op.RECV_F, Op.SEND_F, stage - 1, stage + 1)
                if not self._trains:
                    continue
                backward = self._backward(stage, m)
                self._add_pass(needs, stage, m, backward, Op.RECV_B, Op.SEND_B, stage + 1, stage - 1)
                needs[Action(stage, backward, m)].append(Action(stage, Op.FORWARD, m))
                if backward is Op.BACKWARD_INPUT:
                    needs[Action(stage, Op.BACKWARD_WEIGHT, m)] = [Action(stage, Op.BACKWARD_INPUT, m)]
        return needs

    def _add_pass(
        self,
        needs: dict[Action, list[Action]],
        stage: int,
        m: int,
        op: Op,
        recv: Op,
        send: Op,
        source: int,
        target: int,
    ) -> None:
        """Add a computation, and its messages where the neighbours are in other rows."""
        row = self._row_of[stage]
        this = Action(stage, op, m)
        needs[this] = []
        if 0 <= source < len(self._row_of):
            if self._row_of[source] == row:
                needs[this].append(Action(source, op if op is Op.FORWARD else self._backward(source, m), m))
            else:
                needs[Action(stage, recv, m)] = []
                needs[this].append(Action(stage, recv, m))
        if 0 <= target < len(self._row_of) and self._row_of[target] != row:
            needs[Action(stage, send, m)] = [this]

    def _backward(self, stage: int, m: int) -> Op:
        return Op.BACKWARD_INPUT if (stage, m) in self._split else Op.BACKWARD

    def _error(self, problem: str, *failing: tuple[int, int]) -> ScheduleError:
        return ScheduleError(problem, self._schedule, failing)


def _check_memory(schedule: Schedule, row: int, limit: int) -> None:
    in_flight = 0
    for position, action in enumerate(schedule.rows[row]):
        in_flight += (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
        if in_flight > limit:
            problem = f"row {row} must keep at most {limit} microbatches in flight, got {in_flight}"
            raise ScheduleError(problem, schedule, [(row, position)])


def _dry_run(schedule: Schedule) -> None:
    """Run all rows with sends that never block and receives that do; they must all come to their end."""
    positions = [0] * len(schedule.rows)
    messages: dict[tuple[Op, int], deque[int]] = {}
    progress = True
    while progress:
        progress = False
        for row, actions in enumerate(schedule.rows):
            while positions[row] < len(actions):
                here = (row, positions[row])
                if not _can_run(actions[positions[row]], messages, schedule, here):
                    break
                positions[row] += 1
                progress = True
    check_ended(schedule, positions)


def _can_run(
    action: Action, messages: dict[tuple[Op, int], deque[int]], schedule: Schedule, here: tuple[int, int]
) -> bool:
    """Send or receive a message; return False where the action has to wait for one."""
    if action.op is Op.SEND_F:
        messages.setdefault((Op.RECV_F, action.stage + 1), deque()).append(action.index)
    if action.op is Op.SEND_B:
        messages.setdefault((Op.RECV_B, action.stage - 1), deque()).append(action.index)
    if action.op in (Op.RECV_F, Op.RECV_B):
        sent = messages.get((action.op, action.stage))
        if not sent:
            return False
        if sent[0] != action.index:
            raise ScheduleError(f"{action} comes when microbatch {sent[0]} was sent before it", schedule, [here])
        sent.popleft()
    return True


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
