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
from resilient.templates.common.durations import nanoseconds
from resilient.templates.common.interval import Interval
from resilient.templates.schedules.graph import GraphTables
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.validator import check_ended

_NS = 1e6
_MOST = 1 << 50  # of one action, in whole units: 13 days, or a petabyte; sums of many still fit 64 bits

Values = float | Sequence[float] | NDArray[Any]
"""One number for all, one per stage (or border), ``[stages, cells]``, or ``[stages, cells, parts]``.

Stages are numbered lane after lane. What is said of a cell alone its parts share evenly."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ActionCosts:
    """Times and memory of the actions of a pipeline.

    Args:
        forward_ms: Of a cell on a stage.
        backward_input_ms: Backward for what the stage received. A whole backward takes as long as its parts together.
        backward_weight_ms: Backward for the parameters.
        latency_ms: Per border between two stages, from the end of a message's transfer to its receipt.
        transfer_ms: Per border, how long a message occupies the link; messages from one row to another follow each
            other. Those within a row cost nothing. Borders are numbered by the stage before them.
        flow_latency_ms: The same of messages between units: one number, or one per flow.
        flow_transfer_ms: Likewise.
        reduce_ms: By state, how long the sum of its gradient takes, from when all its rows are ready. A row's sums
            follow each other.
        layer_backward_ms: By state, the part of a whole backward that computes its gradient. Layers are
            differentiated from the last to the first, so a state's gradient is final before the end of its stage's last
            backward by as much as the states with lower indices take: then its sum starts.
        activation_bytes: What a cell keeps on a stage from its forward to the end of its backward, where it has one.
        deferred_bytes: What it keeps besides between the two parts of a backward.
    """

    forward_ms: Values
    backward_input_ms: Values
    backward_weight_ms: Values = 0.0
    latency_ms: Values = 0.0
    transfer_ms: Values = 0.0
    flow_latency_ms: Values = 0.0
    flow_transfer_ms: Values = 0.0
    reduce_ms: Mapping[int, float] = field(default_factory=dict[int, float])
    layer_backward_ms: Mapping[int, float] = field(default_factory=dict[int, float])
    activation_bytes: Values = 0
    deferred_bytes: Values = 0


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
        peak_bytes: Per row, the most that activations take at once, with what waits for backwards for weights.
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
    from resilient.templates.schedules.simulator_loops import StepCosts, run_timed

    for name, times in (("reduce_ms", costs.reduce_ms), ("layer_backward_ms", costs.layer_backward_ms)):
        _whole(name, list(times.values()), (len(times),), _NS)
    graph, tables = schedule.graph, schedule.graph.tables
    cells = (graph.num_cells, int(tables.parts.max(initial=1)))
    on_stages, on_borders = tables.parts[tables.lane_of], tables.parts[tables.lane_of[:-1]]
    stages, borders, flows = (graph.num_stages, *cells), (graph.num_stages - 1, *cells), (len(graph.flows),)
    positions, peaks = np.zeros((2, graph.num_rows), np.int64)
    start_ns, end_ns = np.zeros((2, len(schedule.codes)), np.int64)
    run_timed(
        schedule.codes,
        np.array(schedule.ends),
        tables,
        _links(tables),
        StepCosts(
            forward=_table("forward_ms", costs.forward_ms, stages, on_stages, _NS),
            inputs=_table("backward_input_ms", costs.backward_input_ms, stages, on_stages, _NS),
            weights=_table("backward_weight_ms", costs.backward_weight_ms, stages, on_stages, _NS),
            latency=_table("latency_ms", costs.latency_ms, borders, None, _NS),
            transfer=_table("transfer_ms", costs.transfer_ms, borders, on_borders, _NS),
            held=_table("activation_bytes", costs.activation_bytes, stages, on_stages, 1),
            deferred=_table("deferred_bytes", costs.deferred_bytes, stages, on_stages, 1),
            flow_latency=_whole("flow_latency_ms", costs.flow_latency_ms, flows, _NS),
            flow_transfer=_whole("flow_transfer_ms", costs.flow_transfer_ms, flows, _NS),
        ),
        positions,
        start_ns,
        end_ns,
        peaks,
    )
    check_ended(schedule, positions.tolist())
    if costs.reduce_ms:
        _sum_gradients(schedule, costs, start_ns, end_ns)
    return Timeline(schedule, start_ns, end_ns, tuple(peaks.tolist()))


def _links(tables: GraphTables) -> Ints:
    """Return the link, from one row to another, over each border and of each flow: one way, and back.

    ``[2, num_stages - 1 + num_flows]``
    """
    rows = tables.row_of + 1  # none is -1
    source = np.concatenate([rows[:-1], rows[tables.flows[:, 0]]])
    target = np.concatenate([rows[1:], rows[tables.flows[:, 3]]])
    number = int(rows.max()) + 1
    keys = np.concatenate([source * number + target, target * number + source])
    return np.unique(keys, return_inverse=True)[1].reshape(2, -1)


def _table(name: str, values: Values, shape: tuple[int, int, int], num_parts: Ints | None, unit: float) -> Ints:
    """Return a cost as whole units for each stage (border), cell and part.

    Args:
        name: Of the cost.
        values: As they are given.
        shape: Stages (borders), cells, and most parts.
        num_parts: Parts of each cell, which share what is given for the cell; None where each costs the same.
        unit: Units in one.
    """
    whole = _whole(name, values, shape, unit)
    if num_parts is None or shape[2] == 1:
        return whole
    part = np.arange(shape[2])
    if np.ndim(values) < 3:
        share, rest = np.divmod(whole, np.maximum(num_parts, 1)[:, :, None])
        whole = share + np.where(part == 0, rest, 0)
    return np.where(part < num_parts[:, :, None], whole, 0)


def _whole(name: str, values: Values, shape: tuple[int, ...], unit: float) -> Ints:
    """Return a cost as whole units, in a shape of which it may have the first dimensions."""
    array = np.asarray(values)
    if array.shape not in ((), *(shape[:length] for length in range(1, len(shape) + 1))):
        told = [shape[:length] for length in range(1, len(shape) + 1) if length < 3 or shape[2] > 1]
        raise ArgumentError(
            name,
            f"be one number, {' or '.join(' x '.join(map(str, each)) for each in told)} numbers",
            array.shape,
            "give one for all, one for each stage (border), or one for each of its microbatches"
            if len(shape) > 1
            else "give one for all, or one for each flow",
        )
    if array.size and not array.min() >= 0:
        raise ArgumentError(name, "be >= 0", array.min(), "give times and sizes")
    if array.size and array.max() * unit > _MOST:
        raise ArgumentError(name, f"be at most {_MOST / unit:.4g}", array.max(), "give times and sizes")
    whole = np.rint(array * unit).astype(np.int64)
    missing = len(shape) - array.ndim if array.ndim else 0
    wide = np.broadcast_to(whole.reshape(array.shape + (1,) * missing), shape)
    return np.array(wide, order="C")  # loops are compiled again for arrays that are read-only or not contiguous


def _sum_gradients(schedule: Schedule, costs: ActionCosts, start_ns: Ints, end_ns: Ints) -> None:
    """Fill in the times of the sums: they follow each other on every row, from the highest state to the lowest."""
    codes = schedule.codes
    rows = np.repeat(np.arange(len(schedule.ends)), np.diff(schedule.ends, prepend=0))
    last_backward = np.full(schedule.graph.num_stages, -1)
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
            ready = max(int(start_ns[last]), int(end_ns[last]) - early) if last >= 0 else 0
            begin = max(begin, ready, free_at[rows[position]])
        end = begin + nanoseconds(costs.reduce_ms.get(state, 0.0))
        start_ns[holders], end_ns[holders] = begin, end
        for position in holders:
            free_at[rows[position]] = end
