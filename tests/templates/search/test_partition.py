from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.search.partition import plan_templates
from resilient.templates.search.template_sizes import TooFewNodes
from resilient.templates.template import PipelineTemplate, TemplateSet
from tests.templates.jobs import cost, enough_nodes, layer, problems, profile
from tests.templates.search.exhaustive import all_templates
from tests.templates.search.random_problems import small_problems


def job(
    times_ms: list[float], num_nodes: int, devices_per_node: int = 1, tp_degrees: tuple[int, ...] = (1,)
) -> PlanningProblem:
    """Plan pipelines of exactly that many nodes, without redundancy."""
    return PlanningProblem(
        profile=profile(times_ms, tp_degrees=tp_degrees),
        num_microbatches=8,
        cluster=Cluster(devices_per_node=devices_per_node),
        max_failures=0,
        min_pipeline_nodes=num_nodes,
    )


def only(problem: PlanningProblem) -> PipelineTemplate:
    ((template,),) = plan_templates(problem, problem.min_pipeline_nodes).layouts
    return template


def ends(problem: PlanningProblem) -> list[int]:
    return [stage.end_layer for stage in only(problem).stages]


def check_against_all(problem: PlanningProblem, num_nodes: int) -> TemplateSet | None:
    """Compare with every template of every size; None where there is none to plan."""
    f = problem.max_failures
    fitting = (n for n in range(problem.min_pipeline_nodes, num_nodes + 1) if any(all_templates(problem, n)))
    smallest = next(fitting, num_nodes + 1)
    if num_nodes < (f + 1) * smallest:
        with pytest.raises(ValueError, match=r"got|must"):
            plan_templates(problem, num_nodes)
        return None
    templates = plan_templates(problem, num_nodes)
    assert templates.sizes.start == smallest
    for size in range(smallest, num_nodes - f * smallest + 1):
        every = list(all_templates(problem, size))
        if not every:
            assert templates.sizes.stop == size
            return templates
        # What zero-bubble schedules put off, the search does not count.
        planned = templates.of(size)
        layouts = tuple(replace(t, stages=tuple(replace(s, weights_ms=0.0) for s in t.stages)) for t in planned)
        found = replace(templates, layouts=(*templates.layouts[: size - smallest], layouts))
        assert set(layouts) <= set(every)
        order = [(t.round_size, -t.slowest_ms, t.fill_ms) for t in planned]
        assert order == sorted(set(order))
        needed: set[PipelineTemplate] = set()
        most = problem.num_microbatches
        shares = range(max(1, most * size // (2 * num_nodes)), most + 1)
        # A pipeline that leaves room for another may have one; where no failure is to be survived, it may be alone.
        cases = [(count, False) for count in shares if size + smallest <= num_nodes] + [(most, True)] * (f == 0)
        for alone in {alone for _, alone in cases}:
            times = {(*t.line_ms(alone=alone), t.round_size) for t in every}
            lines_of = [(nanoseconds(fill), nanoseconds(slowest), rounds) for fill, slowest, rounds in times]
            for count in [count for count, case in cases if case is alone]:
                best = found.best(size, count, alone=alone)
                step_ns = min(fill + -(-count // rounds) * slowest for fill, slowest, rounds in lines_of)
                assert nanoseconds(best.iteration_ms(count, alone=alone)) == step_ns
                needed.add(best)
        assert needed <= set(layouts)
        if f > 0:
            assert needed == set(layouts)
    assert templates.sizes.stop == num_nodes - f * smallest + 1
    return templates


@settings(max_examples=100)
@given(small_problems())
def test_layouts_are_the_shortest_of_all_templates_for_each_number_of_microbatches(
    case: tuple[PlanningProblem, int],
) -> None:
    check_against_all(*case)


def tight_problem(seed: int) -> PlanningProblem:
    """Degrees that save little time, so that stages are many, and what they have in flight does not always fit.

    In some, the first layers are frozen but keep activations: they run no backward, and are checkpointed for nothing.
    """
    draw = random.Random(seed)
    factors = {degree: draw.uniform(0.6 * degree**0.5, 1.1 * degree) for degree in (1, 2, 4)}
    layers: list[LayerProfile] = []
    for i in range(draw.randint(6, 8)):
        ms, activations = draw.uniform(0.5, 2.0), draw.choice([10, 20, 30])
        deferred = draw.choice([0, 5, 10])
        costs = [cost(ms * factor / degree, activations, deferred) for degree, factor in factors.items()]
        made = layer(i, costs, 12, input_bytes=draw.choice([1, 2, 5]))
        if seed % 4 == 0:
            made = replace(made, trainable=i > 3, input_gradient=i > 4)
        layers.append(made)
    return PlanningProblem(
        profile=ModelProfile(layers=tuple(layers), tp_degrees=(1, 2, 4)),
        num_microbatches=draw.choice([8, 32]),
        cluster=Cluster(
            devices_per_node=4, memory_bytes=draw.randint(50, 150), intra_node=Link(latency_ms=0.01 * (seed % 2))
        ),
        max_failures=0,
        activation_checkpointing=seed % 3 > 0,
    )


def test_memory_in_flight_depends_on_the_stages_that_follow() -> None:
    planned = [check_against_all(tight_problem(seed), 2) for seed in range(40)]
    stages = [s for templates in planned if templates for of in templates.layouts for t in of for s in t.stages]
    assert sum(templates is not None for templates in planned) > 20
    assert {stage.checkpointing for stage in stages} == {True, False}
    assert {stage.num_devices for stage in stages} == {1, 2, 4}


def partly_frozen(problem: PlanningProblem, seed: int) -> PlanningProblem:
    """Some layers are frozen: stages of these hold more the more stages follow, others may hold less."""
    draw = random.Random(seed)
    names = [each.name for each in problem.profile.layers if draw.random() < 0.4]
    return replace(problem, profile=problem.profile.frozen(names))


@pytest.mark.parametrize("kind", [ScheduleKind.SPLIT, ScheduleKind.ZB_H1, ScheduleKind.ZB_H2])
@pytest.mark.parametrize("number", [4, 32])
def test_memory_in_flight_depends_on_what_is_trained(kind: ScheduleKind, number: int) -> None:
    problems = [replace(partly_frozen(tight_problem(seed), seed), schedule=kind) for seed in range(20)]
    planned = [check_against_all(replace(problem, num_microbatches=number), 2) for problem in problems]
    assert sum(templates is not None for templates in planned) > 5


@pytest.mark.parametrize("kind", [ScheduleKind.ZB_H1, ScheduleKind.ZB_H2])
def test_memory_in_flight_depends_on_the_number_of_stages(kind: ScheduleKind) -> None:
    problems = [replace(tight_problem(seed), schedule=kind) for seed in range(40)]
    planned = [check_against_all(problem, 2) for problem in problems]
    depths = {len(template.stages) for of in filter(None, planned) for layout in of.layouts for template in layout}
    assert sum(templates is not None for templates in planned) > 10
    assert len(depths) > 3


def test_four_nodes_of_four_devices_equal_exhaustive_search() -> None:
    problem = tight_problem(7)
    assert check_against_all(problem, 4) is not None


@settings(max_examples=40)
@given(problems())
def test_stages_cover_layers_and_devices_in_order_and_fit(problem: PlanningProblem) -> None:
    cluster = problem.cluster
    templates = plan_templates(problem, enough_nodes(problem))
    for size, layouts in zip(templates.sizes, templates.layouts, strict=True):
        for template in layouts:
            assert template.num_nodes == size
            bounds = [0, *(stage.end_layer for stage in template.stages)]
            assert [stage.first_layer for stage in template.stages] == bounds[:-1]
            assert bounds[-1] == len(problem.profile.layers)
            assert bounds == sorted(set(bounds))
            used = [(s.node_index, s.first_device + k) for s in template.stages for k in range(s.num_devices)]
            assert used == [(node, device) for node in range(size) for device in range(cluster.devices_per_node)]
            for stage in template.stages:
                assert stage.tp_degree in problem.profile.tp_degrees
                assert stage.shard in (1, template.round_size)
                assert cluster.memory_bytes is None or stage.memory_bytes <= cluster.memory_bytes
                assert problem.activation_checkpointing or not stage.checkpointing


def test_equal_layers_are_cut_evenly_however_their_times_round() -> None:
    assert ends(job([0.1] * 9, 3)) == [3, 6, 9]


def test_layers_without_measured_times_are_cut_evenly() -> None:
    template = only(job([0.0] * 8, 4))
    assert [stage.end_layer for stage in template.stages] == [2, 4, 6, 8]
    assert template.slowest_ms == 2e-6


def test_of_equal_steps_the_first_stages_have_more_work() -> None:
    assert ends(job([1.0] * 7, 3)) == [3, 6, 7]


def test_of_equal_first_stages_the_one_with_more_layers_is_taken() -> None:
    assert ends(job([1.0, 0.0, 1.0], 2)) == [2, 3]


def test_of_equal_steps_the_one_with_fewer_stages_is_taken() -> None:
    """One stage on two devices that takes 2 ms, or two of 1 ms: with one microbatch the same."""
    layers = tuple(layer(i, [cost(1.0), cost(1.0)], 0) for i in range(2))
    problem = PlanningProblem(
        profile=ModelProfile(layers=layers, tp_degrees=(1, 2)),
        num_microbatches=1,
        cluster=Cluster(devices_per_node=2),
        max_failures=0,
    )
    assert [stage.num_devices for stage in only(problem).stages] == [2]


def trade_off() -> PlanningProblem:
    """Two layers take 3 ms on both devices of a node together, and 2 ms each on one of them."""
    layers = tuple(layer(i, [cost(2.0), cost(1.5)], 0) for i in range(2))
    return PlanningProblem(
        profile=ModelProfile(layers=layers, tp_degrees=(1, 2)),
        num_microbatches=16,
        cluster=Cluster(devices_per_node=2),
        max_failures=0,
    )


def test_layouts_trade_the_slowest_stage_against_the_sum() -> None:
    templates = plan_templates(trade_off(), 8)
    assert [[stage.num_devices for stage in t.stages] for t in templates.of(1)] == [[2], [1, 1]]
    assert [templates.best(1, count).slowest_ms for count in (1, 2, 3, 16)] == [3.0, 3.0, 2.0, 2.0]


def test_layouts_are_for_the_share_of_microbatches_to_expect() -> None:
    assert [[stage.num_devices for stage in t.stages] for t in plan_templates(trade_off(), 1).of(1)] == [[1, 1]]


def test_first_stage_pays_for_gradients_where_there_is_another_pipeline() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 4, state_bytes=3000),
        num_microbatches=4,
        cluster=Cluster(inter_node=Link(bytes_per_s=1e6)),
        max_failures=0,
    )
    templates = plan_templates(problem, 3)
    assert [templates.best(size, 4).sync_ms for size in templates.sizes] == [8.0, 4.0, 4.0]
    assert [templates.best(size, 4, alone=True).iteration_ms(4, alone=True) for size in (1, 2, 3)] == [16.0, 10.0, 10.0]
    assert templates.best(2, 1).sync_ms == 2.0, "one layer less to wait for outweighs a slower stage"


def test_tied_state_counts_once_in_a_stage_and_again_away_from_its_owner() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 3, state_bytes=300, shares={2: (0,)}),
        num_microbatches=8,
        cluster=Cluster(memory_bytes=1300),
        max_failures=0,
    )
    templates = plan_templates(problem, 3)
    held = [[stage.memory_bytes for stage in templates.best(size, 8).stages] for size in templates.sizes]
    sums = 100  # of its gradients, where both that use it are in a stage
    assert held == [[1200 + sums], [800, 800], [400, 400, 800]]


