"""Times schedules: when each action starts and ends, how long workers idle, how much memory activations take.

Times inside are whole nanoseconds, so equal inputs give equal timelines on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.common.durations import nanoseconds
from resilient.templates.common.interval import Interval
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.validator import check_ended

_NS = 1e6
_MOST = 1 << 50  # of one action, in whole units: 13 days, or a petabyte; sums of many still fit 64 bits
# the compiled code knows plain numbers
_FORWARD, _BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _ = map(int, Op)

Values = float | Sequence[float] | NDArray[Any]
"""One number for all, one per stage (or border), or ``[stages, microbatches]``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ActionCosts:
    """Times and memory of the actions of a pipeline.

    Args:
        forward_ms: Of a microbatch on a stage.
        backward_input_ms: Backward for what the stage received. A whole backward takes as long as its parts together.
        backward_weight_ms: Backward for the parameters.
        latency_ms: Per border between two stages, from the end of a message's transfer to its receipt.
        transfer_ms: Per border, how long a message occupies the link; messages from one row to another follow each
            other. Those within a row cost nothing. Borders are numbered by the stage before them.
        reduce_ms: By state, how long the sum of its gradient takes. A row's sums follow each other.
        layer_backward_ms: By state, the part of a whole backward that computes its gradient. Layers are
            differentiated from the last to the first, so a state's gradient is final before the end of its stage's last
            backward by as much as the states with lower indices take: then its sum starts.
        activation_bytes: What a microbatch keeps on a stage from its forward to the end of its backward.
    """

    forward_ms: Values
    backward_input_ms: Values
    backward_weight_ms: Values = 0.0
    latency_ms: Values = 0.0
    transfer_ms: Values = 0.0
    reduce_ms: Mapping[int, float] = field(default_factory=dict[int, float])
    layer_backward_ms: Mapping[int, float] = field(default_factory=dict[int, float])
    activation_bytes: Values = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Interval):
    """One action of a worker (or, for messages and sums, of its network), in time since the step's start.

    Args:
        row: The worker's row of the schedule.
        action: What it does.
    """

    row: int
    action: Action


@dataclass(frozen=True, eq=False)
class Timeline:
    """The result of a simulation: when each action starts and ends.

    Args:
        schedule: What was run.
        start_ns: Per action of ``schedule.codes``. A send lasts while it occupies the link, a receive while the worker
            waits for it, a REDUCE while the sum is under way.
        end_ns: Likewise.
        peak_bytes: Per row, the most that activations take at once.
    """

    schedule: Schedule
    start_ns: Ints
    end_ns: Ints
    peak_bytes: tuple[int, ...]

    @property
    def iteration_ns(self) -> int:
        """Time from the first action's start to the last one's end."""
        return int(self.end_ns.max(initial=0))

    @property
    def iteration_ms(self) -> float:
        """Time from the first action's start to the last one's end."""
        return self.iteration_ns / 1e6

    @property
    def bubble_ms(self) -> tuple[float, ...]:
        """Per row, the time of the iteration in which it computes nothing."""
        lengths = np.where(self.schedule.codes[:, 0] <= Op.BACKWARD_WEIGHT, self.end_ns - self.start_ns, 0)
        total = np.concatenate([[0], np.cumsum(lengths)])[[0, *self.schedule.ends]]
        return tuple(((self.iteration_ns - np.diff(total)) / 1e6).tolist())

    @property
    def spans(self) -> list[Span]:
        """Everything but receives, row by row, for drawing."""
        starts, ends = self.start_ns.tolist(), self.end_ns.tolist()
        numbered = ((row, action) for row, actions in enumerate(self.schedule.rows) for action in actions)
        return [
            Span(row=row, action=action, start_ns=start, end_ns=end)
            for (row, action), start, end in zip(numbered, starts, ends, strict=True)
            if action.op not in (Op.RECV_F, Op.RECV_B)
        ]


def simulate(schedule: Schedule, costs: ActionCosts) -> Timeline:
    """Run a schedule: rows follow their order, sends do not block, receives do.

    Args:
        schedule: A valid schedule.
        costs: What its actions cost.

    Raises:
        ScheduleError: A deadlock.
        ValueError: A cost is negative or does not fit the numbers of stages and microbatches.
    """
    codes, ends = schedule.codes, np.array(schedule.ends)
    num_stages, num_microbatches = len(schedule.row_of), schedule.num_microbatches
    stages, borders = (num_stages, num_microbatches), (num_stages - 1, num_microbatches)
    positions, peaks = np.zeros((2, len(ends)), np.int64)
    start_ns, end_ns = np.zeros((2, len(codes)), np.int64)
    compiled(_run)(
        codes,
        ends,
        np.array(schedule.row_of),
        _table("forward_ms", costs.forward_ms, stages, _NS),
        _table("backward_input_ms", costs.backward_input_ms, stages, _NS),
        _table("backward_weight_ms", costs.backward_weight_ms, stages, _NS),
        _table("latency_ms", costs.latency_ms, borders, _NS),
        _table("transfer_ms", costs.transfer_ms, borders, _NS),
        _table("activation_bytes", costs.activation_bytes, stages, 1),
        positions,
        start_ns,
        end_ns,
        peaks,
    )
    check_ended(schedule, positions.tolist())
    if costs.reduce_ms:
        _sum_gradients(schedule, costs, start_ns, end_ns)
    return Timeline(schedule, start_ns, end_ns, tuple(peaks.tolist()))


