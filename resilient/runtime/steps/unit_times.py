"""What the actions of a planned step are expected to take, by the costs that its planner knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import torch

from resilient.comm import Communicator
from resilient.observability.step_trace import PlannedRow
from resilient.planners.costs.correction import UNCORRECTED, Correction
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.costs.curves import Curve
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.unit_graph import PlanLanes, handed_over
from resilient.templates.common.arrays import Floats
from resilient.templates.halves import Halves
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Plan
from resilient.templates.schedules.graph import StageName, StepGraph
from resilient.templates.schedules.schedule import Action, Op, Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.template import StageSpec

CellTimes = tuple[Floats, Floats, Floats]
"""Forward and the two parts of the backward of each part of each cell, each ``[num_stages, num_cells, num_parts]``."""


class UnitTimes:
    """Times of the actions of a plan's stages of units.

    On machines of other kinds other costs were measured. Samples are placed by rank 0's, and what one worker takes of
    what it was expected to take is compared with others': so all expect by rank 0's (:meth:`meet`).

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
        self._nodes = [devices[0].node for devices in plan.rows]
        self._curves: dict[StageName, tuple[Curve, Curve, Curve]] = {}

    def meet(self, comm: Communicator) -> None:
        """Go by the costs of rank 0 from now on; all ranks call this.

        Raises:
            CommunicationError: A peer is gone.
        """
        stages = list(self._lanes.specs)
        told = torch.zeros(len(stages), 3, 3, dtype=torch.float64)
        if comm.rank == 0:
            told += torch.tensor([[astuple(curve) for curve in self._curves_of(each)] for each in stages])
        comm.all_reduce(told, tuple(range(comm.size))).wait()
        for stage, of_stage in zip(stages, told.tolist(), strict=True):
            forward, inputs, weights = (
                Curve(attention=attention, linear=linear, fixed=fixed) for attention, linear, fixed in of_stage
            )
            self._curves[stage] = forward, inputs, weights

    def cell_times(self, graph: StepGraph, assignment: StepAssignment, cells: StepCells) -> CellTimes:
        """Return what stages compute for each part of each cell, which are calls of their own.

        Args:
            graph: Of the step.
            assignment: Says how long samples are.
            cells: Those of the pipelines; of some, the samples of one device of sharded stages.
        """
        calls, squares = self._call_sizes(graph, assignment, cells)
        times = np.zeros((3, graph.num_stages, *calls.shape[1:]))
        for stage, lane in enumerate(graph.tables.lane_of.tolist()):
            for way, curve in enumerate(self._curves_of(graph.stages[stage])):
                told = curve.attention * squares[lane] + curve.linear * calls[lane] + curve.fixed
                times[way, stage] = told * (calls[lane] > 0)
        forward, inputs, weights = times
        return forward, inputs, weights

    def cells_ms(self, graph: StepGraph, assignment: StepAssignment, cells: StepCells) -> Floats:
        """Return what stages compute for each cell, forward and backward; ``[num_stages, num_cells]``."""
        return np.sum(self.cell_times(graph, assignment, cells), axis=(0, 3))

    def planned(
        self,
        schedule: Schedule,
        pipelines: tuple[int, ...],
        row: int,
        assignment: StepAssignment,
        devices: Sequence[StepCells],
        device: int = 0,
        correction: Correction = UNCORRECTED,
    ) -> PlannedRow:
        """Return what a row of a step is expected to take: a call for each part of a cell.

        Devices of a sharded stage wait for each other: what one computes takes as long as the longest of them does.

        Args:
            schedule: Of the step.
            pipelines: Whose it is.
            row: Of the schedule.
            assignment: Says how long samples are.
            devices: The cells of the pipelines; of sharded ones those of each device.
            device: Which one of these is told.
            correction: What was learnt from measured times.
        """
        graph, cells = schedule.graph, devices[device]
        of_devices = [self._corrected(graph, assignment, each, correction) for each in devices]
        forward, inputs, weights = np.max(of_devices, axis=0)
        nodes = [self._nodes[number] for number in self._lanes.rows(pipelines)]
        links = self._cluster.intra_node, self._cluster.inter_node
        actions = schedule.row(row)
        away = [each.op is Op.SEND_F and nodes[row] != nodes[schedule.target_row(each)] for each in actions]

        def sent_bytes(action: Action) -> float:
            lane = action.lane
            if action.peer is None:
                tokens = assignment.lengths(lane.unit).tokens[list(cells.samples[lane][action.index])]
                degree = self._lanes.specs[lane, action.stage].tp_degree  # each device sends its tokens
                return float(tokens.sum()) * self._costs.by_name[lane.unit].boundary_bytes / degree
            unit = handed_over(lane.unit, action.peer.lane.unit)
            wanted = set(cells.samples[action.peer.lane][action.peer.cell])
            made = cells.part(lane, action.index, action.part)
            tokens = assignment.lengths(unit).tokens[[sample for sample in made if sample in wanted]]
            return float(tokens.sum()) * self._costs.by_name[unit].output_bytes

        def action_ms(action: Action, link: Link) -> float:
            if action.op is Op.SEND_F:
                return link.transfer_ms(sent_bytes(action))
            if not action.op.computes:
                return 0.0
            stage = graph.first_stage[action.lane] + action.stage
            if action.op is Op.FORWARD:
                return forward[stage, action.index].sum()
            place = stage, action.index, action.part
            of_inputs = inputs[place] * (action.op is not Op.BACKWARD_WEIGHT)
            return of_inputs + weights[place] * (action.op is not Op.BACKWARD_INPUT)

        return PlannedRow(
            graph=graph,
            pipelines=pipelines,
            row=row,
            device=device,
            action_ms=tuple(float(action_ms(each, links[far])) for each, far in zip(actions, away, strict=True)),
            latency_ms=tuple(
                links[far].latency_ms * (each.op is Op.SEND_F) for each, far in zip(actions, away, strict=True)
            ),
        )

    def _corrected(
        self, graph: StepGraph, assignment: StepAssignment, cells: StepCells, correction: Correction
    ) -> CellTimes:
        """Return :meth:`cell_times` by what was learnt from measured times."""
        factors = np.ones((graph.num_stages, graph.num_cells, 1))
        for stage, name in enumerate(graph.stages):
            lane, degree = name[0], self._lanes.specs[name].tp_degree
            for cell, samples in cells.samples[lane].items():
                longest = assignment.lengths(lane.unit).longest[list(samples)].max()
                factors[stage, cell] = correction.factor(lane.unit, degree, longest)
        forward, inputs, weights = (each * factors for each in self.cell_times(graph, assignment, cells))
        return forward, inputs, weights

    def _curves_of(self, stage: StageName) -> tuple[Curve, Curve, Curve]:
        if stage not in self._curves:
            lane, _ = stage
            first = self._lanes.specs[lane, 0].first_layer
            self._curves[stage] = _stage_curves(self._costs.by_name[lane.unit], self._lanes.specs[stage], first)
        return self._curves[stage]

    def _call_sizes(self, graph: StepGraph, assignment: StepAssignment, cells: StepCells) -> Floats:
        """Return the tokens that are computed for each part of each cell, and their sequences' squared lengths.

        ``[2, num_lanes, num_cells, num_parts]``
        """
        parts = graph.tables.parts
        found = np.zeros((2, *parts.shape, int(parts.max(initial=1))))
        for lane, of_lane in enumerate(graph.lanes):
            unit = of_lane.name.unit
            lengths = assignment.lengths(unit)
            for cell in cells.samples[of_lane.name]:
                for part in range(parts[lane, cell]):
                    samples = lengths[np.array(cells.part(of_lane.name, cell, part), dtype=np.int64)]
                    sizes = samples.padded() if self._costs.by_name[unit].padded else samples
                    found[:, lane, cell, part] = sizes.tokens.sum(), sizes.squares.sum()
        return found


def _stage_curves(unit: UnitCosts, stage: StageSpec, first: int) -> tuple[Curve, Curve, Curve]:
    """Return the curves of a stage: forward, and the halves of the backward as they run apart.

    Args:
        unit: Its unit.
        stage: The stage.
        first: The first layer of its lane.
    """
    index = unit.index(stage.tp_degree, 1)
    layers = unit.layers[stage.first_layer - first : stage.end_layer - first]
    halves = Halves.of(
        trains=any(layer.trainable for layer in layers),
        wanted=layers[0].input_gradient,
        again=stage.checkpointing,
        sharded=stage.shard > 1,
    )
    forward, of_inputs, of_weights = Curve(), Curve(), Curve()
    for number, layer in enumerate(layers):
        curves = layer.curves[index]
        forward += curves.forward
        again = number < stage.recomputed_layers and layer.has_backward
        of_inputs += curves.backward_input * float(layer.input_gradient) + curves.forward * float(again)
        of_weights += curves.backward_weight * float(layer.trainable)
    return forward, *halves.divide(of_inputs, of_weights)