def test_layers_of_seconds_do_not_overflow() -> None:
    problem = job([10_000.0] * 200, 8, devices_per_node=8)
    template = only(problem)
    assert template.slowest_ms == 40_000.0
    assert template.iteration_ms(8) == pytest.approx(2_000_000.0 + 7 * 40_000.0)


def test_every_process_finds_the_same_templates() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from tests.templates.search.test_partition import tight_problem, plan_templates\n"
        "print(plan_templates(tight_problem(7), 4).digest)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == plan_templates(tight_problem(7), 4).digest


def test_too_few_nodes_for_the_memory_are_refused() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 8, state_bytes=300),
        num_microbatches=4,
        cluster=Cluster(memory_bytes=1000),
        activation_checkpointing=False,
    )
    with pytest.raises(TooFewNodes) as caught:
        plan_templates(problem, 7)
    assert str(caught.value) == str(TooFewNodes(7, max_failures=1, min_pipeline_nodes=4))
    assert plan_templates(problem, 8).sizes == range(4, 5)


def refusal(problem: PlanningProblem) -> str:
    with pytest.raises(ValueError, match="must") as caught:
        plan_templates(problem, 64)
    return str(caught.value)


def test_layer_that_fits_nowhere_is_named() -> None:
    model = profile([1.0] * 4, state_bytes=300, tp_degrees=(1, 2), activation_bytes=60, input_bytes=10)
    model = ModelProfile(layers=(*model.layers, layer(4, [cost(1.0)] * 2, 3000)), tp_degrees=(1, 2))
    problem = PlanningProblem(profile=model, num_microbatches=4, cluster=Cluster(devices_per_node=4, memory_bytes=1000))
    assert refusal(problem) == (
        "memory_bytes must hold layer 'l4' alone in a stage, 2000 bytes on each device, got 1000; use smaller "
        "microbatches, higher tensor-parallel degrees than 2 or devices with more memory"
    )