def _table(name: str, values: Values, shape: tuple[int, int], unit: float) -> Ints:
    """Return a cost as whole units for each stage (border) and microbatch."""
    array = np.asarray(values)
    if array.shape not in ((), shape[:1], shape):
        raise ArgumentError(
            name,
            f"be one number, {shape[0]} or {shape[0]} x {shape[1]} numbers",
            array.shape,
            "give one for all, one for each stage (border), or one for each of its microbatches",
        )
    if array.size and not array.min() >= 0:
        raise ArgumentError(name, "be >= 0", array.min(), "give times and sizes")
    if array.size and array.max() * unit > _MOST:
        raise ArgumentError(name, f"be at most {_MOST / unit:.4g}", array.max(), "give times and sizes")
    whole = np.rint(array * unit).astype(np.int64)
    return np.ascontiguousarray(np.broadcast_to(whole[:, None] if array.ndim == 1 else whole, shape))


def _run(
    codes: NDArray[np.int32],
    ends: Ints,
    row_of: Ints,
    forward: Ints,
    inputs: Ints,
    weights: Ints,
    latency: Ints,
    transfer: Ints,
    held: Ints,
    positions: Ints,
    start_ns: Ints,
    end_ns: Ints,
    peaks: Ints,
) -> None:
    """Fill in the last four: how many actions of each row can run, their times, and the rows' peaks.

    A link has one sender, so its messages follow each other in the order of that row: no event has to wait for
    another to be handled first, and each row runs on until it needs a message that was not sent yet.
    """
    num_rows = len(ends)
    clocks, in_use = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    free_at = np.zeros((num_rows, num_rows), np.int64)
    arrivals = np.full((2, forward.shape[0], forward.shape[1]), -1)
    progress = True
    while progress:
        progress = False
        for row in range(num_rows):
            first = ends[row - 1] if row else 0
            clock = clocks[row]
            position = first + positions[row]
            while position < ends[row]:
                op, stage, index = codes[position]
                begin = clock
                if op in (_RECV_F, _RECV_B):
                    arrival = arrivals[int(op == _RECV_B), stage, index]
                    if arrival < 0:
                        break
                    clock = max(clock, arrival)
                elif op == _FORWARD:
                    clock += forward[stage, index]
                    in_use[row] += held[stage, index]
                    peaks[row] = max(peaks[row], in_use[row])
                elif op in (_BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT):
                    if op != _BACKWARD_WEIGHT:
                        clock += inputs[stage, index]
                    if op != _BACKWARD_INPUT:
                        clock += weights[stage, index]
                        in_use[row] -= held[stage, index]
                end = clock
                if op in (_SEND_F, _SEND_B):
                    target, border = (stage + 1, stage) if op == _SEND_F else (stage - 1, stage - 1)
                    if not 0 <= border < len(transfer):
                        break  # out of the arrays' bounds, which compiled code does not check
                    begin = max(clock, free_at[row, row_of[target]])
                    end = begin + transfer[border, index]
                    free_at[row, row_of[target]] = end
                    arrivals[int(op == _SEND_B), target, index] = end + latency[border, index]
                start_ns[position], end_ns[position] = begin, end
                position += 1
                progress = True
            clocks[row], positions[row] = clock, position - first


def _sum_gradients(schedule: Schedule, costs: ActionCosts, start_ns: Ints, end_ns: Ints) -> None:
    """Fill in the times of the sums: they follow each other on every row, from the highest state to the lowest."""
    codes = schedule.codes
    rows = np.repeat(np.arange(len(schedule.ends)), np.diff(schedule.ends, prepend=0))
    last_backward = np.zeros(len(schedule.row_of), np.int64)
    backwards = np.flatnonzero((codes[:, 0] == Op.BACKWARD) | (codes[:, 0] == Op.BACKWARD_WEIGHT))
    last_backward[codes[backwards, 1]] = backwards  # of several positions numpy keeps the last
    sums = np.flatnonzero(codes[:, 0] == Op.REDUCE)
    free_at = [0] * len(schedule.ends)
    for state in sorted(set(codes[sums, 2].tolist()), reverse=True):
        holders = sums[codes[sums, 2] == state].tolist()
        begin = 0
        for position in holders:
            stage = codes[position, 1]
            below = codes[sums[(codes[sums, 1] == stage) & (codes[sums, 2] < state)], 2].tolist()
            early = sum(nanoseconds(costs.layer_backward_ms.get(other, 0.0)) for other in below)
            last = last_backward[stage]
            begin = max(begin, int(start_ns[last]), int(end_ns[last]) - early, free_at[rows[position]])
        end = begin + nanoseconds(costs.reduce_ms.get(state, 0.0))
        start_ns[holders], end_ns[holders] = begin, end
        for position in holders:
            free_at[rows[position]] = end
