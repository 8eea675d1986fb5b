"""Computes what ``resilient plan`` shows: the templates, the plan on all nodes, and what is left as nodes are lost.

Owns the computing; nothing is printed or written here. Every plan is made by the functions that a job uses.

Which nodes are lost matters, so :data:`SEQUENCES` jobs are followed: in each, nodes are lost one after the other in an
order drawn from a fixed seed, and every time :func:`~resilient.templates.replan.replan.replan_candidates` says how to
go on from the plan before, down to the fewest nodes that f + 1 pipelines can have. Where that would take more than
:data:`MOST_LOSSES` losses, several nodes are lost at a time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from resilient.cli.plan.share_limits import LimitedSplit, limited_split
from resilient.errors import ArgumentError
from resilient.templates.composition.batch_split import slowed_line
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.replan import first_candidate, replan_candidates, templates_for
from resilient.templates.replan.schedule_choice import ScheduleChoice
from resilient.templates.replan.way import ReplanCandidate
from resilient.templates.template import PipelineTemplate

SEQUENCES = 8
"""Orders of losing nodes that are followed."""

MOST_LOSSES = 48
"""Losses after one another in each of them."""

OnProgress = Callable[[int, int], None]
"""Called with how many plans were made and how many there are to make."""

_SLOWEST = 1_000_000
"""Times that a node may be slower than others: its steps are still a number."""


@dataclass(frozen=True, kw_only=True)
class TemplateRow:
    """A template, the best of its size at the share of the batch that its nodes are of all.

    Args:
        num_nodes: Its nodes.
        tp_degrees: Devices of each stage that share a microbatch; 1 where it is sharded.
        shards: Devices that divide each stage's state, a microbatch each; 1 where it is not sharded.
        num_checkpointing: Stages that run their forward again.
        slowest_ms: Of a microbatch on the slowest stage; of a round of them, one for each device of a sharded stage.
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
    """A pipeline of a plan; ``tp_degrees`` and ``shards`` as of a template.

    Args:
        layers: Of each stage, the first layer and one past the last.
    """

    num_nodes: int
    layers: tuple[tuple[int, int], ...]
    tp_degrees: tuple[int, ...]
    shards: tuple[int, ...]
    num_microbatches: int
    iteration_ms: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SlowNodeRow:
    """A node that is slow, by how much, and whether it stands by."""

    factor: float
    stands_by: bool


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
        schedule: What pipelines run.
        num_chunks: Stages of each device.
        choice: Why it is this schedule, where it was to be chosen.
        templates: By size.
        pipelines: Of the plan on all nodes.
        num_idle: Nodes that stand by.
        slow: By how much slower than others nodes are that were said to be slow, and whether they stand by.
        step_ms: Its step.
        with_idle_ms: The step if nodes that stand by to make it shorter did not; None where there are none.
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
    schedule: str
    num_chunks: int
    choice: ScheduleChoice | None
    templates: tuple[TemplateRow, ...]
    pipelines: tuple[PipelineRow, ...]
    num_idle: int
    slow: tuple[SlowNodeRow, ...]
    step_ms: float
    with_idle_ms: float | None
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
    *,
    share: str | None = None,
    slow: Sequence[float] = (),
    choice: ScheduleChoice | None = None,
) -> PlanReport:
    """Plan a job and lose its nodes.

    Args:
        problem: The job.
        num_nodes: Its nodes.
        microbatch: Samples of a microbatch.
        on_progress: Told how far it is.
        share: Limits on every pipeline's share, as for :func:`~resilient.cli.plan.share_limits.limited_split`.
        slow: By how much slower than the others the last nodes are.
        choice: Of the job's schedule.

    Raises:
        ValueError: The job cannot be planned on so many nodes, or not within the limits; the message says what would
            do.
    """
    _check_slow(slow, num_nodes, share)
    templates = templates_for(problem, num_nodes)
    slowdowns = dict(zip(range(num_nodes - len(slow), num_nodes), slow, strict=True))
    first = first_candidate(problem, range(num_nodes), slowdowns=slowdowns)
    plan = first.plan
    fewest_nodes = (problem.max_failures + 1) * templates.sizes.start
    largest = num_nodes - problem.max_failures * templates.sizes.start
    global_batch = problem.num_microbatches * microbatch
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
        schedule=problem.schedule.value,
        num_chunks=problem.num_chunks,
        choice=choice,
        templates=tuple(
            _template_row(templates.best(size, share, alone=alone), share, alone=alone)
            for size in templates.sizes
            if size <= largest
            for alone in [size == num_nodes or size not in templates.sizes_beside]
            for part in [1.0 if alone else size / num_nodes]
            for share in [max(1, round(problem.num_microbatches * part))]
        ),
        pipelines=tuple(
            PipelineRow(
                num_nodes=pipeline.template.num_nodes,
                layers=tuple((stage.first_layer, stage.end_layer) for stage in pipeline.template.stages),
                tp_degrees=tuple(stage.tp_degree for stage in pipeline.template.stages),
                shards=tuple(stage.shard for stage in pipeline.template.stages),
                num_microbatches=pipeline.num_microbatches,
                iteration_ms=finish_ms,
                memory_bytes=_memory_bytes(pipeline.template),
            )
            for pipeline, finish_ms in zip(plan.pipelines, _finish_ms(plan, slowdowns), strict=True)
        ),
        num_idle=num_nodes - len(plan.nodes),
        slow=tuple(SlowNodeRow(factor=slowdowns[n], stands_by=n not in plan.nodes) for n in slowdowns),
        step_ms=first.step_ms,
        with_idle_ms=first.with_more_ms,
        samples_per_s=global_batch / first.step_ms * 1e3,
        losses=_losses(problem, first, num_nodes, fewest_nodes, slowdowns, global_batch, on_progress),
        limited=limited,
    )


