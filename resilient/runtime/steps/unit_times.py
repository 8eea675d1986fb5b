"""What the actions of a planned step are expected to take, by the costs that its planner knows."""

from __future__ import annotations

from typing import NamedTuple

from resilient.observability.step_trace import PlannedRow
from resilient.planners.costs.cost_model import CostModel, Curve, UnitCosts
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.unit_graph import PlanLanes, handed_over
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Plan
from resilient.templates.schedules.graph import StageName
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.step_cells import Samples, StepCells
from resilient.templates.template import StageSpec


class _StageCurves(NamedTuple):
    forward: Curve
    backward_input: Curve
    backward_weight: Curve


class UnitTimes:
    """Times of the actions of a plan's stages of units.

    Args:
        lanes: Of the plan.
        plan: It.
        costs: Of the units, on this worker's device.
        cluster: The nodes.
    """

    def __init__(self, lanes: PlanLanes, plan: Plan, costs: CostModel, cluster: Cluster) -> None:
        self._lanes = lanes
        self._costs = costs
        self._cluster = cluster
        self._nodes = [slot.node for slot in plan.slots]
        self._curves: dict[StageName, _StageCurves] = {}

    def planned(
        self, schedule: Schedule, pipelines: tuple[int, ...], row: int, assignment: StepAssignment, cells: StepCells
    ) -> PlannedRow:
        """Return what a row of a step is expected to take: a call for each part of a cell.

        Args:
            schedule: Of the step.
            pipelines: Whose it is.
            row: Of the schedule.
            assignment: Says how long samples are.
            cells: Those of the pipelines.
        """
        nodes = [self._nodes[rank] for rank in self._lanes.ranks(pipelines)]
        number = {unit: index for index, unit in enumerate(assignment.units)}
        tokens, squares = assignment.tokens.tolist(), assignment.squares.tolist()
        parts = schedule.graph.tables.parts.tolist()
        lane_number = {lane.name: index for index, lane in enumerate(schedule.graph.lanes)}

        def sums(unit: str, samples: Samples) -> tuple[int, int]:
            index = number[unit]
            return sum(tokens[index][each] for each in samples), sum(squares[index][each] for each in samples)

        def of_part(action: Action, part: int) -> tuple[int, int]:
            return sums(action.lane.unit, cells.part(action.lane, action.index, part))

        def action_ms(action: Action) -> float:
            if not action.op.computes and action.op is not Op.SEND_F:
                return 0.0
            lane = action.lane
            if action.op is Op.FORWARD:
                forward = self._curves_of(action).forward
                number_of_parts = parts[lane_number[lane]][action.index]
                return sum(forward.call_ms(*of_part(action, part)) for part in range(number_of_parts))
            if action.op is Op.SEND_F:
                if action.peer is None:
                    costs = self._costs.by_name[lane.unit]
                    num_bytes = sums(lane.unit, cells.samples[lane][action.index])[0] * costs.boundary_bytes
                else:
                    other = handed_over(lane.unit, action.peer.lane.unit)
                    tokens = sums(other, cells.part(lane, action.index, action.part))[0]
                    num_bytes = tokens * self._costs.by_name[other].output_bytes
                within = nodes[row] == nodes[schedule.target_row(action)]
                return (self._cluster.intra_node if within else self._cluster.inter_node).transfer_ms(num_bytes)
            curves, share = self._curves_of(action), of_part(action, action.part)
            of_inputs = curves.backward_input.call_ms(*share) * (action.op is not Op.BACKWARD_WEIGHT)
            return of_inputs + curves.backward_weight.call_ms(*share) * (action.op is not Op.BACKWARD_INPUT)

        return PlannedRow(
            graph=schedule.graph,
            pipelines=pipelines,
            row=row,
            action_ms=tuple(map(action_ms, schedule.row(row))),
        )

    def _curves_of(self, action: Action) -> _StageCurves:
        stage = action.lane, action.stage
        if stage not in self._curves:
            first = self._lanes.specs[action.lane, 0].first_layer
            unit = self._costs.by_name[action.lane.unit]
            self._curves[stage] = _stage_curves(unit, self._lanes.specs[stage], first)
        return self._curves[stage]


def _stage_curves(unit: UnitCosts, stage: StageSpec, first: int) -> _StageCurves:
    """Return the curves of a stage.

    Args:
        unit: Its unit.
        stage: The stage.
        first: The first layer of its lane.
    """
    index = unit.index(1, 1)
    layers = unit.layers[stage.first_layer - first : stage.end_layer - first]
    forward, of_inputs, of_weights = Curve(), Curve(), Curve()
    for layer in layers:
        curves = layer.curves[index]
        forward += curves.forward
        of_inputs += curves.backward_input * float(layer.input_gradient)
        of_weights += curves.backward_weight * float(layer.trainable)
    return _StageCurves(forward, of_inputs + forward * float(stage.checkpointing), of_weights)
