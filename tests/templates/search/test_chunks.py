"""Templates of interleaved 1F1B: rows are even, and memory holds what is in flight."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import lines, slowed_line
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan, replan
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_in_flight
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import enough_nodes, problems, profile, schedule_alone
from tests.templates.simulated_steps import simulate_template


def job(times_ms: list[float], num_nodes: int, **changes: object) -> PlanningProblem:
    """Plan interleaved pipelines of exactly that many nodes, without redundancy."""
    return replace(
        PlanningProblem(
            profile=profile(times_ms),
            num_microbatches=8,
            max_failures=0,
            min_pipeline_nodes=num_nodes,
            schedule=ScheduleKind.INTERLEAVED,
            num_chunks=2,
        ),
        **changes,  # pyright: ignore[reportArgumentType]
    )


def only(problem: PlanningProblem) -> PipelineTemplate:
    ((template,),) = plan_templates(problem, problem.min_pipeline_nodes).layouts
    return template


def ends(problem: PlanningProblem) -> list[int]:
    return [stage.end_layer for stage in only(problem).stages]


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 40))
def test_no_number_of_microbatches_keeps_more_of_a_chunk_in_flight(num_rows: int, num_chunks: int, most: int) -> None:
    counted = np.zeros((num_rows, num_chunks), dtype=np.int64)
    schedule = generate(ScheduleKind.INTERLEAVED, num_rows, most, num_chunks=num_chunks)
    for chunk in range(num_chunks):
        one = np.repeat(np.arange(num_chunks) == chunk, num_rows).astype(int)
        costs = ActionCosts(forward_ms=1, backward_input_ms=1, activation_bytes=one)
        counted[:, chunk] = simulate(schedule, costs).peak_bytes
    for more in (0, 1, 100):
        assert (counted <= chunks_in_flight(num_rows, num_chunks, most + more)).all()


def test_chunks_in_flight_of_up_to_one_round_are_exact() -> None:
    assert chunks_in_flight(4, 2, 4).tolist() == [[4, 4], [4, 4], [4, 3], [4, 1]]
    assert chunks_in_flight(1, 1, 50).tolist() == [[1]]


def test_stages_take_turns_on_the_devices() -> None:
    template = only(job([1.0] * 16, 2, cluster=Cluster(devices_per_node=2)))
    assert [(stage.node_index, stage.first_device) for stage in template.stages] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    assert [[stage.first_layer for stage in row] for row in template.rows] == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert template.num_chunks == 2


def test_a_row_is_evened_out_by_its_other_stage() -> None:
    problem = job([5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    template = only(problem)
    assert template.slowest_ms == pytest.approx(6.0)
    assert [sum(stage.end_layer - stage.first_layer for stage in row) for row in template.rows] == [2, 6]


def test_frozen_layers_run_no_forward_again() -> None:
    """They take 1 ms, the first one after them 3 (its forward twice, its own gradient), the others 4."""
    frozen = profile([3.0] * 8, state_bytes=1, activation_bytes=1000, input_bytes=1).frozen(["l0", "l1", "l2", "l3"])
    template = only(job([3.0] * 8, 2, profile=frozen, cluster=Cluster(memory_bytes=2500)))
    assert [stage.checkpointing for stage in template.stages] == [True] * 4
    assert [stage.end_layer for stage in template.stages] == [2, 4, 6, 8]
    assert template.slowest_ms == pytest.approx(2 * 1 + 2 * 4)


def test_the_pipeline_fills_faster_with_more_stages() -> None:
    """Rows of 4 ms: half of each but one is waited for, and the microbatches go through the slowest."""
    for num_rows in (2, 4):
        template = only(job([1.0] * 4 * num_rows, num_rows))
        assert template.iteration_ms(8) == pytest.approx(8 * 4 + (num_rows - 1) * 4 / 2)
        assert template.iteration_ms(8) == pytest.approx(simulate_template(template, 8).iteration_ms)
        assert slowed_line(template, [1.0] * num_rows) == lines([template])[0]
        assert slowed_line(template, [2.0] * num_rows) == lines([only(job([2.0] * 4 * num_rows, num_rows))])[0]


def test_messages_are_those_of_the_rows_before() -> None:
    cluster = Cluster(devices_per_node=2, intra_node=Link(latency_ms=1.0), inter_node=Link(latency_ms=5.0))
    one, two = (only(job([1.0] * 8, size, cluster=cluster)) for size in (1, 2))
    assert [stage.send_ms for stage in one.stages] == [0.0, 2.0, 2.0, 2.0]
    assert [stage.send_ms for stage in two.stages] == [0.0, 2.0, 10.0, 2.0, 10.0, 2.0, 10.0, 2.0]


def test_a_pipeline_of_one_device_has_one_stage() -> None:
    problem = job([1.0] * 8, 1)
    templates = plan_templates(problem, 5)
    assert [(len(of[0].rows), len(of[0].stages)) for of in templates.layouts] == [(1, 1), (2, 4), (3, 6), (4, 8)]
    alone = templates.best(1, 8)
    assert schedule_alone(ScheduleKind.INTERLEAVED, alone, 8) == generate(ScheduleKind.ONE_F_ONE_B, 1, 8)


def test_cuts_are_close_to_the_best_of_all() -> None:
    draw = random.Random(0)
    ratios: list[float] = []
    for _ in range(60):
        num_rows, times = draw.choice([2, 3]), [draw.choice([1.0, 2.0, 3.0]) for _ in range(draw.randint(6, 10))]
        number = 2 * num_rows
        every = ([0, *inner, len(times)] for inner in combinations(range(1, len(times)), number - 1))
        sums = ([sum(times[first:end]) for first, end in pairwise(bounds)] for bounds in every)
        best = min(max(stages[row] + stages[row + num_rows] for row in range(num_rows)) for stages in sums)
        ratios.append(only(job(times, num_rows)).slowest_ms / best)
    assert min(ratios) >= 1 - 1e-6
    assert max(ratios) < 1.2
    assert sum(ratio < 1 + 1e-6 for ratio in ratios) >= 50


@settings(max_examples=40)
@given(problems(max_degree=1), st.integers(2, 3), st.sampled_from([0.6, 0.8, 1.0]))
def test_stages_cover_layers_and_fit(drawn: PlanningProblem, num_chunks: int, share: float) -> None:
    roomy = replace(
        drawn,
        schedule=ScheduleKind.INTERLEAVED,
        num_chunks=num_chunks,
        min_pipeline_nodes=1,
        cluster=replace(drawn.cluster, memory_bytes=None),
    )
    try:
        smallest = plan_templates(roomy, enough_nodes(roomy)).layouts[0][0]
    except ValueError:
        assert len(drawn.profile.layers) < num_chunks * drawn.cluster.devices_per_node
        return
    try:
        scarce = int(share * max(sum(stage.memory_bytes for stage in row) for row in smallest.rows))
        problem = replace(roomy, cluster=replace(drawn.cluster, memory_bytes=scarce))
        templates = plan_templates(problem, enough_nodes(problem))
    except ValueError:
        assert share < 1, "the smallest template fits"
        return
    for (template,) in templates.layouts:
        bounds = [0, *(stage.end_layer for stage in template.stages)]
        assert [stage.first_layer for stage in template.stages] == bounds[:-1]
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == len(problem.profile.layers)
        devices = [(stage.node_index, stage.first_device) for (stage, *_) in template.rows]
        assert devices == [(n, d) for n in range(template.num_nodes) for d in range(problem.cluster.devices_per_node)]
        assert [stage for chunk in zip(*template.rows, strict=True) for stage in chunk] == list(template.stages)
        for count in {1, problem.most_microbatches // 2 + 1, problem.most_microbatches}:
            assert max(taken(problem, template, min(count, problem.most_microbatches))) <= scarce


def taken(problem: PlanningProblem, template: PipelineTemplate, num_microbatches: int) -> list[int]:
    """Per row, the most bytes that its device holds in simulation."""
    held: list[int] = []
    each: list[int] = []
    for stage in template.stages:
        layers = problem.profile.layers[stage.first_layer : stage.end_layer]
        activations = [layer.costs[0].activation_bytes for layer in layers]
        each.append(sum(layer.input_bytes for layer in layers) if stage.checkpointing else sum(activations))
    plan = Plan(pipelines=(Pipeline(template=template, nodes=tuple(range(template.num_nodes)), num_microbatches=1),))
    for slot in plan.slots:
        names = slot.intervals(problem.profile)
        states = sum(x.state_bytes + x.gradient_bytes for x in problem.profile.layers if x.name in names)
        largest = max(
            problem.profile.layers[index].costs[0].activation_bytes
            for stage in slot.stages
            for index in range(stage.first_layer, stage.end_layer)
        )
        held.append(states + slot.stages[0].checkpointing * largest)
    schedule = schedule_alone(ScheduleKind.INTERLEAVED, template, num_microbatches)
    peaks = simulate(schedule, ActionCosts(forward_ms=1, backward_input_ms=1, activation_bytes=each)).peak_bytes
    return [own + int(peak) for own, peak in zip(held, peaks, strict=True)]


def test_lost_nodes_leave_pipelines_of_whole_rows() -> None:
    problem = job([1.0] * 12, 2, max_failures=1)
    plan = first_plan(problem, range(5))
    assert sorted(len(pipeline.nodes) for pipeline in plan.pipelines) == [2, 3]
    after = replan(problem, plan, [0, 2, 3, 4])
    assert [len(pipeline.template.stages) for pipeline in after.pipelines] == [4, 4]
    held = {slot.node: set(slot.intervals(problem.profile)) for slot in plan.slots}
    kept = [len(held[slot.node] & set(slot.intervals(problem.profile))) for slot in after.slots]
    assert sum(kept) >= 12, "nodes take the places of which they hold most"


def refusal(problem: PlanningProblem) -> str:
    with pytest.raises(ValueError, match="must") as caught:
        plan_templates(problem, 8)
    return str(caught.value)


def test_too_few_layers_are_refused() -> None:
    assert refusal(job([1.0] * 7, 2, cluster=Cluster(devices_per_node=2))) == (
        "layers must suffice for num_chunks = 2 stages on each of the 2 devices of min_pipeline_nodes = 2 nodes, got "
        "7; lower num_chunks or min_pipeline_nodes, or use schedule 1f1b"
    )


def test_too_little_memory_is_refused() -> None:
    assert refusal(job([1.0] * 8, 2, cluster=Cluster(memory_bytes=10))) == (
        "memory_bytes must hold the stages of a pipeline of 2 to 4 nodes with what they have in flight, got 10; use "
        "smaller microbatches, schedule 1f1b or devices with more memory"
    )
