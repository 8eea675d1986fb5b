"""Makes schedules of graphs of units, by one rule that cannot deadlock: a row runs what is of an earlier turn first.

Turns are the cells of one unit, the language model as a rule; one without samples is a turn, too, in which less is
kept. A forward's turn is that of the first cell it is needed for, or of the last one that it needs something of; in the
row of a later stage of the lane that needs it, it is as much earlier as that stage's backwards are before those of the
lane's first one, which else would wait for them. A backward's turn is that in which its gradient comes back, later by
as many as the stage is ahead of the last one (its delay, which never grows along a lane), and a unit of the one in
other rows that it feeds. Of one turn forwards come before backwards, and these before what is left of them where they
are split; forwards of earlier units before those of later ones, backwards the other way round. So whatever an action
waits for stands before it in this order of all actions, of which every row's is a part. Where memory is short delays
are shorter.

Lanes that come to the same rows several times (virtual stages) take parts of a turn for each stage
(:mod:`resilient.templates.schedules.rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.schedules.graph import Backward, GraphTables, StepGraph
from resilient.templates.schedules.rounds import Rounds
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.unit_delays import less_and_less, shorten

_RECEIVE, _COMPUTE, _SEND = range(3)


def generate_units(
    graph: StepGraph,
    *,
    pace: str | None = None,
    lead: int = 1,
    split: bool | Sequence[bool] = False,
    apart: bool = False,
    max_in_flight: Sequence[int] | None = None,
    states: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Return a schedule of one step of a graph of units.

    A chain's is 1F1B, or with a lead of 2 eager 1F1B, cut into units or not; split, it is ZB-H1 or ZB-H2.

    Args:
        graph: The step.
        pace: The unit whose cells are the turns; the last one by default.
        lead: How many cells a stage runs ahead of the next one: 2 hides messages, for up to twice the memory.
        split: Whether backwards for the weights stand apart, as late as those of the lane's first stage that has any:
            they fill gaps while all stages of a lane keep as much as that one. Of all stages, or of each, lane after
            lane: where one half has all of a backward (:class:`~resilient.templates.halves.Halves`) it is
            done at once, when it is under 1F1B, for nobody waits less if it is put off.
        apart: Whether the units before that one do all their forwards before its first, and their backwards after its
            last: where they share its rows, these wait less for each other, for the memory of all cells.
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
    unit_of, rounds = np.array([units.index(lane.name.unit) for lane in graph.lanes]), Rounds.of(graph)
    longest = lead * rounds.delays
    forward_turns = _forward_turns(graph, unit_of, units.index(pace), apart, rounds, longest)
    num_last = units.index(pace) if apart else 0
    halved = np.broadcast_to(np.asarray(split, dtype=np.bool_), graph.num_stages)
    kept = np.where(halved, longest[_first_differentiated(graph.tables)], longest)
    while True:
        wanted = np.where(kept < rounds.parts * graph.num_cells, np.minimum(kept, longest), longest)
        delays = np.empty_like(wanted)
        for start, end in graph.tables.ends_of:
            delays[start:end] = less_and_less(wanted[start:end], rounds.delays[start:end])
        actions = _Actions(graph)
        _add_forwards(actions, forward_turns, rounds)
        backward_turns = _backward_turns(graph, unit_of, forward_turns, delays, lead, num_last, rounds)
        _add_backwards(actions, backward_turns, delays, kept, halved)
        schedule = actions.in_order(states)
        if max_in_flight is None or not shorten(schedule, kept, max_in_flight, rounds.parts):
            return schedule


def _first_differentiated(tables: GraphTables) -> Ints:
    """Return the first stage of each one's lane that has a backward, as frozen ones in front have none. [num_stages]"""
    stages = np.where(tables.backward_of > Backward.NONE, np.arange(len(tables.lane_of)), len(tables.lane_of) - 1)
    return np.minimum.reduceat(stages, tables.ends_of[:, 0])[tables.lane_of]


