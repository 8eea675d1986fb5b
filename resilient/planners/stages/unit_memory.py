"""What stages of a unit hold on each device: as stages of chains do, with the messages that go to other units.

A unit is a chain between two borders, before and behind which other units' layers are: of features that cross them all
devices of a stage have all tokens, whatever they divide within the unit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.cell_profile import cell_layers
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.planner import Parallelism
from resilient.planners.stages.stage_work import halved, num_recomputed
from resilient.templates.common.arrays import Ints
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.search.layer_costs import LayerCosts
from resilient.templates.search.stage_memory import StageMemory


@dataclass(frozen=True, kw_only=True)
class LaneCell:
    """One cell of a lane.

    Args:
        tokens: Sum of its lengths.
        squares: Sum of their squares.
        received_bytes: Features that come for it from units on other devices.
        sent_bytes: Features that it makes for units on other devices.
    """

    tokens: float
    squares: float
    received_bytes: float = 0.0
    sent_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StageBytes:
    """What a device of each stage holds; all ``[num_stages]``.

    Args:
        state: Parameters, gradients and the optimizer.
        arriving: What comes in, and gradients that go back.
        kept: Of each cell in flight.
        handed_on: Part of it: what is sent, and where the gradient of that is to arrive.
        waiting: Kept of each between the halves of its backward; 0 where one half has all of it.
        handed_on_waiting: Part of it: what is sent.
        sent: Of each cell until the step ends: what is sent for which no gradient returns, that would show its receipt.
        running: Used besides while a cell runs; of several stages on a device one does at a time.
    """

    state: Ints
    arriving: Ints
    kept: Ints
    handed_on: Ints
    waiting: Ints
    handed_on_waiting: Ints
    sent: Ints
    running: Ints


def stage_bytes(
    unit: UnitCosts, spread: Parallelism, shard: int, cell: LaneCell, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
) -> StageBytes:
    """Return what the stages of a unit hold if all cells are like one.

    Args:
        unit: The unit.
        spread: How it is spread, without context parallelism.
        shard: Devices that divide a copy, none of them tensor parallel; 1: each has its own.
        cell: The largest of a lane.
        kind: Of the schedule: what runs besides where backwards are split leaves gradients at parameters.

    Raises:
        ValueError: The degree was not profiled.
    """
    layers = cell_layers(unit, cell.tokens, cell.squares, cell.received_bytes * spread.tp, ((spread.tp, 1),))
    nothing = LayerProfile(name="", costs=(LayerCost(forward_ms=0.0),), trainable=False, input_gradient=False)
    behind = LayerProfile(
        name=f"behind {unit.name}",
        costs=nothing.costs,
        input_bytes=round(cell.sent_bytes * spread.tp),
        trainable=False,
        input_gradient=layers[-1].trainable or layers[-1].input_gradient,
    )
    cluster = Cluster(devices_per_node=spread.tp * shard)
    profile = ModelProfile(layers=(nothing, *layers, behind), tp_degrees=(spread.tp,))
    problem = PlanningProblem(profile=profile, num_microbatches=1, cluster=cluster, max_failures=0)
    costs = LayerCosts(problem, shard, awaits_sends=False)
    memory, at_once = (
        StageMemory(replace(problem, schedule=each), costs, 0, rising=False)
        for each in (kind, ScheduleKind.ONE_F_ONE_B)
    )
    firsts = spread.first_layers + 1
    ends = firsts + np.array(spread.stage_layers)
    arriving, handed_on = (np.array(each[0], dtype=np.int64) for each in (costs.arriving, costs.handed_on))
    both = halved(unit, spread, shard)
    kept = memory.kept[firsts, ends]
    running = np.where(both, memory.workspace[firsts, ends], at_once.workspace[firsts, ends])
    wants = np.array([layer.input_gradient for layer in profile.layers])
    returned = handed_on[ends] // 2 * wants[ends]
    passed = np.concatenate(([0], np.cumsum([layer.trainable or layer.input_gradient for layer in layers])))
    for stage, (begin, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        number = num_recomputed(spread, int(passed[end - 1] - passed[begin - 1]))
        if not number:
            continue
        first = int(np.searchsorted(passed, passed[begin - 1], side="right"))  # of those that have a backward
        middle = first + number
        kept[stage], running[stage] = memory.inputs[first, middle], memory.largest[first, middle]
        if middle < end:
            kept[stage] += memory.kept[middle, end] - handed_on[middle]
            # what the layers behind kept of the cell is gone by then, but for what was sent
            running[stage] += handed_on[middle] - memory.kept[middle, end] + 2 * returned[stage]
            running[stage] = max(running[stage], at_once.workspace[middle, end])
    held = memory.held[firsts, ends]
    pairs = zip(profile.layers, costs.inputs[0], strict=True)
    sent = np.array([0 if layer.input_gradient else num_bytes for layer, num_bytes in pairs], dtype=np.int64)
    return StageBytes(
        state=held - arriving[firsts],
        arriving=arriving[firsts],
        kept=kept,
        handed_on=handed_on[ends],
        waiting=memory.waiting[firsts, ends] * both,
        handed_on_waiting=(handed_on[ends] - returned) * both,
        sent=sent[ends],
        running=running,
    )
