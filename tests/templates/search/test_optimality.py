from __future__ import annotations

import statistics

import pytest

from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import cluster_of
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan, templates_for
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.stage_times import stage_times
from resilient.templates.template import PipelineTemplate
from tests.templates.search.exhaustive import all_templates
from tests.templates.simulated_steps import KINDS, random_case, ratio_to_best, shortest_ns, simulate_template


def test_plans_are_within_two_percent_of_the_best_simulated_templates() -> None:
    ratios = [ratio_to_best(random_case(kind, seed)) for kind in KINDS for seed in range(10)]
    found = [ratio for ratio in ratios if ratio is not None]
    assert len(found) >= 30
    assert min(found) >= 1
    assert statistics.median(found) <= 1.02


def test_templates_that_are_not_simulated_cannot_be_the_shortest() -> None:
    for seed in range(4):
        case = random_case("uneven layers", seed)
        every = list(all_templates(case.problem, case.num_nodes))
        simulated = [simulate_template(template, case.num_microbatches).iteration_ns for template in every]
        assert shortest_ns(every, case.num_microbatches) == min(simulated)


def zero_bubble_ms(problem: PlanningProblem, template: PipelineTemplate, num_microbatches: int) -> float:
    """The simulated step of a pipeline that has others beside it, under the problem's schedule."""
    times = stage_times(template, problem.profile)
    costs = ActionCosts(
        forward_ms=[each.forward_ms for each in times],
        backward_input_ms=[each.backward_input_ms for each in times],
        backward_weight_ms=[each.backward_weight_ms for each in times],
        transfer_ms=[each.send_ms for each in times[1:]],
    )
    return simulate(generate(problem.schedule, len(times), num_microbatches), costs).iteration_ms + template.sync_ms


@pytest.mark.parametrize("num_microbatches", [24, 32, 96])
def test_zero_bubble_jobs_run_the_grid_that_is_fastest_in_simulation(num_microbatches: int) -> None:
    """Deep pipelines, which idle less than those of 1F1B, instead of shallow ones, which all sum many gradients."""
    problem = PlanningProblem(
        profile=derive_profile("gpt3-2.7b", "a40"),
        num_microbatches=num_microbatches,
        cluster=cluster_of("a40", 1),
        schedule=ScheduleKind.ZB_H1,
    )
    plan = first_plan(problem, range(24))
    found = max(zero_bubble_ms(problem, p.template, p.num_microbatches) for p in plan.pipelines)
    assert found <= max(plan.finish_ms) <= 1.1 * found
    templates = templates_for(problem, 24)
    for size in (2, 3, 4, 6, 8, 12):
        share = -(-num_microbatches // (24 // size))
        assert found <= 1.01 * zero_bubble_ms(problem, templates.best(size, share), share)
