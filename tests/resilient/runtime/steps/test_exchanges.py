"""GPUs talk over NCCL where both ends order their messages alike, and by way of the hosts elsewhere; who talks to whom
is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.runtime.steps.exchanges import exchanging_pairs, goes_over_nccl
from resilient.templates.plan import Plan
from tests.resilient.small import make_plan


def test_neighbours_of_a_pipeline_talk_over_nccl() -> None:
    plan = make_plan(((0, 2, 4, 6), 3), ((0, 3, 6), 5))
    assert goes_over_nccl(plan, "", "1f1b")
    assert [exchanging_pairs(plan, "", rank) for rank in (0, 2, 3, 5)] == [[(0, 1), (1, 2)]] * 2 + [[(3, 4)], []]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_several_stages_of_a_device_and_several_devices_of_a_stage_do_not(schedule: str, workers: int) -> None:
    plan = _with_devices(make_plan(((0, 6), 8)), [workers])
    assert goes_over_nccl(plan, "", schedule) == ((schedule, workers) == ("1f1b", 1))


def test_planned_jobs_do_not_and_may_send_from_anybody_to_anybody() -> None:
    plan = make_plan(((0, 3, 6), 5))
    assert not goes_over_nccl(plan, "resilient", "1f1b")
    assert [exchanging_pairs(plan, "resilient", rank) for rank in (0, 7)] == [None, None]


@pytest.mark.parametrize(
    ("devices", "pairs"),
    [
        ([2, 2], [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ([1, 2], [(0, 1), (0, 2), (1, 2)]),
        ([2, 1, 1], [(0, 1), (0, 2), (1, 2), (2, 3)]),
    ],
)
def test_devices_of_a_stage_talk_to_each_other_and_to_those_beside_them(
    devices: list[int], pairs: list[tuple[int, int]]
) -> None:
    plan = _with_devices(make_plan((tuple(range(0, 2 * len(devices) + 1, 2)), 8)), devices)
    assert exchanging_pairs(plan, "", 0) == pairs


def test_a_device_of_several_stages_talks_to_the_one_of_the_stage_after_each() -> None:
    (pipeline,) = make_plan(((0, 1, 2, 3, 4, 5, 6), 8)).pipelines
    stages = tuple(
        replace(stage, node_index=index % 3, first_device=0) for index, stage in enumerate(pipeline.template.stages)
    )
    plan = Plan(pipelines=(replace(pipeline, template=replace(pipeline.template, stages=stages)),))
    assert len(plan.slots) == 3
    assert exchanging_pairs(plan, "", 1) == [(0, 1), (0, 2), (1, 2)]


def _with_devices(plan: Plan, devices: list[int]) -> Plan:
    """Return a plan whose only pipeline has stages of so many devices, each sharded over them."""
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(stage, num_devices=number, shard=number)
        for stage, number in zip(pipeline.template.stages, devices, strict=True)
    )
    return Plan(pipelines=(replace(pipeline, template=replace(pipeline.template, stages=stages)),))
