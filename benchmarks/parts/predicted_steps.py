"""What the steps of a planned job take by the measured curves of its layers: the schedules that its workers ran."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.planner import Setting
from resilient.profiling.planned_job import planning_of
from resilient.profiling.unit_cells import draw_lengths
from resilient.runtime.batches import sampler_of
from resilient.runtime.job import Job
from resilient.runtime.steps.planning import lengths_table
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.step_cells import StepCells


class PredictedSteps:
    """The steps of one generation, planned again as its rank 0 did.

    Args:
        job: The job, with a planner.
        costs: What it has measured (:func:`kept_costs`).
        num_nodes: Of one device each, when it began.
        generation: What the event log says of it.
    """

    def __init__(self, job: Job, costs: CostModel, num_nodes: int, generation: Mapping[str, Any]) -> None:
        self._cluster = Cluster(devices_per_node=1)
        self._job, self._num_nodes, self._sampler = job, num_nodes, sampler_of(job)
        self._planning = planning_of(job, costs, draw_lengths(job).table, self._cluster, num_nodes)
        templates = {template.num_nodes: template for template in self._planning.templates}
        self._pipelines = tuple(
            Pipeline(
                template=templates[len(each["nodes"])],
                nodes=tuple(each["nodes"]),
                num_microbatches=each["num_microbatches"],
            )
            for each in generation["pipelines"]
        )
        self._placement = self._planning.placement(Plan(pipelines=self._pipelines), job.microbatch)
        self._layers = [layer for unit in self._planning.costs.units for layer in unit.layers]
        trained = [layer.trainable for layer in self._layers]
        self._lanes = PlanLanes(Plan(pipelines=self._pipelines), self._planning.feeds, trained)

    def step_ms(self, step: int) -> float:
        """Return how long the slowest pipeline takes, without messages, sums of gradients and what ends a step."""
        assignment = self._planning.prepared(self._placement, self._sampler, step)()
        found: list[float] = []
        for pipelines in {assignment.joined(index) for index in range(len(self._pipelines))}:
            cells = assignment.cells(pipelines, self._lanes)
            schedule = self._lanes.schedule(pipelines, cells)
            found.append(simulate(schedule, self._costs(step, cells, schedule)).iteration_ms)
        return max(found)

    def bound_ms(self, step: int) -> float:
        """Return how long all work takes that is spread evenly over all workers."""
        setting = Setting(
            costs=self._planning.costs,
            cluster=self._cluster,
            num_nodes=self._num_nodes,
            global_batch=self._job.global_batch,
            microbatch=self._job.microbatch,
        )
        return bound_ms(setting, self._table(step))

    def _table(self, step: int) -> SampleTable:
        return lengths_table(self._planning.units, self._planning.lengths, self._sampler.indices(step).tolist())

    def _costs(self, step: int, cells: StepCells, schedule: Schedule) -> ActionCosts:
        """Return the sums of the layers' times; each part of a cell is a call of its own, forward and backward."""
        lengths, graph = self._table(step).units, schedule.graph
        parts = graph.tables.parts
        forward, inputs, weights = np.zeros((3, graph.num_stages, graph.num_cells, int(parts.max(initial=1))))
        for number, (name, place) in enumerate(graph.stages):
            stage, lane = self._lanes.specs[name, place], int(graph.tables.lane_of[number])
            for cell in cells.samples[name]:
                for part in range(parts[lane, cell]):
                    samples = list(cells.part(name, cell, part))
                    of_unit = lengths[name.unit]
                    sums = float(of_unit.tokens[samples].sum()), float(of_unit.squares[samples].sum())
                    for layer in self._layers[stage.first_layer : stage.end_layer]:
                        curves, at = layer.curves[0], (number, cell, part)
                        forward[at] += curves.forward.call_ms(*sums)
                        inputs[at] += curves.backward_input.call_ms(*sums) * layer.input_gradient
                        weights[at] += curves.backward_weight.call_ms(*sums) * layer.trainable
                    if stage.checkpointing:
                        inputs[number, cell, part] += forward[number, cell, part]
        return ActionCosts(forward_ms=forward.sum(axis=2), backward_input_ms=inputs, backward_weight_ms=weights)


def kept_costs(cache: Path) -> CostModel:
    """Return the costs of units that the jobs of one model and data set have kept.

    Args:
        cache: Their XDG_CACHE_HOME, and nobody else's.
    """
    (file,) = cache.glob("resilient/unit_costs/*.json")
    return msgspec.convert(msgspec.json.decode(file.read_bytes())["profile"], CostModel)
