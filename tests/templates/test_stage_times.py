"""What stages are expected to take, half by half."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import LayerCost, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import SPLIT_KINDS, ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search.partition import plan_templates
from resilient.templates.stage_times import stage_times
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import profile


def four_stages(
    inputs_ms: float = 2.0,
    weights_ms: float = 3.0,
    *,
    schedule: ScheduleKind = ScheduleKind.ZB_H1,
    again: bool = False,
) -> tuple[PlanningProblem, PipelineTemplate]:
    """Eight layers on four nodes, whose forwards take 1 ms; they run again where memory holds inputs alone."""
    cost = LayerCost(forward_ms=1.0, backward_input_ms=inputs_ms, backward_weight_ms=weights_ms, activation_bytes=30)
    alike = [replace(each, costs=(cost,)) for each in profile([1.0] * 8, state_bytes=3, input_bytes=1).layers]
    problem = PlanningProblem(
        profile=ModelProfile(layers=(replace(alike[0], input_gradient=False), *alike[1:])),
        num_microbatches=16,
        cluster=Cluster(memory_bytes=66 if again else None),
        max_failures=0,
        min_pipeline_nodes=4,
        schedule=schedule,
    )
    template = plan_templates(problem, 4).best(4, 16)
    assert {stage.checkpointing for stage in template.stages} == {again}
    return problem, template


def halves(problem: PlanningProblem, template: PipelineTemplate) -> list[tuple[float, float]]:
    return [(each.backward_input_ms, each.backward_weight_ms) for each in stage_times(template, problem.profile)]


def test_first_stage_does_all_of_its_backward_in_the_second_half() -> None:
    assert halves(*four_stages()) == [(0, 2 + 6), (4, 6), (4, 6), (4, 6)]


def test_layers_that_run_again_do_all_of_it_in_the_first_half() -> None:
    assert halves(*four_stages(again=True)) == [(0, 2 + 2 + 6), *[(2 + 4 + 6, 0)] * 3]


def test_first_stage_behind_frozen_layers_does_all_of_it_in_the_second_half() -> None:
    problem, template = four_stages()
    frozen = replace(problem, profile=problem.profile.frozen(["l0", "l1"]))
    stages = (replace(template.stages[0], backward_ms=0.0), replace(template.stages[1], backward_ms=8.0))
    found = halves(frozen, replace(template, stages=(*stages, *template.stages[2:])))
    assert found == [(0, 0), (0, 8), (4, 6), (4, 6)]


@pytest.mark.parametrize("schedule", SPLIT_KINDS[:3])
def test_nothing_is_put_off_where_layers_run_again(schedule: ScheduleKind) -> None:
    part = 0.5 if schedule is ScheduleKind.SPLIT else 1.0
    _, template = four_stages(schedule=schedule)
    assert [stage.weights_ms for stage in template.stages] == pytest.approx([6 * part] * 4)
    _, again = four_stages(schedule=schedule, again=True)
    assert [stage.weights_ms for stage in again.stages] == [0] * 4


@pytest.mark.parametrize("again", [False, True])
def test_planned_steps_of_equal_stages_are_the_simulated_ones(again: bool) -> None:
    problem, template = four_stages(1.0, 1.0, again=again)
    # as long in all, the first stage, too
    first = replace(template.stages[0], backward_ms=template.stages[1].backward_ms)
    template = replace(template, stages=(first, *template.stages[1:]))
    times = stage_times(template, problem.profile)
    costs = ActionCosts(
        forward_ms=[each.forward_ms for each in times],
        backward_input_ms=[each.backward_input_ms for each in times],
        backward_weight_ms=[each.backward_weight_ms for each in times],
    )
    schedule = generate(ScheduleKind.ZB_H1, 4, 16)
    assert simulate(schedule, costs).iteration_ms == pytest.approx(template.iteration_ms(16))
