"""Memory is planned for what the schedule of the job keeps in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import SPLIT_KINDS, ScheduleKind
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import KINDS, enough_nodes, problems, profile, schedule_alone
from tests.templates.search.exhaustive import moments_of_row
from tests.templates.search.stage_bytes import StageBytes


@settings(max_examples=60)
@given(problems(), st.sampled_from(KINDS), st.sampled_from([0.5, 0.7, 0.9, 1.0, 1.2]))
def test_no_pipeline_takes_more_memory_than_there_is(drawn: PlanningProblem, kind: ScheduleKind, share: float) -> None:
    """Of each device: states, gradients, and what the microbatches keep."""
    roomy = replace(drawn, schedule=kind, cluster=replace(drawn.cluster, memory_bytes=None))
    largest = plan_templates(roomy, enough_nodes(roomy)).layouts[-1]
    scarce = int(share * max(stage.memory_bytes for template in largest for stage in template.stages))
    problem = replace(roomy, cluster=replace(drawn.cluster, memory_bytes=scarce))
    try:
        # as many as f + 1 of the largest take: the smallest that fits may be that
        templates = plan_templates(problem, (problem.max_failures + 1) * largest[0].num_nodes)
    except ValueError:
        assert share < 1, "the largest templates fit"
        return
    for template in (template for layouts in templates.layouts for template in layouts):
        for count in {1, -(-problem.most_microbatches // 2), problem.most_microbatches}:
            for held, kept in zip(*memory_taken(problem, template, count), strict=True):
                assert held + kept <= scarce


def memory_taken(
    problem: PlanningProblem, template: PipelineTemplate, num_microbatches: int
) -> tuple[list[int], list[int]]:
    """Per stage: what a device holds all the time (layers it gathers or checkpoints, too), and the rest."""
    held: list[int] = []
    each: list[int] = []
    schedule = schedule_alone(problem.schedule, template, num_microbatches)
    for stage, actions in zip(template.stages, schedule.rows, strict=True):
        of_stage = StageBytes(
            problem.profile, stage.first_layer, stage.end_layer, stage.shard, stage.tp_degree, rising=False
        )
        again, turns = stage.checkpointing, template.round_size // stage.shard
        workspace = of_stage.split_workspace if problem.schedule in SPLIT_KINDS else of_stage.workspace
        held.append(of_stage.held + (of_stage.largest if again else workspace))
        before = of_stage.each_again if again else of_stage.each
        between = of_stage.waiting_again if again else of_stage.waiting
        each.append(turns * max(n * before + waits * between for n, waits in moments_of_row(actions)))
    return held, each


def eight_layers(kind: ScheduleKind, memory_bytes: int | None) -> PlanningProblem:
    """States and gradients of 100 bytes a layer, 30 bytes of activations for each microbatch, and 10 that are sent."""
    return PlanningProblem(
        profile=profile([1.0] * 8, state_bytes=75, activation_bytes=30, input_bytes=10),
        num_microbatches=20,
        cluster=Cluster(memory_bytes=memory_bytes),
        max_failures=0,
        min_pipeline_nodes=4,
        schedule=kind,
    )


@pytest.mark.parametrize(
    ("kind", "in_flight"),
    [
        (ScheduleKind.ONE_F_ONE_B, ((4, 0), (3, 0), (2, 0), (1, 0))),
        (ScheduleKind.EAGER, ((4, 0), (3, 0), (2, 0), (1, 0))),
        (ScheduleKind.SPLIT, ((4, 0), (3, 0), (2, 0), (1, 0))),
        (ScheduleKind.ZB_H1, ((4, 0), (3, 1), (2, 2), (1, 3))),
        (ScheduleKind.ZB_H2, ((7, 0), (5, 2), (3, 4), (1, 6))),
        (ScheduleKind.GPIPE, ((20, 0), (20, 0), (20, 0), (20, 0))),
    ],
)
def test_stages_hold_what_their_schedule_keeps_in_flight(
    kind: ScheduleKind, in_flight: tuple[tuple[int, int], ...]
) -> None:
    """Before their backward with room for a gradient to return, between its parts without."""
    template = plan_templates(eight_layers(kind, None), 4).best(4, 20)
    sent, arriving = (10, 10, 10, 0), (0, 20, 20, 20)
    assert [stage.memory_bytes for stage in template.stages] == [
        200 + more + before * (60 + 2 * each) + waiting * (60 + each)
        for (before, waiting), each, more in zip(in_flight, sent, arriving, strict=True)
    ]


def test_frozen_stages_hold_nothing_between_the_parts_of_a_backward() -> None:
    problem = eight_layers(ScheduleKind.ZB_H1, None)
    problem = replace(problem, profile=problem.profile.frozen(["l2", "l3", "l4", "l5"]))
    template = plan_templates(problem, 4).best(4, 20)
    assert [stage.end_layer for stage in template.stages] == [2, 5, 7, 8]
    assert template.stages[1].memory_bytes == 3 * 25 + 20 + 3 * (3 * 30 + 20)


def test_eager_1f1b_takes_what_memory_1f1b_leaves() -> None:
    templates = plan_templates(eight_layers(ScheduleKind.EAGER, 650), 4)
    template = templates.best(4, 20)
    assert [stage.max_in_flight for stage in template.stages] == [5, 5, 5, 7], "the last one sends nothing"
    assert schedule_alone(ScheduleKind.EAGER, template, 20) == generate(
        ScheduleKind.EAGER, 4, 20, max_in_flight=[5, 5, 5, 7]
    )
    free = plan_templates(eight_layers(ScheduleKind.EAGER, None), 4).best(4, 20)
    assert schedule_alone(ScheduleKind.EAGER, free, 20) == generate(ScheduleKind.EAGER, 4, 20)


def test_memory_that_only_1f1b_fits_in_is_refused() -> None:
    assert plan_templates(eight_layers(ScheduleKind.ONE_F_ONE_B, 550), 4).sizes.start == 4
    with pytest.raises(ValueError, match="must") as caught:
        plan_templates(eight_layers(ScheduleKind.GPIPE, 550), 8)
    assert str(caught.value) == (
        "memory_bytes must hold layer 'l1' alone in a stage, 750 bytes on each device, got 550; use smaller "
        "microbatches, schedule 1f1b or devices with more memory"
    )