def test_stages_that_fit_nowhere_are_refused_with_the_memory_that_would_do() -> None:
    model = profile([1.0] * 8, state_bytes=300, activation_bytes=60)
    problem = PlanningProblem(
        profile=model, num_microbatches=4, cluster=Cluster(memory_bytes=700), activation_checkpointing=False
    )
    assert refusal(problem) == (
        "memory_bytes must hold the stages of a pipeline of 1 to 8 nodes with what they have in flight, got 700; use "
        "smaller microbatches, activation checkpointing or devices with more memory: 885 bytes would do for 8 "
        "nodes"
    )
    enough = replace(problem, cluster=Cluster(memory_bytes=885), max_failures=0)
    assert plan_templates(enough, 64).sizes == range(8, 9)


def test_more_nodes_than_layers_are_refused() -> None:
    assert refusal(job([1.0] * 5, 3, devices_per_node=2)) == (
        "min_pipeline_nodes must be at most 2 (5 layers, at least 2 stages in a node), got 3; lower it"
    )


def test_devices_that_no_degrees_add_up_to_are_refused() -> None:
    assert refusal(job([1.0] * 5, 1, devices_per_node=5, tp_degrees=(2, 4))) == (
        "devices_per_node must be filled by stages of 5 layers at tensor-parallel degrees 2, 4, got 5; lower it, or "
        "profile other degrees"
    )


def test_times_beyond_what_sums_can_hold_are_refused() -> None:
    plan_templates(job([3e7, 3e7], 1), 2)
    assert refusal(job([1e9, 1e300], 1)) == (
        "costs and messages of all layers must be at most 100000000 ms in all, got 1.33333e+300; times are in "
        "milliseconds: profile the layers again"
    )


@pytest.mark.parametrize("time_ms", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_times_are_refused(time_ms: float) -> None:
    with pytest.raises(ValueError, match=r"^costs of a layer must be >= 0 and finite, got .*; profile"):
        LayerCost(forward_ms=1.0, backward_weight_ms=time_ms)
