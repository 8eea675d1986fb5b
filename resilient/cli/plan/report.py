"""Computes what ``resilient plan`` shows: the templates, the plan on all nodes, and what is left as nodes are lost.

Owns the computing; nothing is printed or written here. Every plan is made by the functions that a job uses.

Which nodes are lost matters, so :data:`SEQUENCES` jobs are followed: in each, nodes are lost one after the other in an
order drawn from a fixed seed, and every time :func:`~resilient.templates.replan.replan.replan` goes on from the plan
before, down to the fewest nodes that f + 1 pipelines can have. Where that would take more than :data:`MOST_LOSSES`
losses, several nodes are lost at a time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from resilient.cli.plan.share_limits import LimitedSplit, limited_split
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan, replan, templates_for
from resilient.templates.template import PipelineTemplate

SEQUENCES = 8
"""Orders of losing nodes that are followed."""

MOST_LOSSES = 48
"""Losses after one another in each of them."""

OnProgress = Callable[[int, int], None]
"""Called with how many plans were made and how many there are to make."""


@dataclass(frozen=True, kw_only=True)
class TemplateRow:
    """A template, the best of its size at the share of the batch that its nodes are of all.

    Args:
        num_nodes: Its nodes.
        tp_degrees: Devices of each stage that share a microbatch.
        shards: Groups of such devices that divide each stage's state, a microbatch each; 1 where it is not sharded.
        num_checkpointing: Stages that run their forward again.
        slowest_ms: Of a microbatch on the slowest stage; of a round of them, one for each group of a sharded stage.
        num_microbatches: Its share.
        iteration_ms: Predicted time of its share.
        memory_bytes: Most that one device holds.
    """

    num_nodes: int
    tp_degrees: tuple[int, ...]
    shards: tuple[int, ...]
    num_checkpointing: int
    slowest_ms: float
    num_microbatches: int
    iteration_ms: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """A pipeline of a plan."""

    num_nodes: int
    num_microbatches: int
    iteration_ms: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """The throughput and the pipelines after losing some nodes.

    Args:
        num_lost: Nodes lost.
        samples_per_s: Predicted, mean over the orders of losing them.
        worst_samples_per_s: Predicted, in the worst of them.
        kept: ``samples_per_s`` by that of all nodes.
        worst_kept: Likewise.
        num_idle: Nodes that no pipeline uses, in the worst order.
        pipelines: Nodes of the pipelines, in the worst order.
    """

    num_lost: int
    samples_per_s: float
    worst_samples_per_s: float
    kept: float
    worst_kept: float
    num_idle: int
    pipelines: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that ``resilient plan`` shows.

    Args:
        source: Of the profile.
        num_nodes: Nodes of the job.
        devices_per_node: Devices of each.
        device_memory_bytes: What a plan may use of a device; None for no limit.
        max_failures: Failures survivable at once.
        min_pipeline_nodes: Nodes of the smallest template.
        fewest_nodes: Nodes with which the job can go on.
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.
        templates: By size.
        pipelines: Of the plan on all nodes.
        num_idle: Nodes that it has no use for.
        step_ms: Its step.
        samples_per_s: Its throughput.
        losses: From no node lost to as many as can be.
        limited: The plan's split within limits on every pipeline's share, where such were given.
    """

    source: str
    num_nodes: int
    devices_per_node: int
    device_memory_bytes: int | None
    max_failures: int
    min_pipeline_nodes: int
    fewest_nodes: int
    global_batch: int
    microbatch: int
    templates: tuple[TemplateRow, ...]
    pipelines: tuple[PipelineRow, ...]
    num_idle: int
    step_ms: float
    samples_per_s: float
    losses: tuple[LossRow, ...]
    limited: LimitedSplit | None = None

    @property
    def order_matters(self) -> bool:
        """Whether it matters which nodes are lost, by 0.05 % or more."""
        return any(row.kept - row.worst_kept >= 0.0005 for row in self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of the ``--json`` file."""
        return dataclasses.asdict(self)


def build_plan_report(
    problem: PlanningProblem,
    num_nodes: int,
    microbatch: int,
    on_progress: OnProgress | None = None,
    share: str | None = None,
) -> PlanReport:
    """Plan a job and lose its nodes.

    Args:
        problem: The job.
        num_nodes: Its nodes.
        microbatch: Samples of a microbatch.
        on_progress: Told how far it is.
        share: Limits on every pipeline's share, as for :func:`~resilient.cli.plan.share_limits.limited_split`.

    Raises:
        ValueError: The job cannot be planned on so many nodes, or not within the limits; the message says what would
            do.
    """
    templates = templates_for(problem, num_nodes)
    plan = first_plan(problem, range(num_nodes))
    fewest_nodes = (problem.max_failures + 1) * templates.sizes.start
    largest = num_nodes - problem.max_failures * templates.sizes.start
    global_batch = problem.num_microbatches * microbatch
    step_ms = max(plan.finish_ms)
    limited = None if share is None else limited_split(plan, share)
    return PlanReport(
        source=problem.profile.source,
        num_nodes=num_nodes,
        devices_per_node=problem.cluster.devices_per_node,
        device_memory_bytes=problem.cluster.memory_bytes,
        max_failures=problem.max_failures,
        min_pipeline_nodes=templates.sizes.start,
        fewest_nodes=fewest_nodes,
        global_batch=global_batch,
        microbatch=microbatch,
        templates=tuple(
            _template_row(templates.best(size, share, alone=size == num_nodes), share, alone=size == num_nodes)
            for size in templates.sizes
            if size <= largest
            for share in [max(1, round(problem.num_microbatches * size / num_nodes))]
        ),
        pipelines=tuple(
            PipelineRow(
                num_nodes=pipeline.template.num_nodes,
                num_microbatches=pipeline.num_microbatches,
                iteration_ms=finish_ms,
                memory_bytes=_memory_bytes(pipeline.template),
            )
            for pipeline, finish_ms in zip(plan.pipelines, plan.finish_ms, strict=True)
        ),
        num_idle=num_nodes - len(plan.nodes),
        step_ms=step_ms,
        samples_per_s=global_batch / step_ms * 1e3,
        losses=_losses(problem, plan, num_nodes, fewest_nodes, global_batch, on_progress),
        limited=limited,
    )


def _losses(
    problem: PlanningProblem,
    plan: Plan,
    num_nodes: int,
    fewest_nodes: int,
    global_batch: int,
    on_progress: OnProgress | None,
) -> tuple[LossRow, ...]:
    can_lose = num_nodes - fewest_nodes
    stride = max(1, -(-can_lose // MOST_LOSSES))
    counts = sorted({*range(stride, can_lose + 1, stride), can_lose} - {0})
    jobs: list[list[Plan]] = []
    for seed in range(SEQUENCES):
        order = random.Random(seed).sample(range(num_nodes), num_nodes)
        plans = [plan]
        for lost in counts:
            plans.append(replan(problem, plans[-1], sorted(order[lost:])))
            if on_progress:
                on_progress(seed * len(counts) + len(plans) - 1, SEQUENCES * len(counts))
        jobs.append(plans)
    return tuple(
        _loss_row(lost, plans, num_nodes, global_batch, max(plan.finish_ms))
        for lost, plans in zip((0, *counts), zip(*jobs, strict=True), strict=True)
    )


def _loss_row(num_lost: int, plans: Sequence[Plan], num_nodes: int, global_batch: int, all_ms: float) -> LossRow:
    steps_ms = [max(plan.finish_ms) for plan in plans]
    worst_ms = max(steps_ms)
    worst = plans[steps_ms.index(worst_ms)]
    return LossRow(
        num_lost=num_lost,
        samples_per_s=fmean(global_batch / step_ms * 1e3 for step_ms in steps_ms),
        worst_samples_per_s=global_batch / worst_ms * 1e3,
        kept=fmean(all_ms / step_ms for step_ms in steps_ms),
        worst_kept=all_ms / worst_ms,
        num_idle=num_nodes - num_lost - len(worst.nodes),
        pipelines=tuple(sorted((pipeline.template.num_nodes for pipeline in worst.pipelines), reverse=True)),
    )


def _template_row(template: PipelineTemplate, share: int, *, alone: bool) -> TemplateRow:
    return TemplateRow(
        num_nodes=template.num_nodes,
        tp_degrees=tuple(stage.tp_degree for stage in template.stages),
        shards=tuple(stage.shard for stage in template.stages),
        num_checkpointing=sum(stage.checkpointing for stage in template.stages),
        slowest_ms=template.slowest_ms,
        num_microbatches=share,
        iteration_ms=template.iteration_ms(share, alone=alone),
        memory_bytes=_memory_bytes(template),
    )


def _memory_bytes(template: PipelineTemplate) -> int:
    return max(stage.memory_bytes for stage in template.stages)
