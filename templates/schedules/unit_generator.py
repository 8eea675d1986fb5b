"""Makes schedules of graphs of units, by one rule that cannot deadlock: a row runs what is of an earlier turn first.

Turns are the cells of one unit, the language model as a rule. A forward's turn is that of the first cell it is needed
for, or of the last one that it needs something of; a backward's is that in which its gradient comes back, later by as
many as the stage is ahead of the last one (its delay, which never grows along a lane), and a unit of the one in other
rows that it feeds. Of one turn forwards come before backwards, and these before what is left of them where they are
split; forwards of earlier units before those of later ones, backwards the other way round. So whatever an action waits
for stands before it in this order of all actions, of which every row's is a part. Where memory is short delays are
shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.schedules.graph import Backward, StepGraph
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.unit_delays import longest_delays, shorten

_RECEIVE, _COMPUTE, _SEND = range(3)


def generate_units(
    graph: StepGraph,
    *,
    pace: str | None = None,
    lead: int = 1,
    split: bool = False,
    max_in_flight: Sequence[int] | None = None,
    states: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Return a schedule of one step of a graph of units.

    A chain's is 1F1B, or with a lead of 2 eager 1F1B, cut into units or not; split, it is ZB-H1 or ZB-H2.

    Args:
        graph: The step.
        pace: The unit whose cells are the turns; the last one by default.
        lead: How many cells a stage runs ahead of the next one: 2 hides messages, for up to twice the memory.
        split: Whether backwards for the weights stand apart, as late as those of the lane's first stage: they fill gaps
            while all stages of a lane keep as much as its first one.
        max_in_flight: Per row, how many cells its memory holds, each until its last backward; without it, as many as
            there are.
        states: Per stage, lane after lane, the indices of the layer states it holds; without it, gradients are not
            summed.

    Raises:
        ValueError: A number is out of its range, or there is no such unit.
    """
    units = list(dict.fromkeys(lane.name.unit for lane in graph.lanes))
    pace = units[-1] if pace is None else pace
    if pace not in units:
        raise ArgumentError("pace", f"be one of {', '.join(units)}", repr(pace), "name a unit")
    if lead < 1:
        raise ArgumentError("lead", "be >= 1", lead, "1 is 1F1B, 2 is eager 1F1B")
    states = [()] * graph.num_stages if states is None else states
    if len(states) != graph.num_stages:
        raise ArgumentError("states", f"list each of the {graph.num_stages} stages", len(states), "list one per stage")
    if max_in_flight is not None and (len(max_in_flight) != graph.num_rows or min(max_in_flight) < 1):
        fix = "a row whose memory holds no cell cannot run"
        raise ArgumentError("max_in_flight", f"be >= 1 for each of the {graph.num_rows} rows", list(max_in_flight), fix)
    forward_turns = _forward_turns(graph, units.index(pace), units)
    kept = longest_delays(graph, lead, split=split)
    while True:
        schedule = _in_order(graph, forward_turns, kept, lead, split=split, states=states)
        if max_in_flight is None or not shorten(schedule, kept, max_in_flight):
            return schedule


def _in_order(
    graph: StepGraph, forward_turns: Ints, kept: Ints, lead: int, *, split: bool, states: Sequence[Sequence[int]]
) -> Schedule:
    """Return the schedule in which each stage keeps its cells for so many turns."""
    delays = np.minimum(kept, longest_delays(graph, lead, split=False))
    for start, end in graph.tables.ends_of:
        delays[start:end] = np.minimum.accumulate(delays[start:end])
    actions = _Actions(graph)
    backward_turns = _backward_turns(graph, forward_turns, delays, lead)
    for number in range(len(graph.lanes)):
        _add_forwards(actions, number, forward_turns[number])
        _add_backwards(actions, number, backward_turns[number], delays, kept if split else None)
    return actions.in_order(states)


def _forward_turns(graph: StepGraph, pace: int, units: Sequence[str]) -> Ints:
    """Return the turn of each cell's forward. [num_lanes, num_cells]"""
    tables = graph.tables
    turns = np.zeros(tables.parts.shape, np.int64)
    lane_of, unit_of = tables.lane_of, [units.index(lane.name.unit) for lane in graph.lanes]
    sources, targets = lane_of[tables.flows[:, 0]], lane_of[tables.flows[:, 3]]
    last = 0
    for number, lane in enumerate(graph.lanes):
        if unit_of[number] == pace:
            turns[number, list(lane.cells)] = np.arange(len(lane.cells))
            last = max(last, len(lane.cells) - 1)
    for number, unit in enumerate(unit_of):
        if unit > pace:
            mine = tables.flows[(targets == number) & (np.take(unit_of, sources) >= pace)]
            np.maximum.at(turns[number], mine[:, 4], turns[lane_of[mine[:, 0]], mine[:, 1]])
    for number, unit in reversed(list(enumerate(unit_of))):
        if unit < pace:
            mine = tables.flows[sources == number]
            turns[number] = last
            np.minimum.at(turns[number], mine[:, 1], turns[lane_of[mine[:, 3]], mine[:, 4]])
    return turns


