"""GPUs talk over NCCL where both ends order their messages alike, and by way of the hosts elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.runtime.steps.over_nccl import pairs_over_nccl
from resilient.templates.plan import Plan
from tests.resilient.small import make_plan


def test_neighbours_of_a_pipeline_talk_over_nccl() -> None:
    plan = make_plan(((0, 2, 4, 6), 3), ((0, 3, 6), 5))
    assert pairs_over_nccl(plan, "", "1f1b") == [(0, 1), (1, 2), (3, 4)]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_several_stages_of_a_device_and_several_devices_of_a_stage_do_not(schedule: str, workers: int) -> None:
    (pipeline,) = make_plan(((0, 6), 8)).pipelines
    stages = tuple(replace(stage, num_devices=workers, shard=workers) for stage in pipeline.template.stages)
    plan = Plan(pipelines=(replace(pipeline, template=replace(pipeline.template, stages=stages)),))
    found = pairs_over_nccl(plan, "", schedule)
    assert found == ([] if (schedule, workers) == ("1f1b", 1) else None)


def test_planned_jobs_do_not() -> None:
    assert pairs_over_nccl(make_plan(((0, 3, 6), 5)), "resilient", "1f1b") is None
