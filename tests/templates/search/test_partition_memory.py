"""Memory is planned for what the schedule of the job keeps in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import KINDS, enough_nodes, problems, profile, schedule_alone


@settings(max_examples=60)
@given(problems(), st.sampled_from(KINDS), st.sampled_from([0.5, 0.7, 0.9, 1.0, 1.2]))
def test_no_pipeline_takes_more_memory_than_there_is(drawn: PlanningProblem, kind: ScheduleKind, share: float) -> None:
    """Of each device, in simulation: states, gradients, and what the microbatches keep."""
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
    for stage in template.stages:
        layers = problem.profile.layers[stage.first_layer : stage.end_layer]
        degree_index, turns = problem.profile.tp_degrees.index(stage.tp_degree), template.round_size // stage.shard
        activations = [layer.costs[degree_index].activation_bytes for layer in layers]
        states = problem.profile.states(stage.first_layer, stage.end_layer)
        total = sum(x.state_bytes + x.gradient_bytes for x in problem.profile.layers if x.name in states)
        held.append(-(-total // stage.num_devices) + stage.checkpointing * max(activations))
        if stage.shard > 1:
            held[-1] += 2 * max(-(-(x.parameter_bytes + x.gradient_bytes) // stage.tp_degree) for x in layers)
        kept = sum(layer.input_bytes for layer in layers) if stage.checkpointing else sum(activations)
        each.append(turns * kept)
    schedule = schedule_alone(problem.schedule, template, num_microbatches)
    costs = ActionCosts(forward_ms=1, backward_input_ms=1, backward_weight_ms=1, activation_bytes=each)
    return held, [int(peak) for peak in simulate(schedule, costs).peak_bytes]


def eight_layers(kind: ScheduleKind, memory_bytes: int | None) -> PlanningProblem:
    """States and gradients of 100 bytes a layer, and 30 bytes of activations for each microbatch."""
    return PlanningProblem(
        profile=profile([1.0] * 8, state_bytes=75, activation_bytes=30, input_bytes=40),
        num_microbatches=20,
        cluster=Cluster(memory_bytes=memory_bytes),
        max_failures=0,
        min_pipeline_nodes=4,
        schedule=kind,
    )


@pytest.mark.parametrize(
    ("kind", "in_flight"),
    [
        (ScheduleKind.ONE_F_ONE_B, (4, 3, 2, 1)),
        (ScheduleKind.EAGER, (4, 3, 2, 1)),
        (ScheduleKind.ZB_H1, (4, 4, 4, 4)),
        (ScheduleKind.ZB_H2, (7, 7, 7, 7)),
        (ScheduleKind.GPIPE, (20, 20, 20, 20)),
    ],
)
def test_stages_hold_what_their_schedule_keeps_in_flight(kind: ScheduleKind, in_flight: tuple[int, ...]) -> None:
    template = plan_templates(eight_layers(kind, None), 4).best(4, 20)
    assert [stage.memory_bytes for stage in template.stages] == [200 + count * 60 for count in in_flight]


def test_eager_1f1b_takes_what_memory_1f1b_leaves() -> None:
    templates = plan_templates(eight_layers(ScheduleKind.EAGER, 500), 4)
    template = templates.best(4, 20)
    assert [stage.max_in_flight for stage in template.stages] == [5, 5, 5, 5]
    assert schedule_alone(ScheduleKind.EAGER, template, 20) == generate(
        ScheduleKind.EAGER, 4, 20, max_in_flight=[5, 5, 5, 5]
    )
    free = plan_templates(eight_layers(ScheduleKind.EAGER, None), 4).best(4, 20)
    assert schedule_alone(ScheduleKind.EAGER, free, 20) == generate(ScheduleKind.EAGER, 4, 20)


def test_memory_that_only_1f1b_fits_in_is_refused() -> None:
    assert plan_templates(eight_layers(ScheduleKind.ONE_F_ONE_B, 500), 4).sizes.start == 4
    with pytest.raises(ValueError, match="must") as caught:
        plan_templates(eight_layers(ScheduleKind.GPIPE, 500), 8)
    assert str(caught.value) == (
        "memory_bytes must hold layer 'l0' alone in a stage, 700 bytes on each device, got 500; use smaller "
        "microbatches, schedule 1f1b or devices with more memory"
    )
