"""What each stage of a pipeline does in a step, in which order: immutable, printable actions.

The executor, the validator and the simulator all read the same :class:`Schedule`. Point-to-point messages between two
neighbouring stages arrive in the order they were sent; sends do not block, receives do.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Op(str, Enum):
    """What an action does; for all but REDUCE its index is that of a microbatch within the pipeline's share."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_F = "SEND_F"  # the microbatch's activations, to the next stage
    RECV_F = "RECV_F"  # from the previous stage
    SEND_B = "SEND_B"  # the gradient of the received activations, to the previous stage
    RECV_B = "RECV_B"  # from the next stage
    REDUCE = "REDUCE"  # sum a layer state's gradient over all its holders; the index is that of the layer owning it


_ACTION = re.compile(r"(\d+)(F|B|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does. Prints as ``2F0``, ``1SEND_F0``, ``0REDUCE3``: stage, op, index."""

    stage: int
    op: Op
    index: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` printed.

        Raises:
            ValueError: ``text`` is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"an action must be stage, op, index as in '2F0' or '1SEND_F0', got {text!r}")
        return cls(int(match[1]), Op(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each stage, in order. Prints as one line per stage."""

    stages: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str`` printed.

        Raises:
            ValueError: A word of ``text`` is no action.
        """
        return cls(tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines()))


class ScheduleError(ValueError):
    """A schedule cannot run. The message shows stages (columns) by position (rows), failing actions as ``>2F0<``."""

    def __init__(self, problem: str, schedule: Schedule, failing: Sequence[tuple[int, int]]) -> None:
        super().__init__(f"{problem}\n{_table(schedule, set(failing))}")


def one_f_one_b(num_stages: int, num_microbatches: int, states: Sequence[Sequence[int]]) -> Schedule:
    """Return 1F1B: as many forwards as there are later stages, then one forward and one backward in turn.

    The REDUCE actions stand after the last backward, in descending order of states on every stage, so all holders of
    states wait for the sums in the same order. The executor may *start* a state's sum as soon as its gradient is
    final, inside the last backward; REDUCE waits for it.

    Args:
        num_stages: Stages of the pipeline.
        num_microbatches: The pipeline's share of the step.
        states: Per stage, the indices of the layer states it holds (the owners' indices, where layers share).

    Raises:
        ValueError: A count is not positive or ``states`` has another number of stages.
    """
    _check_counts(num_stages, num_microbatches)
    if len(states) != num_stages:
        raise ValueError(f"states must list each of the {num_stages} stages, got {len(states)}; list one per stage")
    stages: list[tuple[Action, ...]] = []
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        actions = [action for m in range(warmup) for action in _forward(stage, m, num_stages)]
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                actions += _forward(stage, m + warmup, num_stages)
            actions += _backward(stage, m, num_stages)
        actions += (Action(stage, Op.REDUCE, state) for state in sorted(set(states[stage]), reverse=True))
        stages.append(tuple(actions))
    return Schedule(tuple(stages))


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the forwards of all microbatches in order, for evaluation.

    Raises:
        ValueError: A count is not positive.
    """
    _check_counts(num_stages, num_microbatches)
    return Schedule(
        tuple(
            tuple(action for m in range(num_microbatches) for action in _forward(stage, m, num_stages))
            for stage in range(num_stages)
        )
    )


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run and computes a whole step (or, without any backward, a whole evaluation).

    Each stage runs every microbatch once, forward before backward, each computation after its receive and before its
    send, and sums gradients after its last backward; every message that is received was sent, in the same order; and a
    dry run with blocking receives ends.

    Raises:
        ScheduleError: It cannot; the message shows where.
    """
    _check_stages(schedule)
    _dry_run(schedule)


def _check_counts(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages and num_microbatches must be >= 1, got {num_stages} and {num_microbatches}; "
            f"give every pipeline a stage and a microbatch"
        )


def _forward(stage: int, microbatch: int, num_stages: int) -> list[Action]:
    ops = [Op.RECV_F] * (stage > 0) + [Op.FORWARD] + [Op.SEND_F] * (stage < num_stages - 1)
    return [Action(stage, op, microbatch) for op in ops]


def _backward(stage: int, microbatch: int, num_stages: int) -> list[Action]:
    ops = [Op.RECV_B] * (stage < num_stages - 1) + [Op.BACKWARD] + [Op.SEND_B] * (stage > 0)
    return [Action(stage, op, microbatch) for op in ops]


def _check_stages(schedule: Schedule) -> None:
    """Check each stage by itself: what it must do, once each, in an order that respects what needs what."""
    everything = [action for actions in schedule.stages for action in actions]
    microbatches = sorted({action.index for action in everything if action.op is not Op.REDUCE})
    trains = any(action.op is Op.BACKWARD for action in everything)
    for stage, actions in enumerate(schedule.stages):
        needs = _needs(stage, len(schedule.stages), microbatches, trains)
        done: dict[Action, int] = {}
        for position, action in enumerate(actions):
            here = (stage, position)
            if action in done:
                raise ScheduleError(f"{action} stands twice", schedule, [(stage, done[action]), here])
            if action.op is Op.REDUCE and action.stage == stage and trains:
                needed = [Action(stage, Op.BACKWARD, m) for m in microbatches]
            elif action in needs:
                needed = needs[action]
            else:
                raise ScheduleError(f"{action} has no place in stage {stage}", schedule, [here])
            for earlier in needed:
                if earlier not in done:
                    raise ScheduleError(f"{action} must come after {earlier}", schedule, [here])
            done[action] = position
        for action in needs:
            if action not in done:
                raise ScheduleError(f"{action} is missing", schedule, [(stage, len(actions))])


def _needs(stage: int, num_stages: int, microbatches: Sequence[int], trains: bool) -> dict[Action, list[Action]]:
    """Return all that a stage must do, but the sums, with what must come before each."""
    needs: dict[Action, list[Action]] = {}
    for m in microbatches:
        for chain in [_forward(stage, m, num_stages)] + [_backward(stage, m, num_stages)] * trains:
            needs.update({action: chain[max(0, i - 1) : i] for i, action in enumerate(chain)})
        if trains:
            needs[Action(stage, Op.BACKWARD, m)].append(Action(stage, Op.FORWARD, m))
    return needs


def _dry_run(schedule: Schedule) -> None:
    """Run all stages with sends that never block and receives that do; they must all come to their end."""
    positions = [0] * len(schedule.stages)
    messages: dict[tuple[int, int], deque[int]] = {}
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule.stages):
            while positions[stage] < len(actions):
                here = (stage, positions[stage])
                if not _can_run(actions[positions[stage]], messages, schedule, here):
                    break
                positions[stage] += 1
                progress = True
    blocked = [(s, position) for s, position in enumerate(positions) if position < len(schedule.stages[s])]
    if blocked:
        waiting = ", ".join(str(schedule.stages[s][position]) for s, position in blocked)
        raise ScheduleError(f"deadlock: {waiting} wait for messages that are never sent", schedule, blocked)


def _can_run(
    action: Action, messages: dict[tuple[int, int], deque[int]], schedule: Schedule, here: tuple[int, int]
) -> bool:
    """Send or receive a message; return False where the action has to wait for one."""
    neighbour = action.stage + (1 if action.op in (Op.SEND_F, Op.RECV_B) else -1)
    if action.op in (Op.SEND_F, Op.SEND_B):
        messages.setdefault((action.stage, neighbour), deque()).append(action.index)
    if action.op in (Op.RECV_F, Op.RECV_B):
        sent = messages.get((neighbour, action.stage))
        if not sent:
            return False
        if sent[0] != action.index:
            raise ScheduleError(f"{action} comes when microbatch {sent[0]} was sent before it", schedule, [here])
        sent.popleft()
    return True


def _table(schedule: Schedule, failing: set[tuple[int, int]]) -> str:
    """Return stages (columns) by position (rows) as text, with the failing positions marked."""
    length = max([len(actions) for actions in schedule.stages] + [position + 1 for _, position in failing])
    columns: list[list[str]] = []
    for stage, actions in enumerate(schedule.stages):
        cells = [str(action) for action in actions] + [""] * (length - len(actions))
        marked = [f">{cell}<" if (stage, i) in failing else f" {cell} " for i, cell in enumerate(cells)]
        columns.append([f"stage {stage}", *marked])
    rows = [["", *map(str, range(length))], *columns]
    widths = [max(map(len, row)) for row in rows]
    lines = zip(*([cell.ljust(width) for cell in row] for row, width in zip(rows, widths, strict=True)), strict=True)
    return "\n".join("  ".join(line).rstrip() for line in lines)