def _backward_turns(graph: StepGraph, forward_turns: Ints, delays: Ints, lead: int) -> list[Ints]:
    """Return, per lane, the cell and the part of each backward, and its turn on the last stage. [3, num_backwards]"""
    tables = graph.tables
    turns: list[Ints] = [np.zeros((3, 0), np.int64)] * len(graph.lanes)
    done = np.zeros_like(forward_turns)  # with a cell's backward on its lane's first stage
    for number in reversed(range(len(graph.lanes))):
        parts = tables.parts[number]
        cells = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(cells)) - np.repeat(np.cumsum(parts) - parts, parts)
        turn = forward_turns[number, cells]
        first = tables.first_from[number, cells]
        fed = np.flatnonzero(first >= 0)
        flows = tables.flows[first[fed] + part[fed]]
        ahead = lead * (tables.row_of[flows[:, 0]] != tables.row_of[flows[:, 3]])
        turn[fed] = np.maximum(turn[fed], done[tables.lane_of[flows[:, 3]], flows[:, 4]] + ahead)
        turns[number] = np.stack([cells, part, turn])
        np.maximum.at(done[number], cells, turn + delays[tables.ends_of[number, 0]])
    return turns


class _Actions:
    """The actions so far, each with what it is sorted by."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.rows = graph.tables.row_of
        self._added: list[Ints] = []

    def add(
        self,
        op: Op,
        stage: Ints | int,
        index: Ints,
        *,
        turn: Ints,
        part: Ints | int = 0,
        flow: Ints | int = -1,
        beside: Ints | int = 0,
    ) -> None:
        """Add actions.

        Args:
            op: Of all of them.
            stage: Of each.
            index: Of each.
            turn: Of each.
            part: Of each.
            flow: Of each.
            beside: Part of the computation that a message belongs to.
        """
        phase = 0 if op in (Op.FORWARD, Op.RECV_F, Op.SEND_F) else 2 if op is Op.BACKWARD_WEIGHT else 1
        after = _COMPUTE if op.computes else _RECEIVE if op in (Op.RECV_F, Op.RECV_B) else _SEND
        columns = (int(op), stage, index, part, flow, 3 * turn + phase, beside, after)
        self._added.append(np.stack(np.broadcast_arrays(*columns)).reshape(len(columns), -1).astype(np.int64))

    def in_order(self, states: Sequence[Sequence[int]]) -> Schedule:
        """Return all of them in order, and behind each row's the sums of its gradients."""
        graph = self.graph
        op, stage, index, part, flow, turn, beside, after = np.concatenate(self._added, axis=1)
        lane = graph.tables.lane_of[stage]
        back = turn % 3 > 0
        # of one turn: lanes, their cells, parts, and stages; lanes and stages from the last one where it is a backward
        num_lanes, num_stages = len(graph.lanes), graph.num_stages
        lanes, stages = np.where(back, num_lanes - 1 - lane, lane), np.where(back, num_stages - 1 - stage, stage)
        first = (turn * num_lanes + lanes) * max(1, graph.num_cells) + index
        second = (beside * num_stages + stages) * 3 + after
        row = self.rows[stage]
        order = np.lexsort((flow, second, first, row))
        codes = np.stack([op, stage, index, part, flow], axis=1)[order]
        sums = _sums(graph, states, codes)
        row, sums_row = row[order], self.rows[sums[:, 1]]
        rows = [
            np.concatenate([codes[slice(*np.searchsorted(row, (each, each + 1)))], sums[sums_row == each]])
            for each in range(graph.num_rows)
        ]
        ends = tuple(np.cumsum([len(each) for each in rows]).tolist())
        return Schedule(graph, np.concatenate(rows).astype(np.int32), ends)


