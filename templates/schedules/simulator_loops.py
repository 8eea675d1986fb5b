"""The compiled loop of the simulator beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.schedules.graph import Backward, GraphTables
from resilient.templates.schedules.schedule import Op

# the compiled code knows plain numbers
_FORWARD, _BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT, _SEND_F, _RECV_F, _SEND_B, _RECV_B, _ = map(int, Op)
_NONE, _INPUTS, _ALL = map(int, Backward)


class StepCosts(NamedTuple):
    """Costs in whole units, ns or bytes: ``[stages, cells, parts]``, of borders instead of stages, or ``[flows]``."""

    forward: Ints
    inputs: Ints
    weights: Ints
    latency: Ints
    transfer: Ints
    held: Ints
    deferred: Ints
    flow_latency: Ints
    flow_transfer: Ints


@compiled
def run_timed(
    codes: NDArray[np.int32],
    ends: Ints,
    graph: GraphTables,
    links: Ints,
    costs: StepCosts,
    positions: Ints,
    start_ns: Ints,
    end_ns: Ints,
    peaks: Ints,
) -> None:
    """Fill in the last four: how many actions of each row can run, their times, and the rows' peaks.

    A link has one sender, so its messages follow each other in the order of that row: no event has to wait for
    another to be handled first, and each row runs on until it needs a message that was not sent yet. Which link a
    message takes, of the borders and behind these of the flows, is in ``links``, one way and back.
    """
    num_rows, num_stages = len(ends), len(graph.row_of)
    clocks, in_use = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    free_at = np.zeros(links.size, np.int64)
    arrivals = np.full((2, *costs.held.shape), -1)
    flow_arrivals = np.full((2, len(graph.flows)), -1)
    progress = True
    while progress:
        progress = False
        for row in range(num_rows):
            first = ends[row - 1] if row else 0
            clock = clocks[row]
            position = first + positions[row]
            while position < ends[row]:
                op, stage, index, part, flow = codes[position]
                begin = clock
                if op in (_RECV_F, _RECV_B):
                    way = int(op == _RECV_B)
                    arrival = arrivals[way, stage, index, part] if flow < 0 else flow_arrivals[way, flow]
                    if arrival < 0:
                        break
                    clock = max(clock, arrival)
                elif op == _FORWARD:
                    clock += costs.forward[stage, index].sum()
                    if graph.backward_of[stage] != _NONE:
                        in_use[row] += costs.held[stage, index].sum()
                        peaks[row] = max(peaks[row], in_use[row])
                elif op in (_BACKWARD, _BACKWARD_INPUT, _BACKWARD_WEIGHT):
                    if op != _BACKWARD_WEIGHT:
                        clock += costs.inputs[stage, index, part]
                    if op != _BACKWARD_INPUT:
                        clock += costs.weights[stage, index, part]
                    if op != _BACKWARD_INPUT or graph.backward_of[stage] == _INPUTS:
                        in_use[row] -= costs.held[stage, index, part]
                    if op == _BACKWARD_WEIGHT:
                        in_use[row] -= costs.deferred[stage, index, part]
                    elif op == _BACKWARD_INPUT and graph.backward_of[stage] != _INPUTS:
                        in_use[row] += costs.deferred[stage, index, part]
                        peaks[row] = max(peaks[row], in_use[row])
                end = clock
                if op in (_SEND_F, _SEND_B):
                    way = int(op == _SEND_B)
                    if flow >= 0:
                        link = links[way, num_stages - 1 + flow]
                        length, latency = costs.flow_transfer[flow], costs.flow_latency[flow]
                    else:
                        target = stage - 1 if way else stage + 1
                        border = min(stage, target)
                        if not 0 <= target < num_stages or graph.lane_of[target] != graph.lane_of[stage]:
                            break  # out of the arrays' bounds, which compiled code does not check
                        link = links[way, border]
                        transfer = costs.transfer[border, index]
                        length = transfer[part] if way else transfer.sum()
                        latency = costs.latency[border, index, part]
                    begin = max(clock, free_at[link])
                    end = begin + length
                    free_at[link] = end
                    if flow >= 0:
                        flow_arrivals[way, flow] = end + latency
                    else:
                        arrivals[way, stage - 1 if way else stage + 1, index, part] = end + latency
                start_ns[position], end_ns[position] = begin, end
                position += 1
                progress = True
            clocks[row], positions[row] = clock, position - first
