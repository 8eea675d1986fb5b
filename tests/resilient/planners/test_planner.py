"""What planners are given: jobs and replicas with something in them, and the pipelines of a plan as replicas."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from resilient.planners.planner import Replica, replicas_of
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.planners.jobs_of_planners import setting


def pipeline(node: int, slowest_ms: float, num_microbatches: int) -> Pipeline:
    """One whose second stage takes twice as long as its first."""
    stages = (
        StageSpec(first_layer=0, end_layer=1, node_index=0, forward_ms=slowest_ms / 2, backward_ms=0.0),
        StageSpec(first_layer=1, end_layer=2, node_index=0, first_device=1, forward_ms=0.0, backward_ms=slowest_ms),
    )
    template = PipelineTemplate(num_nodes=1, stages=stages)
    return Pipeline(template=template, nodes=(node,), num_microbatches=num_microbatches)


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    plan = Plan(pipelines=(pipeline(0, 3.0, 5), pipeline(1, 1.5, 9), pipeline(2, 6.0, 2)))
    found = [(each.num_microbatches, each.speed) for each in replicas_of(plan)]
    assert found == [(5, 0.5), (9, 1.0), (2, 0.25)]


def test_pipelines_that_take_no_time_are_equally_fast() -> None:
    plan = Plan(pipelines=(pipeline(0, 0.0, 1), pipeline(1, 0.0, 2)))
    assert [each.speed for each in replicas_of(plan)] == [1.0, 1.0]


@pytest.mark.parametrize(("count", "speed"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_replica_without_work_or_speed_is_refused(count: int, speed: float) -> None:
    message = f"num_microbatches must be >= 1 and speed > 0, got {count} and {speed}; leave out pipelines without work"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Replica(num_microbatches=count, speed=speed)


@pytest.mark.parametrize("name", ["num_nodes", "global_batch", "microbatch"])
def test_a_job_of_nothing_is_refused(name: str) -> None:
    numbers = {"num_nodes": 8, "global_batch": 32, "microbatch": 2} | {name: 0}
    one, two, three = numbers.values()
    message = (
        f"num_nodes, global_batch and microbatch must be >= 1, got {one}, {two} and {three}; a job has one of each at "
        f"least"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(setting(), **{name: 0})
