"""A plan says what its pipelines run."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from resilient.templates.common.byte_intervals import ByteIntervals, Piece
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Plan, PlanningProblem, Sharding
from resilient.templates.replan.replan import first_plan, replan
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from tests.templates.jobs import cut, plan_of, profile

TRAINING = [kind for kind in ScheduleKind if kind is not ScheduleKind.FORWARD_ONLY]


def problem_for(kind: ScheduleKind) -> PlanningProblem:
    return PlanningProblem(
        profile=profile([1.0] * 12),
        num_microbatches=8,
        cluster=Cluster(),
        min_pipeline_nodes=2,
        schedule=kind,
        num_chunks=chunks_of(kind, 2),
    )


@pytest.mark.parametrize("kind", TRAINING)
def test_plan_carries_the_schedule_of_the_job_through_changes_and_in_messages(kind: ScheduleKind) -> None:
    problem = problem_for(kind)
    plan = first_plan(problem, range(5))
    after = replan(problem, plan, [0, 1, 3, 4])
    for each in (plan, after):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=Plan) == each
        for index, pipeline in enumerate(each.pipelines):
            chunks = pipeline.template.num_chunks
            assert chunks == problem.num_chunks
            expected = generate(kind, len(pipeline.template.rows), pipeline.num_microbatches, num_chunks=chunks)
            assert each.schedule(index) == expected


def test_pipeline_of_one_device_has_one_stage_also_when_others_have_more() -> None:
    plan = replace(plan_of((cut(4), [0])), schedule_kind=ScheduleKind.INTERLEAVED)
    assert str(plan.schedule(0)) == "0F0 0B0"


def test_pipeline_runs_ahead_only_as_far_as_its_memory_allows() -> None:
    wide = replace(plan_of((cut(1, 2, 3), range(3))), schedule_kind=ScheduleKind.EAGER)
    (pipeline,) = wide.pipelines
    stages = tuple(replace(stage, max_in_flight=3) for stage in pipeline.template.stages)
    pipeline = replace(pipeline, num_microbatches=6)
    narrow = replace(pipeline, template=replace(pipeline.template, stages=stages))
    as_planned, limited = (replace(wide, pipelines=(each,)).schedule(0) for each in (pipeline, narrow))
    assert as_planned == generate(ScheduleKind.EAGER, 3, 6)
    assert limited == generate(ScheduleKind.EAGER, 3, 6, max_in_flight=[3, 3, 3])
    assert limited != as_planned


def test_slot_knows_what_its_worker_holds_of_each_state() -> None:
    layers = profile([1.0] * 4, state_bytes=100, shares={3: (0,)})
    plan = plan_of((cut(2, 4), [0, 1]), (cut(4, degree=3, devices=3), [2]))
    whole, *thirds = (ByteIntervals.of(*bounds) for bounds in ((0, 100), (0, 32), (32, 64), (64, 100)))
    assert [slot.intervals(layers) for slot in plan.slots] == [
        dict.fromkeys(("l0", "l1"), whole),
        dict.fromkeys(("l0", "l2", "l3"), whole),
        *(dict.fromkeys(("l0", "l1", "l2", "l3"), third) for third in thirds),
    ]
    assert plan.holders(layers)["l3"] == {1: whole} | dict(zip((2, 3, 4), thirds, strict=True))
    assert plan.pieces(layers)["l0"] == tuple(Piece((0, 1, 2 + i), third) for i, third in enumerate(thirds))
    assert plan.redundancy(layers) == 2


def test_microbatches_are_given_to_pipelines_one_after_the_other() -> None:
    plan = plan_of((cut(4), [0]), (cut(4), [1]), (cut(4), [2]))
    counts = [
        replace(pipeline, num_microbatches=count) for pipeline, count in zip(plan.pipelines, (2, 3, 1), strict=True)
    ]
    plan = replace(plan, pipelines=tuple(counts))
    assert [plan.microbatches(index) for index in range(3)] == [(0, 1), (2, 3, 4), (5,)]


def test_planned_jobs_are_sharded_as_their_planner_says() -> None:
    problem = problem_for(ScheduleKind.ONE_F_ONE_B)
    message = (
        r"^shard must be off for jobs with a planner \(it decides which units are sharded\), got on; leave it out$"
    )
    with pytest.raises(ValueError, match=message):
        replace(problem, templates=(cut(6, 12),), sharding=Sharding.ON)