def _check_slow(slow: Sequence[float], num_nodes: int, share: str | None) -> None:
    if len(slow) > num_nodes or not all(1 <= factor <= _SLOWEST for factor in slow):
        raise ArgumentError(
            "slow",
            f"be a number from 1 to {_SLOWEST} for each of at most {num_nodes} nodes",
            ", ".join(f"{factor:g}" for factor in slow),
            "1 is as fast as the others, 2 takes twice as long",
        )
    if slow and share is not None:
        raise ArgumentError("share", "stand without {slow}", repr(share), "ask one after the other")


def _finish_ms(plan: Plan, slowdowns: Mapping[int, float]) -> list[float]:
    """Return when each pipeline is done with its share, as fast as its nodes are."""
    alone = len(plan.pipelines) == 1
    lines = (
        slowed_line(each.template, [slowdowns.get(node, 1.0) for node in each.nodes], alone=alone)
        for each in plan.pipelines
    )
    return [line.finish_ns(each.num_microbatches) / 1e6 for line, each in zip(lines, plan.pipelines, strict=True)]


def _losses(
    problem: PlanningProblem,
    first: ReplanCandidate,
    num_nodes: int,
    fewest_nodes: int,
    slowdowns: Mapping[int, float],
    global_batch: int,
    on_progress: OnProgress | None,
) -> tuple[LossRow, ...]:
    can_lose = num_nodes - fewest_nodes
    stride = max(1, -(-can_lose // MOST_LOSSES))
    counts = sorted({*range(stride, can_lose + 1, stride), can_lose} - {0})
    jobs: list[list[ReplanCandidate]] = []
    for seed in range(SEQUENCES):
        order = random.Random(seed).sample(range(num_nodes), num_nodes)
        plans = [first]
        for lost in counts:
            left = sorted(order[lost:])
            plans.append(next(replan_candidates(problem, plans[-1].plan, left, slowdowns=slowdowns)))
            if on_progress:
                on_progress(seed * len(counts) + len(plans) - 1, SEQUENCES * len(counts))
        jobs.append(plans)
    return tuple(
        _loss_row(lost, plans, num_nodes, global_batch, first.step_ms)
        for lost, plans in zip((0, *counts), zip(*jobs, strict=True), strict=True)
    )


def _loss_row(
    num_lost: int, plans: Sequence[ReplanCandidate], num_nodes: int, global_batch: int, all_ms: float
) -> LossRow:
    steps_ms = [plan.step_ms for plan in plans]
    worst_ms = max(steps_ms)
    worst = plans[steps_ms.index(worst_ms)].plan
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
    return max(sum(stage.memory_bytes for stage in row) for row in template.rows)