def _forward_turns(graph: StepGraph, unit_of: Ints, pace: int, apart: bool, rounds: Rounds, delays: Ints) -> Ints:
    """Return the turn of each cell's forward on its first stage. [num_lanes, num_cells]

    Args:
        graph: The step.
        unit_of: Of each lane.
        pace: The unit whose cells are the turns.
        apart: Whether units before it do all their forwards before its first.
        rounds: Of all lanes.
        delays: Of each stage, by how many turns its backward comes later than the last one's.
    """
    tables = graph.tables
    source, cell, _, target, target_cell = tables.flows.T
    ahead = delays[target] - delays[_beside(tables)]
    later = rounds.later[source]
    source, target = tables.lane_of[source], tables.lane_of[target]
    turns = np.where(tables.parts > 0, rounds.begins, 0)
    last = int(turns[unit_of == pace].max(initial=0))
    turns[unit_of > pace] = 0
    early = rounds.parts * (np.arange(graph.num_cells) - graph.num_cells) - pace * int(rounds.later.max(initial=0))
    turns[unit_of < pace] = early if apart else last
    for unit in range(0 if apart else pace + 1, int(unit_of.max()) + 1):
        fed = (unit_of[target] == unit) & ((unit_of[source] >= pace) | (unit < pace)) & (unit != pace)
        np.maximum.at(turns, (target[fed], target_cell[fed]), turns[source[fed], cell[fed]] + later[fed])
    later += ahead + rounds.early.max(axis=1, initial=0)[target] - rounds.early[target, target_cell]
    for unit in reversed(range(0 if apart else pace)):
        feeds = unit_of[source] == unit
        np.minimum.at(turns, (source[feeds], cell[feeds]), turns[target[feeds], target_cell[feeds]] - later[feeds])
    return turns


def _beside(tables: GraphTables) -> Ints:
    """Return the stage of each flow's target lane that is first in the row where the flow comes from.

    Where none is, the lane's first one. That row does what it feeds the lane before the backwards that the lane's first
    stage waits for meanwhile. [num_flows]
    """
    num_rows = int(tables.row_of.max()) + 2  # -1 is none

    def keys(lane: Ints, row: Ints) -> Ints:
        return lane * num_rows + row + 1

    of_stages = keys(tables.lane_of, tables.row_of)
    wanted = keys(tables.lane_of[tables.flows[:, 3]], tables.row_of[tables.flows[:, 0]])
    order = np.argsort(of_stages, kind="stable")
    found = order[np.searchsorted(of_stages[order], wanted).clip(max=len(order) - 1)]
    return np.where(of_stages[found] == wanted, found, tables.flows[:, 3])


def _backward_turns(
    graph: StepGraph, unit_of: Ints, forward_turns: Ints, delays: Ints, lead: int, num_last: int, rounds: Rounds
) -> Ints:
    """Return the turn of each part of a cell's backward on its last stage. [num_lanes, num_cells, num_parts]

    Args:
        graph: The step.
        unit_of: Of each lane.
        forward_turns: Of its lanes' cells.
        delays: Of each stage, by how many turns its backward comes later than the last one's.
        lead: Cells by which a unit is ahead of the one in other rows that it feeds.
        num_last: Of so many units, the first ones, backwards come after those of all others.
        rounds: Of all lanes.
    """
    tables = graph.tables
    source, cell, part, target, target_cell = tables.flows.T
    ahead = np.where(tables.row_of[source] != tables.row_of[target], lead * rounds.parts, 0)
    source, target = tables.lane_of[source], tables.lane_of[target]
    ahead += rounds.early[target, target_cell]
    real = _parts(tables.parts)
    on_last = forward_turns + rounds.later[tables.ends_of[:, 1] - 1, None]
    turns = np.repeat(on_last[:, :, None], real.shape[2], axis=2)
    before = delays[tables.ends_of[:, 0], None, None]
    done = np.zeros_like(forward_turns)  # with a cell's backward on its lane's first stage
    end = 0
    for unit in reversed(range(int(unit_of.max()) + 1)):
        mine, feeds = unit_of == unit, unit_of[source] == unit
        if unit < num_last:
            turns[mine] = end + rounds.parts * np.arange(graph.num_cells)[:, None]
        at = source[feeds], cell[feeds], part[feeds]
        np.maximum.at(turns, at, done[target[feeds], target_cell[feeds]] + ahead[feeds])
        done[mine] = np.where(real, turns + before, 0)[mine].max(axis=2)
        if unit >= num_last:
            end = max(end, int(done[mine].max(initial=0)) + 1)
    return turns


def _parts(counts: Ints) -> Flags:
    """Return which parts there are of cells with so many. [..., num_parts]"""
    return np.arange(counts.max(initial=1)) < counts[..., None]


