"""Templates with sharded stages: the best there are, within memory, on one node, and copies as redundancy asks for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, PlanningProblem, Sharding
from resilient.templates.replan.replan import first_plan, replan
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import cost, enough_nodes, layer, problems, profile
from tests.templates.search.random_problems import small_problems
from tests.templates.search.stage_bytes import StageBytes
from tests.templates.search.test_partition import check_against_all, tight_problem


def eight_layers(**more: object) -> PlanningProblem:
    """Two nodes of four devices, layers of 4 ms; tensor parallelism is not profiled."""
    problem = PlanningProblem(
        profile=profile([4.0] * 8, state_bytes=3000, activation_bytes=100, input_bytes=1000),
        num_microbatches=32,
        cluster=Cluster(devices_per_node=4),
        sharding=Sharding.AUTO,
    )
    return replace(problem, **more)  # pyright: ignore[reportArgumentType]


def only(problem: PlanningProblem, size: int) -> PipelineTemplate:
    """The template of a size at the whole batch."""
    return plan_templates(problem, size + problem.max_failures).best(size, problem.num_microbatches)


@settings(max_examples=100)
@given(small_problems())
def test_layouts_are_the_shortest_of_all_templates_with_sharded_stages(case: tuple[PlanningProblem, int]) -> None:
    problem, num_nodes = case
    assume(problem.profile.tp_degrees[0] == 1)
    check_against_all(replace(problem, sharding=Sharding.AUTO), num_nodes)


@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H2])
def test_all_stages_are_sharded_alike_or_none_is(kind: ScheduleKind) -> None:
    """Where groups would gather for longer than they compute, stages are tensor parallel instead."""
    stages: set[tuple[int, int]] = set()
    for seed in range(30):
        problem = tight_problem(seed)
        cluster = replace(problem.cluster, intra_node=Link(latency_ms=(0.0, 0.05, 0.4)[seed % 3], bytes_per_s=1e5))
        templates = check_against_all(replace(problem, cluster=cluster, sharding=Sharding.AUTO, schedule=kind), 2)
        for template in (template for of in (templates.layouts if templates else ()) for template in of):
            stages.update((stage.shard, stage.tp_degree) for stage in template.stages)
            assert len({stage.shard for stage in template.stages}) == 1
    assert {(1, 1), (1, 2), (2, 1), (4, 1)} <= stages


def test_stages_are_sharded_whatever_it_takes_where_they_must_be() -> None:
    slow = Cluster(devices_per_node=4, intra_node=Link(latency_ms=2.0))
    shards = {
        each: {stage.shard for stage in only(eight_layers(cluster=slow, sharding=each), 1).stages} for each in Sharding
    }
    assert shards == {Sharding.OFF: {1}, Sharding.AUTO: {1}, Sharding.ON: {2}}


@settings(max_examples=30)
@given(problems(max_degree=1), st.booleans())
def test_with_one_device_a_node_nothing_changes(problem: PlanningProblem, scarce: bool) -> None:
    nodes = enough_nodes(problem)
    one = replace(problem, cluster=replace(problem.cluster, devices_per_node=1))
    layouts = [msgspec.json.encode(plan_templates(replace(one, sharding=each), nodes).layouts) for each in Sharding]
    assert layouts[0] == layouts[1] == layouts[2]


def test_a_node_that_holds_the_model_is_one_stage_whose_devices_take_a_microbatch_each() -> None:
    (stage,) = only(eight_layers(), 1).stages
    narrow = eight_layers(profile=profile([4.0] * 8, state_bytes=3000, activation_bytes=100, input_bytes=10))
    assert (stage.num_devices, stage.shard, stage.tp_degree) == (4, 4, 1)
    assert stage.stage_ms == pytest.approx(32.0), "of four microbatches"
    # most is there while the seventh layer of 1000 parameters is differentiated, the sixth comes in, and the eighth's
    # gradients are summed of three addends, twice in memory when the last one is added
    of_one = 1000
    gathered = 2 * of_one + 2 * of_one + 3 * of_one // 4 + 2 * of_one // 4
    assert only(narrow, 1).stages[0].memory_bytes == 8 * 4000 // 4 + 7 * 100 + gathered
    assert only(eight_layers(), 1).iteration_ms(32) == pytest.approx(8 * 32.0)


def test_what_is_left_of_a_round_is_charged() -> None:
    template = only(eight_layers(), 1)
    assert [template.iteration_ms(count) / 32 for count in (1, 4, 5, 8, 9)] == pytest.approx([1, 1, 2, 2, 3])


def test_gathers_hide_behind_computation_and_take_over_where_they_are_longer() -> None:
    """A layer's parameters are 1000 bytes, as its gradients: three messages of 250 bytes gather, as many scatter."""
    fast, slow = (
        only(eight_layers(cluster=Cluster(devices_per_node=4, intra_node=Link(latency_ms=ms))), 1) for ms in (0.4, 2.0)
    )
    assert fast.stages[0].forward_ms == pytest.approx(8 * 4 / 3)
    assert fast.stages[0].backward_ms == pytest.approx(8 * 4 * 2 / 3)
    sharded = {stage.shard for stage in slow.stages}
    assert sharded == {1}, "gathering 6 ms for 1.3 ms of forward is worse than a pipeline"


