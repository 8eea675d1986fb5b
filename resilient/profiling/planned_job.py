"""What a job whose samples a planner places is planned with: costs measured here, the planner's pipelines of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from resilient.data.lengths import SampleLengths
from resilient.errors import ArgumentError
from resilient.models.packing import Packable
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import SampleTable
from resilient.planners.own.best import BestOfAll
from resilient.planners.pipelines.decision import template_of
from resilient.planners.planner import Setting
from resilient.planners.registry import AUTO, planner
from resilient.planners.stages.one_pipeline import pipeline_configurations
from resilient.profiling.cache import job_unit_costs
from resilient.profiling.pipeline_cache import kept_pipelines
from resilient.profiling.unit_cells import draw_lengths
from resilient.profiling.unit_costs import mean_profile
from resilient.runtime.job import Job
from resilient.runtime.steps.planning import UnitPlanning, feeds_of
from resilient.templates.common.compiled import tells_of_compiling
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate

_MORE_NODES = 3
"""Pipelines are planned for so many numbers of nodes, at least: any number is a sum of n to 2 n - 1, and some of these
may be faster."""


def planned_job(
    job: Job,
    cluster: Cluster,
    num_nodes: int,
    announce: Callable[[str], None],
    *,
    tp_degree: int | None = 1,
    is_planned: bool = False,
) -> tuple[ModelProfile, UnitPlanning]:
    """Return the profile of a job's mean cells on this device, and what places its samples.

    Args:
        job: The job; its planner is set.
        cluster: The nodes.
        num_nodes: How many the job begins with.
        announce: Told, in words, that it takes a moment.
        tp_degree: How many devices share each microbatch of a stage; None for whatever the planner finds best.
        is_planned: Whether the job has its pipelines: the planner, which may take seconds, is not asked for them.

    Raises:
        ValueError: The planner has no answer for a pipeline of such stages.
        SampleError: A sample cannot be trained on.
    """
    drawn = draw_lengths(job)
    costs = job_unit_costs(job, drawn, announce)
    profile = mean_profile(job, costs, drawn.table)
    usable = profile.tp_degrees if tp_degree is None else profile.at_degree(tp_degree).tp_degrees
    usable = [degree for degree in usable if degree <= cluster.devices_per_node]
    if not usable:
        constraint = f"be at most the workers of a node, {cluster.devices_per_node}"
        raise ArgumentError("tp", constraint, tp_degree, "start more of them, or give a smaller one")
    costs, cluster = costs.at_degrees(usable), replace(cluster, memory_bytes=job.memory_bytes)
    with tells_of_compiling(announce):
        return profile, planning_of(job, costs, drawn.table, cluster, num_nodes, is_planned=is_planned)


def planning_of(
    job: Job, costs: CostModel, samples: SampleTable, cluster: Cluster, num_nodes: int, *, is_planned: bool = False
) -> UnitPlanning:
    """Ask a job's planner for its pipelines, or look up what it answered before.

    Args:
        job: The job.
        costs: Of its model's units, at the degrees that stages may have.
        samples: Of its data set.
        cluster: The nodes.
        num_nodes: How many the job begins with.
        is_planned: Whether the job has them: there are none in what is returned then.

    Raises:
        ValueError: The planner has no answer for a pipeline.
    """
    chosen = BestOfAll() if job.planner == AUTO else planner(job.planner)
    setting = Setting(
        costs=costs,
        cluster=cluster,
        num_nodes=num_nodes,
        global_batch=job.global_batch,
        microbatch=job.microbatch,
        splits=job.schedule == ScheduleKind.ZB_H1.value,
    )
    fewest = job.min_pipeline_nodes
    sizes = range(fewest, fewest + max(fewest, _MORE_NODES))

    def plan() -> tuple[PipelineTemplate, ...]:
        answers = pipeline_configurations(chosen, setting, samples, sizes)
        of_size = {size: replace(setting, num_nodes=size) for size in answers}
        return tuple(template_of(of_size[size], answer, samples) for size, answer in answers.items())

    assert isinstance(job.model, Packable)
    return UnitPlanning(
        planner=chosen,
        costs=costs,
        lengths=SampleLengths(job.dataset, job.model),
        feeds=feeds_of(job.model.units),
        templates=() if is_planned else kept_pipelines(job.planner, setting, samples, sizes, plan),
        cluster=cluster,
    )