def _add_forwards(actions: _Actions, number: int, turns: Ints) -> None:
    """Add a lane's forwards, with the messages before and after each."""
    tables = actions.graph.tables
    start, end = tables.ends_of[number]
    cells = np.flatnonzero(tables.parts[number])
    stages = np.arange(start, end)[:, None]
    turn = turns[cells]
    actions.add(Op.FORWARD, stages, cells, turn=turn)
    crossed = 1 + start + np.flatnonzero(np.diff(actions.rows[start:end]))[:, None]  # stages behind another row's
    actions.add(Op.RECV_F, crossed, cells, turn=turn)
    actions.add(Op.SEND_F, crossed - 1, cells, turn=turn)
    numbers, flows = _apart(actions, 3, start)
    actions.add(Op.RECV_F, start, flows[:, 4], part=flows[:, 2], flow=numbers, turn=turns[flows[:, 4]])
    numbers, flows = _apart(actions, 0, end - 1)
    actions.add(Op.SEND_F, end - 1, flows[:, 1], part=flows[:, 2], flow=numbers, turn=turns[flows[:, 1]])


def _add_backwards(actions: _Actions, number: int, turns: Ints, delays: Ints, weight_delays: Ints | None) -> None:
    """Add a lane's backwards, with the messages before and after each; in halves where weights have delays."""
    tables = actions.graph.tables
    start, end = tables.ends_of[number]
    cells, part, turn = turns

    def late(stage: Ints | int) -> Ints:
        return turn + delays[stage]

    both = Op.BACKWARD if weight_delays is None else Op.BACKWARD_INPUT
    for op, backward in ((both, Backward.ALL), (Op.BACKWARD_INPUT, Backward.INPUTS)):
        stages = start + np.flatnonzero(tables.backward_of[start:end] == backward)[:, None]
        actions.add(op, stages, cells, part=part, turn=late(stages), beside=part)
    if weight_delays is not None:
        stages = start + np.flatnonzero(tables.backward_of[start:end] == Backward.ALL)[:, None]
        actions.add(Op.BACKWARD_WEIGHT, stages, cells, part=part, turn=turn + weight_delays[stages], beside=part)
    returned = (tables.backward_of[start : end - 1] > Backward.NONE) & (np.diff(actions.rows[start:end]) != 0)
    crossed = 1 + start + np.flatnonzero(returned)[:, None]  # stages that send gradients to another row
    actions.add(Op.SEND_B, crossed, cells, part=part, turn=late(crossed), beside=part)
    actions.add(Op.RECV_B, crossed - 1, cells, part=part, turn=late(crossed - 1), beside=part)
    first = np.cumsum(tables.parts[number]) - tables.parts[number]
    numbers, flows = _apart(actions, 0, end - 1, trained=True)
    there = turn[first[flows[:, 1]] + flows[:, 2]]
    actions.add(Op.RECV_B, end - 1, flows[:, 1], part=flows[:, 2], flow=numbers, turn=there, beside=flows[:, 2])
    numbers, flows = _apart(actions, 3, start, trained=True)
    order = np.lexsort((part, turn, cells))
    last = order[np.cumsum(tables.parts[number])[flows[:, 4]] - 1]  # of the parts of each cell
    there = late(start)[last]
    actions.add(Op.SEND_B, start, flows[:, 4], part=flows[:, 2], flow=numbers, turn=there, beside=part[last])


def _apart(actions: _Actions, column: int, stage: int, *, trained: bool = False) -> tuple[Ints, Ints]:
    """Return the numbers and the table of a stage's flows to or from other rows; ``trained``: that return gradients."""
    tables = actions.graph.tables
    flows = tables.flows
    chosen = (flows[:, column] == stage) & (actions.rows[flows[:, 0]] != actions.rows[flows[:, 3]])
    if trained:
        chosen &= tables.backward_of[flows[:, 0]] > Backward.NONE
    return np.flatnonzero(chosen), flows[chosen]


def _sums(graph: StepGraph, states: Sequence[Sequence[int]], codes: Ints) -> Ints:
    """Return the codes of the gradient sums, in descending order of states; a row sums each of its states once.

    Where several stages of a row have a state, its gradient is final after the last backward of them all.
    """
    backwards = np.flatnonzero(np.isin(codes[:, 0], (Op.BACKWARD, Op.BACKWARD_WEIGHT)))
    last = np.full(graph.num_stages, -1)
    last[codes[backwards, 1]] = backwards  # of several positions numpy keeps the last
    by_end = sorted(range(graph.num_stages), key=lambda stage: (last[stage], -stage))
    held = {(graph.row_of[stage], state): stage for stage in by_end for state in states[stage]}
    sums = [(int(Op.REDUCE), stage, state, 0, -1) for (_, state), stage in held.items()]
    return np.array(sorted(sums, key=lambda code: -code[2]), np.int64).reshape(-1, 5)
