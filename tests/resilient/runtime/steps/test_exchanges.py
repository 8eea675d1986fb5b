"""GPUs talk over NCCL where both ends order their messages alike, and by way of the hosts elsewhere; who talks to whom
is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.runtime.steps.exchanges import exchanging_pairs, goes_over_nccl, lanes_of
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.small import make_plan


def pairs_of(plan: Plan, rank: int, feeds: tuple[tuple[str, str], ...] | None = None) -> list[tuple[int, int]]:
    lanes, rows = lanes_of(plan, plan.slots[rank].pipeline_index, feeds, [True] * 8)
    return exchanging_pairs(lanes, rows, rank)


def test_neighbours_of_a_pipeline_talk_over_nccl() -> None:
    plan = make_plan(((0, 2, 4, 6), 3), ((0, 3, 6), 5))
    assert goes_over_nccl(plan, "", "1f1b")
    assert [pairs_of(plan, rank) for rank in (0, 1, 2, 3)] == [[(0, 1)], [(0, 1), (1, 2)], [(1, 2)], [(3, 4)]]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_several_stages_of_a_device_and_several_devices_of_a_stage_do_not(schedule: str, workers: int) -> None:
    plan = _with_devices(make_plan(((0, 6), 8)), [workers])
    assert goes_over_nccl(plan, "", schedule) == ((schedule, workers) == ("1f1b", 1))


def test_planned_jobs_do_not_and_features_may_go_from_any_pipeline_to_any() -> None:
    stages = tuple(
        StageSpec(lane=LaneName(unit, 0), first_layer=n, end_layer=n + 1, node_index=n, forward_ms=1.0, backward_ms=2.0)
        for n, unit in enumerate(("vision", "vision", "llm", "llm"))
    )
    pipelines = tuple(
        Pipeline(template=PipelineTemplate(num_nodes=4, stages=stages), nodes=tuple(nodes), num_microbatches=1)
        for nodes in (range(4), range(4, 8), range(8, 12))
    )
    plan, feeds = Plan(pipelines=pipelines), (("vision", "llm"),)
    assert not goes_over_nccl(plan, "resilient", "1f1b")
    assert [pairs_of(plan, rank, feeds) for rank in (4, 7)] == [[(4, 5)], [(6, 7)]], "inside of a unit"
    assert pairs_of(plan, 5, feeds) == [(2, 5), (4, 5), (5, 6), (5, 10)]
    assert pairs_of(plan, 6, feeds) == [(1, 6), (5, 6), (6, 7), (6, 9)]


@pytest.mark.parametrize(
    ("devices", "pairs"),
    [
        ([2, 2], [(0, 1), (0, 2)]),
        ([1, 2], [(0, 1), (0, 2)]),
        ([2, 1, 1], [(0, 1), (0, 2)]),
    ],
)
def test_devices_of_a_stage_talk_to_each_other_and_to_those_beside_them(
    devices: list[int], pairs: list[tuple[int, int]]
) -> None:
    plan = _with_devices(make_plan((tuple(range(0, 2 * len(devices) + 1, 2)), 8)), devices)
    assert pairs_of(plan, 0) == pairs


def test_a_device_of_several_stages_talks_to_the_one_of_the_stage_after_each() -> None:
    (pipeline,) = make_plan(((0, 1, 2, 3, 4, 5, 6), 8)).pipelines
    stages = tuple(
        replace(stage, node_index=index % 3, first_device=0) for index, stage in enumerate(pipeline.template.stages)
    )
    plan = Plan(pipelines=(replace(pipeline, template=replace(pipeline.template, stages=stages)),))
    assert len(plan.slots) == 3
    assert pairs_of(plan, 1) == [(0, 1), (1, 2)]


def _with_devices(plan: Plan, devices: list[int]) -> Plan:
    """Return a plan whose only pipeline has stages of so many devices, each sharded over them."""
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(stage, num_devices=number, shard=number)
        for stage, number in zip(pipeline.template.stages, devices, strict=True)
    )
    return Plan(pipelines=(replace(pipeline, template=replace(pipeline.template, stages=stages)),))