class _Actions:
    """The actions so far, each with what it is sorted by."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.rows = graph.tables.row_of
        self._added: list[Ints] = []

    def add(
        self,
        op: Op,
        stage: Ints,
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
        table = np.empty((8, len(index)), np.int64)
        for row, column in enumerate((int(op), stage, index, part, flow, 3 * turn + phase, beside, after)):
            table[row] = column
        self._added.append(table)

    def in_order(self, states: Sequence[Sequence[int]]) -> Schedule:
        """Return all of them in order, and behind each row's the sums of its gradients."""
        graph = self.graph
        op, stage, index, part, flow, turn, beside, after = np.concatenate(self._added, axis=1)
        lane = graph.tables.lane_of[stage]
        back = turn % 3 > 0
        # of one turn: lanes, their cells, parts, and stages; lanes and stages from the last one where it is a backward
        num_lanes, num_stages = len(graph.lanes), graph.num_stages
        lanes, stages = np.where(back, num_lanes - 1 - lane, lane), np.where(back, num_stages - 1 - stage, stage)
        row = self.rows[stage]
        turn -= turn.min(initial=0)
        first = ((row * (turn.max(initial=0) + 1) + turn) * num_lanes + lanes) * max(1, graph.num_cells) + index
        second = ((beside * num_stages + stages) * 3 + after) * (len(graph.flows) + 1) + flow
        order = np.lexsort((second, first))
        codes = np.stack([op, stage, index, part, flow], axis=1)[order]
        sums = _sums(graph, states, codes)
        row, sums_row = row[order], self.rows[sums[:, 1]]
        behind = np.argsort(np.concatenate([row, sums_row]), kind="stable")
        codes = np.concatenate([codes, sums]).astype(np.int32)[behind]
        ends = np.cumsum(np.bincount(row, minlength=graph.num_rows) + np.bincount(sums_row, minlength=graph.num_rows))
        return Schedule(graph, codes, tuple(ends.tolist()))


def _add_forwards(actions: _Actions, turns: Ints, rounds: Rounds) -> None:
    """Add all forwards, with the messages before and after each."""
    tables = actions.graph.tables
    stage, cell = np.nonzero(tables.parts[tables.lane_of])
    turn = turns[tables.lane_of[stage], cell] + rounds.later[stage]
    actions.add(Op.FORWARD, stage, cell, turn=turn)
    before, after = (each[stage] for each in _crossed(tables))
    actions.add(Op.RECV_F, stage[before], cell[before], turn=turn[before])
    actions.add(Op.SEND_F, stage[after], cell[after], turn=turn[after])
    flow, (source, cell, part, target, target_cell) = _apart(tables)
    there = turns[tables.lane_of[target], target_cell]
    here = turns[tables.lane_of[source], cell] + rounds.later[source]
    actions.add(Op.RECV_F, target, target_cell, part=part, flow=flow, turn=there)
    actions.add(Op.SEND_F, source, cell, part=part, flow=flow, turn=here)


def _add_backwards(actions: _Actions, turns: Ints, delays: Ints, weight_delays: Ints, halved: Flags) -> None:
    """Add all backwards, with the messages before and after each; in halves on stages that are ``halved``."""
    tables = actions.graph.tables
    lane_of, kinds = tables.lane_of, tables.backward_of
    real = _parts(tables.parts)
    stage, cell, part = np.nonzero(real[lane_of])
    first = turns[lane_of[stage], cell, part]
    turn = first + delays[stage]
    before, after = _crossed(tables)
    trained = kinds > Backward.NONE
    for op, chosen in (
        (Op.BACKWARD, (kinds == Backward.ALL) & ~halved),
        (Op.BACKWARD_INPUT, (kinds == Backward.INPUTS) | (kinds == Backward.ALL) & halved),
        (Op.SEND_B, before & np.append(False, trained[:-1])),
        (Op.RECV_B, after & trained),
    ):
        own = chosen[stage]
        actions.add(op, stage[own], cell[own], part=part[own], turn=turn[own], beside=part[own])
    own = ((kinds == Backward.ALL) & halved)[stage]
    late = (first + weight_delays[stage])[own]
    actions.add(Op.BACKWARD_WEIGHT, stage[own], cell[own], part=part[own], turn=late, beside=part[own])
    flow, (source, cell, part, target, target_cell) = _apart(tables, trained=True)
    here = turns[lane_of[source], cell, part]
    actions.add(Op.RECV_B, source, cell, part=part, flow=flow, turn=here, beside=part)
    parts = turns[lane_of[target], target_cell]
    # the part of its target's backward that comes last
    order = np.where(real[lane_of[target], target_cell], parts * real.shape[2] + np.arange(real.shape[2]), -1)
    last = order.argmax(axis=1)
    there = parts[np.arange(len(last)), last] + delays[target]
    actions.add(Op.SEND_B, target, target_cell, part=part, flow=flow, turn=there, beside=last)


def _crossed(tables: GraphTables) -> tuple[Flags, Flags]:
    """Return which stages have another row than the one before them in their lane, and than the one after."""
    after = (np.diff(tables.lane_of) == 0) & (np.diff(tables.row_of) != 0)
    return np.append(False, after), np.append(after, False)


def _apart(tables: GraphTables, *, trained: bool = False) -> tuple[Ints, Ints]:
    """Return the numbers and the columns of flows between rows; ``trained``: that return gradients."""
    flows = tables.flows
    chosen = tables.row_of[flows[:, 0]] != tables.row_of[flows[:, 3]]
    if trained:
        chosen &= tables.backward_of[flows[:, 0]] > Backward.NONE
    return np.flatnonzero(chosen), flows[chosen].T


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
