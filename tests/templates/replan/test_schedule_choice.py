"""The schedule that is chosen takes the shortest step in simulation, of those that the job can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.errors import ArgumentError
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem, Sharding
from resilient.templates.replan.replan import first_plan, templates_for
from resilient.templates.replan.schedule_choice import (
    SimulatedSchedule,
    choose_and_prepare,
    choose_schedule,
    simulated_step_ms,
)
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search.template_sizes import TooFewNodes

MIB = 2**20


def job(
    num_layers: int,
    num_microbatches: int,
    depth: int,
    *,
    part_ms: float = 1.0,
    activation_bytes: int = 0,
    memory_bytes: int | None = None,
    latency_ms: float = 0.0,
    max_failures: int = 0,
) -> PlanningProblem:
    """Equal layers, of which a forward and each half of a backward take equally long, in pipelines of one depth."""
    cost = LayerCost(
        forward_ms=part_ms, backward_input_ms=part_ms, backward_weight_ms=part_ms, activation_bytes=activation_bytes
    )
    layers = tuple(LayerProfile(name=f"l{i}", costs=(cost,), input_bytes=1) for i in range(num_layers))
    return PlanningProblem(
        profile=ModelProfile(layers=layers),
        num_microbatches=num_microbatches,
        cluster=Cluster(memory_bytes=memory_bytes, inter_node=Link(latency_ms=latency_ms)),
        max_failures=max_failures,
        min_pipeline_nodes=depth,
        activation_checkpointing=False,
    )


def name_of(simulated: SimulatedSchedule) -> tuple[str, int]:
    return simulated.schedule.value, simulated.num_chunks


def test_every_schedule_is_simulated_and_the_fastest_is_chosen() -> None:
    """Eight workers and 32 microbatches: the numbers of the guide to schedules."""
    choice = choose_schedule(job(16, 32, 8, part_ms=0.5), 8, 2)
    steps = {name_of(each): each.step_ms for each in (choice.chosen, *choice.others)}
    assert steps == {
        ("1f1b", 1): 117,
        ("split-1f1b", 1): 110,
        ("eager-1f1b", 1): 117,
        ("zb-h1", 1): 103,
        ("zb-h2", 1): 103,
        ("zb-v", 2): 99.5,
        ("interleaved-zb", 2): 99.5,
        ("interleaved-1f1b", 2): 106.5,
    }
    assert choice.chosen.schedule is ScheduleKind.ZB_V, "the plainer of two that are as fast"
    assert [each.step_ms for each in choice.others] == sorted(each.step_ms for each in choice.others)


def test_steps_are_those_of_the_plan_that_the_schedule_gets() -> None:
    """With messages, on unequal layers and nodes that make pipelines of different depths."""
    problem = job(9, 12, 2, latency_ms=0.3, max_failures=1)
    layers = tuple(
        replace(layer, costs=(replace(layer.costs[0], forward_ms=1.0 + 0.1 * i),))
        for i, layer in enumerate(problem.profile.layers)
    )
    problem = replace(problem, profile=ModelProfile(layers=layers))
    choice = choose_schedule(problem, 5, 3)
    assert {name_of(each)[1] for each in (choice.chosen, *choice.others)} == {1, 2, 3}
    for each in (choice.chosen, *choice.others):
        plan = first_plan(replace(problem, schedule=each.schedule, num_chunks=each.num_chunks), range(5))
        assert len({len(pipeline.nodes) for pipeline in plan.pipelines}) > 1
        times: list[float] = []
        for index, pipeline in enumerate(plan.pipelines):
            stages = pipeline.template.stages
            inner = [stage.end_layer - stage.first_layer for stage in stages]
            costs = ActionCosts(
                forward_ms=[stage.forward_ms for stage in stages],
                backward_input_ms=[1.0 * number for number in inner],
                backward_weight_ms=[1.0 * number for number in inner],
                transfer_ms=[stage.send_ms / 2 for stage in stages[1:]],
            )
            times.append(simulate(plan.schedule(index), costs).iteration_ms)
        assert each.step_ms == pytest.approx(max(times), rel=1e-9)


def test_schedule_that_is_hardly_faster_is_not_chosen() -> None:
    """Two workers and many microbatches: a hundredth of the time is not to be had."""
    choice = choose_schedule(job(4, 400, 2), 2, 2)
    assert choice.chosen.schedule is ScheduleKind.ONE_F_ONE_B
    assert 0.99 * choice.chosen.step_ms < choice.others[0].step_ms < choice.chosen.step_ms


def test_stages_of_each_device_are_as_many_as_may_be_at_most() -> None:
    problem = job(16, 8, 4)
    assert {each.num_chunks for each in choose_schedule(problem, 4, 4).others} == {1, 2, 3, 4}
    alone = choose_schedule(problem, 4, 1)
    assert {each.num_chunks for each in (alone.chosen, *alone.others)} == {1}
    assert alone.chosen.schedule is ScheduleKind.ZB_H1


def test_memory_of_the_devices_limits_the_choice() -> None:
    """Four rows hold at most 4, 3, 2 and 1 microbatches of their layers: what holds more everywhere has no plan."""
    problem = job(4, 16, 4, activation_bytes=MIB, memory_bytes=4 * MIB + 1024)
    assert choose_schedule(problem, 4, 1).chosen.schedule is ScheduleKind.ZB_H1
    *others, last = problem.profile.layers
    large = replace(last, costs=(replace(last.costs[0], activation_bytes=3 * MIB),))
    tight = replace(problem, profile=ModelProfile(layers=(*others, large)))
    choice = choose_schedule(tight, 4, 1)
    assert choice.chosen.schedule is ScheduleKind.SPLIT
    assert {each.schedule for each in choice.others} == {ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER}


def test_schedule_that_needs_more_nodes_is_not_chosen() -> None:
    """With more nodes zb-h1 would fit, but the job could go on with fewer only under another schedule."""
    problem = job(8, 8, 1, activation_bytes=MIB, memory_bytes=28 * MIB + 1024)
    *others, last = (replace(each, parameter_bytes=5 * MIB) for each in problem.profile.layers)
    large = replace(last, costs=(replace(last.costs[0], activation_bytes=3 * MIB),))
    problem = replace(problem, profile=ModelProfile(layers=(*others, large)))
    smallest = {
        kind: templates_for(replace(problem, schedule=kind), 8).sizes.start
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
    }
    assert smallest == {ScheduleKind.ONE_F_ONE_B: 2, ScheduleKind.ZB_H1: 3}
    choice = choose_schedule(problem, 8, 1)
    assert ScheduleKind.ZB_H1 not in {each.schedule for each in (choice.chosen, *choice.others)}


def test_stages_that_are_sharded_are_one_on_each_device() -> None:
    problem = replace(job(16, 8, 4), cluster=Cluster(devices_per_node=2), sharding=Sharding.AUTO)
    choice = choose_schedule(problem, 4, 4)
    assert {each.num_chunks for each in (choice.chosen, *choice.others)} == {1}


def test_too_few_nodes_are_told() -> None:
    with pytest.raises(TooFewNodes):
        choose_schedule(job(4, 8, 2, max_failures=1), 3, 2)
    problem = job(1, 8, 2)
    with pytest.raises(ArgumentError) as plainest:
        first_plan(problem, range(2))
    with pytest.raises(ArgumentError) as chosen:
        choose_schedule(problem, 2, 2)
    assert str(chosen.value) == str(plainest.value)


def test_plans_are_prepared_with_the_schedule() -> None:
    problem = job(16, 32, 8, part_ms=0.25)
    choice = choose_and_prepare(problem, 8, 2)
    assert choice is not None
    assert (choice.of(problem).schedule, choice.of(problem).num_chunks) == (ScheduleKind.ZB_V, 2)
    assert choose_and_prepare(problem, 8, 0) is None


def test_sum_of_gradients_counts() -> None:
    problem = job(4, 8, 2, max_failures=1)
    plan = first_plan(problem, range(4))
    slower = replace(
        plan,
        pipelines=tuple(replace(each, template=replace(each.template, sync_ms=5.0)) for each in plan.pipelines),
    )
    both = [simulated_step_ms(each, problem.profile) for each in (plan, slower)]
    assert both[1] - both[0] == pytest.approx(5.0)
    costs = ActionCosts(forward_ms=2.0, backward_input_ms=2.0, backward_weight_ms=2.0)
    assert both[0] == simulate(generate(ScheduleKind.ONE_F_ONE_B, 2, 4), costs).iteration_ms
