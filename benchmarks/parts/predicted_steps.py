"""What the steps of a planned job take by the measured curves of its layers, and what they would take at the least."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilient.observability.planned_steps import ComparedStep, planned_steps
from resilient.observability.step_trace import traced_steps
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.planner import Setting
from resilient.profiling.planned_job import planning_of
from resilient.profiling.unit_cells import draw_lengths
from resilient.runtime.batches import sampler_of
from resilient.runtime.job import Job
from resilient.runtime.steps.planning import lengths_table
from resilient.templates.inputs.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What the slowest pipeline of a step takes from the first action to the last.

    Args:
        predicted_ms: As simulated.
        computed_ms: As simulated, but with what was computed taking as long as it did.
        run_ms: What it took.
    """

    predicted_ms: float
    computed_ms: float
    run_ms: float


def step_times(run_directory: Path) -> dict[int, StepTimes]:
    """Return the times of each traced step; simulated ones are without sums of gradients.

    Args:
        run_directory: Of a run of one generation, whose workers wrote down what they did, and what they expected.
    """
    of_step: dict[int, list[ComparedStep]] = {}
    for each in planned_steps(traced_steps(run_directory)):
        of_step.setdefault(each.rows[0].step, []).append(each)
    return {
        step: StepTimes(
            predicted_ms=max(each.timeline.iteration_ms for each in pipelines),
            computed_ms=max(each.computed_ms for each in pipelines),
            run_ms=max(each.run_ms for each in pipelines),
        )
        for step, pipelines in of_step.items()
    }


class StepBounds:
    """How long steps take whose work is spread evenly over all workers, with nothing else.

    Args:
        job: The job, with a planner.
        costs: What it has measured (:func:`kept_costs`).
        num_nodes: Of one device each.
    """

    def __init__(self, job: Job, costs: CostModel, num_nodes: int) -> None:
        cluster = Cluster(devices_per_node=1)
        self._planning = planning_of(job, costs, draw_lengths(job).table, cluster, num_nodes, is_planned=True)
        self._sampler = sampler_of(job)
        self._setting = Setting(
            costs=costs,
            cluster=cluster,
            num_nodes=num_nodes,
            global_batch=job.global_batch,
            microbatch=job.microbatch,
        )

    def of(self, step: int) -> float:
        """Return that of one step, in ms."""
        indices = self._sampler.indices(step).tolist()
        return bound_ms(self._setting, lengths_table(self._planning.units, self._planning.lengths, indices))


def kept_costs(cache: Path) -> CostModel:
    """Return the costs of units that the jobs of one model and data set have kept.

    Args:
        cache: Their XDG_CACHE_HOME, and nobody else's.
    """
    (file,) = cache.glob("resilient/unit_costs/*.json")
    return msgspec.convert(msgspec.json.decode(file.read_bytes())["profile"], CostModel)
