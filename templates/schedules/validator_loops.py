"""Compiled loops of the validator beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.schedules.graph import Backward, GraphTables
from resilient.templates.schedules.schedule import Op

# the compiled code knows plain numbers
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _REDUCE = map(int, Op)
_NONE, _INPUTS, _ALL = map(int, Backward)

TWICE, UNORDERED, STRANGE, EARLY, MISSING, FULL, OVERTAKEN = range(1, 8)
"""What is wrong with an action; 0: nothing."""

NUM_FOUND = 8
"""A problem, its row and position, and the op, stage, index, part and flow that it names."""


class Wanted(NamedTuple):
    """Which actions a step has.

    Args:
        actions: All but messages between units and sums, ``[stages, ops, cells, parts]``.
        messages: Those between units, ``[ops, flows]``.
    """

    actions: Flags
    messages: Flags


class Seen(NamedTuple):
    """Where they stand in their rows, counted from 1; 0 for those that did not come yet."""

    actions: Ints
    messages: Ints


@compiled
def _lacks(seen: Seen, found: Ints, op: int, stage: int, index: int, part: int, flow: int) -> bool:
    """Return whether an action did not come yet, which is noted."""
    if (seen.messages[op, flow] if flow >= 0 else seen.actions[stage, op, index, part]) > 0:
        return False
    found[3:] = op, stage, index, part, flow
    return True


@compiled
def _lacks_backward(wanted: Wanted, seen: Seen, found: Ints, stage: int, index: int, part: int) -> bool:
    op = _I if wanted.actions[stage, _I, index, part] else _B
    return _lacks(seen, found, op, stage, index, part, -1)


@compiled
def _lacks_cell(graph: GraphTables, wanted: Wanted, seen: Seen, found: Ints, stage: int, index: int) -> bool:
    """Return whether the gradient of what a cell was given is not whole yet."""
    for part in range(graph.parts[graph.lane_of[stage], index]):
        if _lacks_backward(wanted, seen, found, stage, index, part):
            return True
    return False


@compiled
def _lacks_input(graph: GraphTables, seen: Seen, found: Ints, stage: int, index: int) -> bool:
    """Return whether something that a forward needs is not there yet."""
    lane = graph.lane_of[stage]
    if stage > graph.ends_of[lane, 0]:
        if graph.row_of[stage - 1] == graph.row_of[stage]:
            return _lacks(seen, found, _F, stage - 1, index, 0, -1)
        return _lacks(seen, found, _RECV_F, stage, index, 0, -1)
    cell = lane * graph.parts.shape[1] + index
    for flow in graph.into[graph.first_into[cell] : graph.first_into[cell + 1]]:
        source = graph.flows[flow, 0]
        if graph.row_of[source] == graph.row_of[stage]:
            if _lacks(seen, found, _F, source, graph.flows[flow, 1], 0, -1):
                return True
        elif _lacks(seen, found, _RECV_F, stage, index, graph.flows[flow, 2], flow):
            return True
    return False


@compiled
def _lacks_gradient(
    graph: GraphTables, wanted: Wanted, seen: Seen, found: Ints, stage: int, index: int, part: int
) -> bool:
    """Return whether the gradient that a backward begins with is not there yet."""
    lane, row = graph.lane_of[stage], graph.row_of[stage]
    if stage + 1 < graph.ends_of[lane, 1]:
        if graph.row_of[stage + 1] == row:
            return _lacks_backward(wanted, seen, found, stage + 1, index, part)
        return _lacks(seen, found, _RECV_B, stage, index, part, -1)
    if graph.first_from[lane, index] < 0:
        return False
    flow = graph.first_from[lane, index] + part
    target = graph.flows[flow, 3]
    if graph.row_of[target] == row:
        return _lacks_cell(graph, wanted, seen, found, target, graph.flows[flow, 4])
    return _lacks(seen, found, _RECV_B, stage, index, part, flow)


@compiled
def _lacks_what_it_needs(graph: GraphTables, wanted: Wanted, seen: Seen, found: Ints, code: Ints) -> bool:
    """Return whether something that an action needs of its own row did not come yet."""
    op, stage, index, part, flow = code
    if op == _F:
        return _lacks_input(graph, seen, found, stage, index)
    if op in (_B, _I):
        return _lacks_gradient(graph, wanted, seen, found, stage, index, part) or _lacks(
            seen, found, _F, stage, index, 0, -1
        )
    if op == _W:
        return _lacks(seen, found, _I, stage, index, part, -1)
    if op == _SEND_F:
        return _lacks(seen, found, _F, stage, index, 0, -1)
    if op == _SEND_B and flow >= 0:
        return _lacks_cell(graph, wanted, seen, found, stage, index)
    return op == _SEND_B and _lacks_backward(wanted, seen, found, stage, index, part)


@compiled
def _misses(graph: GraphTables, wanted: Wanted, seen: Seen, found: Ints, row: int, last_op: int) -> bool:
    """Return whether a row has not all actions up to an op; the first one is noted."""
    for stage in range(len(graph.row_of)):
        if graph.row_of[stage] == row:
            for index in range(wanted.actions.shape[2]):
                for op in range(last_op + 1):
                    for part in range(wanted.actions.shape[3]):
                        wants = wanted.actions[stage, op, index, part]
                        if wants and _lacks(seen, found, op, stage, index, part, -1):
                            return True
    for flow in range(wanted.messages.shape[1]):
        for op in range(_SEND_F, last_op + 1):
            own = graph.flows[flow, 0 if op in (_SEND_F, _RECV_B) else 3]
            index, part = graph.flows[flow, 1 if op in (_SEND_F, _RECV_B) else 4], graph.flows[flow, 2]
            wants = graph.row_of[own] == row and wanted.messages[op, flow]
            if wants and _lacks(seen, found, op, own, index, part, flow):
                return True
    return False


@compiled
def _run(codes: Ints, ends: Ints, graph: GraphTables, shape: tuple[int, int], positions: Ints, found: Ints) -> None:
    """Run all rows as far as they come; each message is sent once, so that all of a border's have their places."""
    num_stages = len(graph.row_of)
    sent = np.zeros((2, num_stages, shape[0] * shape[1]), dtype=np.int64)
    num_sent = np.zeros((2, num_stages), dtype=np.int64)
    num_received = np.zeros((2, num_stages), dtype=np.int64)
    flow_sent = np.zeros((2, len(graph.flows)), dtype=np.bool_)
    progress = True
    while progress:
        progress = False
        for row in range(len(ends)):
            start = ends[row - 1] if row else 0
            while start + positions[row] < ends[row]:
                op, stage, index, part, flow = codes[start + positions[row]]
                way, message = int(op in (_SEND_B, _RECV_B)), index * shape[1] + part
                if op in (_SEND_F, _SEND_B):
                    if flow >= 0:
                        flow_sent[way, flow] = True
                    else:
                        target = stage - 1 if way else stage + 1
                        sent[way, target, num_sent[way, target]] = message
                        num_sent[way, target] += 1
                elif op in (_RECV_F, _RECV_B) and flow >= 0:
                    if not flow_sent[way, flow]:
                        break
                elif op in (_RECV_F, _RECV_B):
                    if num_received[way, stage] == num_sent[way, stage]:
                        break
                    first = sent[way, stage, num_received[way, stage]]
                    if first != message:
                        found[:3] = OVERTAKEN, row, positions[row]
                        found[5], found[6] = first // shape[1], first % shape[1]
                        return
                    num_received[way, stage] += 1
                positions[row] += 1
                progress = True