def test_microbatches_of_groups_share_the_cards_between_nodes() -> None:
    link = Link(bytes_per_s=1e6)
    sends: list[float] = []
    for cards in (None, 4, 2, 1):
        cluster = Cluster(devices_per_node=4, inter_node=link, cards_per_node=cards)
        template = only(eight_layers(cluster=cluster, max_failures=0, min_pipeline_nodes=2, num_microbatches=400), 2)
        assert [stage.shard for stage in template.stages] == [4, 4]
        sends.append(template.stages[1].send_ms)
    assert sends == pytest.approx([2, 2, 4, 8])


def test_every_pipeline_has_a_whole_copy_on_its_nodes_and_a_lost_node_takes_its_shards() -> None:
    problem = eight_layers(max_failures=2)
    plan = first_plan(problem, range(6))
    assert any(stage.shard > 1 for pipeline in plan.pipelines for stage in pipeline.template.stages)
    assert plan.redundancy(problem.profile) == len(plan.pipelines) == 6
    after = replan(problem, plan, range(2, 6))
    assert set(after.nodes) == set(range(2, 6))
    assert after.redundancy(problem.profile) == 4
    assert sum(pipeline.num_microbatches for pipeline in after.pipelines) == 32


def test_rounds_are_what_the_schedule_runs_within_the_planned_memory() -> None:
    problem = eight_layers(max_failures=0, min_pipeline_nodes=2, num_microbatches=31)
    plan = first_plan(problem, range(2))
    (pipeline,) = plan.pipelines
    schedule = plan.schedule(0)
    assert pipeline.template.num_rounds(31) == 8
    stages = pipeline.template.stages
    taken = [StageBytes(problem.profile, stage.first_layer, stage.end_layer, 4, rising=False) for stage in stages]
    costs = ActionCosts(
        forward_ms=[stage.forward_ms for stage in stages],
        backward_input_ms=[stage.backward_ms for stage in stages],
        activation_bytes=[each.each for each in taken],
    )
    timeline = simulate(schedule, costs)
    assert timeline.iteration_ms == pytest.approx(pipeline.template.iteration_ms(31))
    for stage, each, peak in zip(stages, taken, timeline.peak_bytes, strict=True):
        assert stage.memory_bytes == each.held + each.workspace + peak


def test_interleaved_stages_are_not_sharded() -> None:
    with pytest.raises(ValueError, match="must") as caught:
        eight_layers(schedule=ScheduleKind.INTERLEAVED, num_chunks=2)
    assert str(caught.value) == (
        "shard must be off for interleaved-1f1b, whose stages have one device each, got auto; leave it out, or choose "
        "another schedule"
    )


def test_stages_of_one_tensor_parallel_degree_are_not_sharded() -> None:
    with pytest.raises(ValueError, match="must") as caught:
        eight_layers(profile=profile([4.0] * 8, tp_degrees=(2, 4)), sharding=Sharding.ON)
    assert str(caught.value) == (
        "shard must not be on beside tp 2 (devices of a stage share each microbatch or have their own, not both), got "
        "on; give tp auto for pipelines of both kinds"
    )


def methods(plan: Plan) -> list[tuple[int, int, set[tuple[int, int]]]]:
    """Return the nodes, microbatches, and (devices that divide the state, that share a microbatch) of pipelines."""
    return [
        (
            each.template.num_nodes,
            each.num_microbatches,
            {(stage.shard, stage.tp_degree) for stage in each.template.stages},
        )
        for each in plan.pipelines
    ]


def test_pipelines_of_both_methods_stand_side_by_side_where_that_is_fastest() -> None:
    """Two tensor-parallel devices take 1.1 times as long as two sharded ones, which are idle in half a round."""
    layers = tuple(layer(i, [cost(1.0), cost(0.55)], 30_000, 2000) for i in range(6))
    problem = PlanningProblem(
        profile=ModelProfile(layers=layers, tp_degrees=(1, 2)),
        num_microbatches=7,
        cluster=Cluster(devices_per_node=2, inter_node=Link(bytes_per_s=1e8)),
        sharding=Sharding.AUTO,
    )
    plan = first_plan(problem, range(3))
    assert methods(plan) == [(2, 5, {(1, 2)}), (1, 2, {(2, 1)})]
    assert plan.redundancy(problem.profile) == 2
    after = replan(problem, plan, plan.pipelines[0].nodes)
    assert sorted(methods(after)) == [(1, 3, {(1, 2)}), (1, 4, {(2, 1)})]
    only_one = [replace(problem, sharding=Sharding.OFF), replace(problem, sharding=Sharding.ON)]
    assert sum(plan.finish_ms) < min(sum(first_plan(each, range(3)).finish_ms) for each in only_one)


def test_node_that_memory_is_too_small_for_whole_microbatches_is_tensor_parallel() -> None:
    """Beside sharded nodes it holds as much of the states, and half of the activations."""
    problem = PlanningProblem(
        profile=profile([1.0] * 6, state_bytes=600, activation_bytes=600, tp_degrees=(1, 2)),
        num_microbatches=8,
        cluster=Cluster(devices_per_node=2),
        activation_checkpointing=False,
        sharding=Sharding.ON,
    )
    needed = {
        sharding: only(replace(problem, sharding=sharding), 1).stages[0].memory_bytes
        for sharding in (Sharding.ON, Sharding.OFF)
    }
    assert needed[Sharding.OFF] < needed[Sharding.ON]
    scarce = replace(problem, cluster=replace(problem.cluster, memory_bytes=needed[Sharding.ON] - 1))
    assert methods(first_plan(replace(scarce, sharding=Sharding.AUTO), range(2))) == [(1, 4, {(1, 2)})] * 2
