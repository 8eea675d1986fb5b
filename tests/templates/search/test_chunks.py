"""Templates of interleaved schedules and ZB-V: rows are even, and memory holds what is in flight."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import lines, slowed_line
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan, replan
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind, chunks_of, rows_of_stages
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search import chunks
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import enough_nodes, problems, profile, schedule_alone
from tests.templates.search.every_cut import every_cut, uneven_job
from tests.templates.search.stage_bytes import StageBytes
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


def test_stages_take_turns_on_the_devices() -> None:
    template = only(job([1.0] * 16, 2, cluster=Cluster(devices_per_node=2)))
    assert [(stage.node_index, stage.first_device) for stage in template.stages] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    assert [[stage.first_layer for stage in row] for row in template.rows] == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert template.num_chunks == 2
    back = only(job([1.0] * 16, 2, cluster=Cluster(devices_per_node=2), schedule=ScheduleKind.ZB_V))
    assert [[stage.first_layer for stage in row] for row in back.rows] == [[0, 14], [2, 12], [4, 10], [6, 8]]


def test_a_row_is_evened_out_by_its_other_stage() -> None:
    problem = job([5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    template = only(problem)
    assert template.slowest_ms == pytest.approx(6.0)
    assert [sum(stage.end_layer - stage.first_layer for stage in row) for row in template.rows] == [2, 6]


def test_frozen_layers_run_no_forward_again() -> None:
    """They take 1 ms, the first one after them 3 (its forward twice, its own gradient), the others 4."""
    frozen = profile([3.0] * 8, state_bytes=1, activation_bytes=1000, input_bytes=1).frozen(["l0", "l1", "l2", "l3"])
    template = only(job([3.0] * 8, 2, profile=frozen, cluster=Cluster(memory_bytes=1500)))
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
    back = only(job([1.0] * 8, 2, cluster=cluster, schedule=ScheduleKind.ZB_V))
    assert [stage.send_ms for stage in back.stages] == [0.0, 2.0, 10.0, 2.0, 0.0, 2.0, 10.0, 2.0]


def test_a_pipeline_of_one_device_has_one_stage() -> None:
    problem = job([1.0] * 8, 1)
    templates = plan_templates(problem, 5)
    assert [(len(of[0].rows), len(of[0].stages)) for of in templates.layouts] == [(1, 1), (2, 4), (3, 6), (4, 8)]
    alone = templates.best(1, 8)
    assert schedule_alone(ScheduleKind.INTERLEAVED, alone, 8) == generate(ScheduleKind.ONE_F_ONE_B, 1, 8)


@pytest.mark.parametrize("few", [0, 20_000], ids=["by search", "one by one"])
@pytest.mark.parametrize("kind", CHUNK_KINDS)
def test_templates_are_the_best_of_all_cuts(kind: ScheduleKind, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uneven layers, with messages of different sizes and memory that makes some rows checkpoint."""
    monkeypatch.setattr(chunks, "_FEW", few)
    draw = random.Random(0)
    ratios: list[float] = []
    for number in range(22):
        problem = uneven_job(draw, kind, partly_frozen=number % 3 == 2)
        size = problem.min_pipeline_nodes
        for alone in (True, False):
            every = list(every_cut(problem, alone=alone))
            if not every:
                if alone:
                    with pytest.raises(ValueError, match="must"):
                        plan_templates(problem, size)
                continue
            templates = plan_templates(problem, size if alone else 2 * size)
            for count in (
                {problem.num_microbatches} if alone else {-(-problem.num_microbatches // 2), problem.num_microbatches}
            ):
                best = min(template.iteration_ms(count, alone=alone) for template in every)
                ratios.append(templates.best(size, count, alone=alone).iteration_ms(count, alone=alone) / best)
    assert len(ratios) >= 40
    assert min(ratios) >= 1 - 1e-6
    if few:
        assert max(ratios) <= 1 + 1e-6
    else:
        assert max(ratios) <= 1.02


@pytest.mark.parametrize(
    ("kind", "seed"), [(ScheduleKind.INTERLEAVED, 99), (ScheduleKind.INTERLEAVED_ZB, 16), (ScheduleKind.ZB_V, 248)]
)
def test_bounds_are_moved_for_lone_pipelines_and_for_others(
    kind: ScheduleKind, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From cuts enough: the best ones are those of few microbatches, of many, with sums of gradients or without."""
    monkeypatch.setattr(chunks, "_FEW", 0)
    problem = uneven_job(random.Random(seed), kind, most_layers=12)
    size, count = problem.min_pipeline_nodes, problem.num_microbatches
    for alone in (True, False):
        best = min(each.iteration_ms(count, alone=alone) for each in every_cut(problem, alone=alone))
        templates = plan_templates(problem, size if alone else 2 * size)
        assert templates.best(size, count, alone=alone).iteration_ms(count, alone=alone) == pytest.approx(best)


def test_zb_v_is_planned_with_the_least_memory_that_any_cut_fits_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last row hands on to itself is there once: cuts are found that fit for that reason alone."""
    monkeypatch.setattr(chunks, "_FEW", 0)
    monkeypatch.setattr(chunks, "_MOST_MOVED", 0)  # as of long pipelines, whose bounds are not moved
    for seed, checkpoints in [(28, True), (33, False), (37, False)]:
        drawn = uneven_job(random.Random(seed), ScheduleKind.ZB_V)
        layers = tuple(replace(each, input_bytes=5 * each.input_bytes) for each in drawn.profile.layers)
        roomy = replace(drawn, profile=replace(drawn.profile, layers=layers), activation_checkpointing=checkpoints)

        def limited(num_bytes: int, roomy: PlanningProblem = roomy) -> PlanningProblem:
            return replace(roomy, cluster=replace(roomy.cluster, memory_bytes=num_bytes))

        least = bisect_left(range(10_000), True, key=lambda num_bytes: any(every_cut(limited(num_bytes), alone=True)))
        only(limited(least))
        with pytest.raises(ValueError, match="must"):
            only(limited(least - 1))


@pytest.mark.parametrize(
    ("num_nodes", "num_layers", "first", "last"), [(7, 64, 2.0, 0.3), (6, 40, 3.0, 1.0), (8, 39, 2.0, 1.0)]
)
def test_of_cuts_of_equal_layers_that_are_as_even_one_is_taken(
    num_nodes: int, num_layers: int, first: float, last: float
) -> None:
    """Other layers come first and last: of these cuts, each was followed by another one without end."""
    times = [28.4101 * each for each in (first, *[1.0] * num_layers, last)]
    assert only(job(times, num_nodes)).slowest_ms <= sum(times) / num_nodes + times[1]


def test_four_hundred_uneven_layers_are_cut_evenly() -> None:
    """For each of sixty numbers of nodes; the slowest row is close to an even share of the work."""
    draw = random.Random(0)
    times = [draw.uniform(0.5, 2.0) for _ in range(400)]
    for (template,) in plan_templates(job(times, 1), 60).layouts:
        assert template.slowest_ms <= 1.02 * sum(times) / template.num_nodes


def test_four_hundred_layers_have_templates_from_the_first_number_of_nodes_that_holds_them() -> None:
    """With gradient sums; those of one to fourteen nodes do not fit."""
    draw = random.Random(0)
    layers = profile([draw.uniform(0.5, 2.0) for _ in range(400)], 100, activation_bytes=9, input_bytes=1)
    cluster = Cluster(memory_bytes=4000, inter_node=Link(latency_ms=0.1, bytes_per_s=1e4))
    templates = plan_templates(job([1.0], 1, profile=layers, cluster=cluster), 16)
    assert templates.sizes == range(15, 17)


@settings(max_examples=15)
@given(problems(max_degree=1), st.sampled_from(CHUNK_KINDS), st.integers(2, 3), st.sampled_from([0.6, 0.8, 1.0]))
def test_stages_cover_layers_and_fit(drawn: PlanningProblem, kind: ScheduleKind, num_chunks: int, share: float) -> None:
    num_chunks = chunks_of(kind, num_chunks)
    roomy = replace(
        drawn,
        schedule=kind,
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
    for template in (template for layouts in templates.layouts for template in layouts):
        bounds = [0, *(stage.end_layer for stage in template.stages)]
        assert [stage.first_layer for stage in template.stages] == bounds[:-1]
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == len(problem.profile.layers)
        devices = [(stage.node_index, stage.first_device) for (stage, *_) in template.rows]
        assert devices == [(n, d) for n in range(template.num_nodes) for d in range(problem.cluster.devices_per_node)]
        assert template.row_of == rows_of_stages(kind, len(template.rows), template.num_chunks)
        for count in {1, problem.most_microbatches // 2 + 1, problem.most_microbatches}:
            assert max(taken(problem, template, min(count, problem.most_microbatches))) <= scarce


def taken(problem: PlanningProblem, template: PipelineTemplate, num_microbatches: int) -> list[int]:
    """Per row, the most bytes that its device holds in simulation."""
    held: list[int] = []
    each: list[int] = []
    turns = [*(before == after for before, after in pairwise(template.row_of)), False]
    for stage, passes in zip(template.stages, turns, strict=True):
        of_stage = StageBytes(problem.profile, stage.first_layer, stage.end_layer)
        kept = of_stage.each_again if stage.checkpointing else of_stage.each
        each.append(kept - passes * of_stage.handed_on)  # what the next one keeps
    for row in template.rows:
        of_row = [
            (StageBytes(problem.profile, stage.first_layer, stage.end_layer), stage.checkpointing) for stage in row
        ]
        # a tied state counts for each stage of a row that uses it
        once = max(each.largest if again else each.workspace for each, again in of_row)
        within = sum(
            later.arriving * (before.end_layer == after.first_layer)
            for (before, after), (later, _) in zip(pairwise(row), of_row[1:], strict=True)
        )
        held.append(once + sum(each.held for each, _ in of_row) - within)
    schedule = schedule_alone(problem.schedule, template, num_microbatches)
    costs = ActionCosts(forward_ms=1, backward_input_ms=1, backward_weight_ms=1, activation_bytes=each)
    peaks = simulate(schedule, costs).peak_bytes
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