@compiled
def check(
    codes: Ints,
    ends: Ints,
    graph: GraphTables,
    wanted: Wanted,
    seen: Seen,
    most_in_flight: Ints,
    positions: Ints,
    found: Ints,
) -> None:
    """Check each row for itself, then run all of them with sends that never block and receives that do.

    Args:
        codes: Of a schedule. [num_actions, 5]
        ends: Of the rows. [num_rows]
        graph: The step.
        wanted: The actions that it has.
        seen: None of them yet.
        most_in_flight: Cells that a row may hold. [num_rows]
        positions: Filled with the action of each row at which the run ended. [num_rows]
        found: Filled with the first problem, or with zeros. [NUM_FOUND]
    """
    num_ended = np.zeros((len(graph.row_of), wanted.actions.shape[2]), dtype=np.int64)
    for row in range(len(ends)):
        start = ends[row - 1] if row else 0
        lowest = -1
        found[1] = row
        for here in range(start, ends[row]):
            op, stage, index, part, flow = codes[here]
            found[2] = here - start
            if op == _REDUCE:
                for before in range(start, here):
                    if codes[before, 0] == op and codes[before, 1] == stage and codes[before, 2] == index:
                        found[0], found[5] = TWICE, before - start
                        return
                if graph.backward_of[stage] != _ALL or graph.row_of[stage] != row or part or flow >= 0:
                    found[0] = STRANGE
                    return
                if lowest >= 0 and index >= lowest:
                    found[0], found[5] = UNORDERED, lowest
                    return
                if lowest < 0 and _misses(graph, wanted, seen, found, row, _W):
                    found[0] = EARLY
                    return
                lowest = index
                continue
            own = stage
            if flow >= 0:
                own = graph.flows[flow, 0 if op in (_SEND_F, _RECV_B) else 3]
            belongs = wanted.messages[op, flow] if flow >= 0 else wanted.actions[stage, op, index, part]
            if not belongs or own != stage or graph.row_of[stage] != row:
                found[0] = STRANGE
                return
            before = seen.messages[op, flow] if flow >= 0 else seen.actions[stage, op, index, part]
            if before:
                found[0], found[5] = TWICE, before - 1
                return
            if _lacks_what_it_needs(graph, wanted, seen, found, codes[here]):
                found[0] = EARLY
                return
            if flow >= 0:
                seen.messages[op, flow] = here - start + 1
            else:
                seen.actions[stage, op, index, part] = here - start + 1
        found[2] = ends[row] - start
        if _misses(graph, wanted, seen, found, row, _RECV_B):
            found[0] = MISSING
            return
        in_flight = 0
        for here in range(start, ends[row]):
            op, stage, index = codes[here, 0], codes[here, 1], codes[here, 2]
            kept = graph.backward_of[stage]
            if op == _F and kept != _NONE:
                in_flight += 1
            elif op in (_B, _W) or (op == _I and kept == _INPUTS):
                num_ended[stage, index] += 1
                in_flight -= num_ended[stage, index] == graph.parts[graph.lane_of[stage], index]
            if in_flight > most_in_flight[row]:
                found[0], found[2], found[4], found[5] = FULL, here - start, most_in_flight[row], in_flight
                return
    _run(codes, ends, graph, wanted.actions.shape[2:], positions, found)
