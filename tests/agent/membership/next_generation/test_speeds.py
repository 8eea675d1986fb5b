"""Slow nodes are told from wrong profiles and from noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.agent.membership.next_generation.speeds import slowdowns
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec

PLANNED_MS = (3.0, 3.0, 3.0, 3.0)


def profile(*times_ms: float) -> ModelProfile:
    """Layers of these times; a third is forward."""
    return ModelProfile(
        layers=tuple(
            LayerProfile(name=f"l{i}", costs=(LayerCost(forward_ms=ms / 3, backward_weight_ms=2 * ms / 3),))
            for i, ms in enumerate(times_ms)
        )
    )


def plan(*cuts: tuple[int, ...], checkpointing: bool = False) -> Plan:
    """Pipelines with these borders, a node for each stage."""
    pipelines: list[Pipeline] = []
    for cut in cuts:
        stages = tuple(
            StageSpec(
                first_layer=first,
                end_layer=end,
                node_index=i,
                forward_ms=1.0,
                backward_ms=1.0,
                recomputed_layers=(end - first) * checkpointing,
            )
            for i, (first, end) in enumerate(pairwise(cut))
        )
        template = PipelineTemplate(num_nodes=len(stages), stages=stages)
        first_node = sum(len(pipeline.nodes) for pipeline in pipelines)
        nodes = tuple(range(first_node, first_node + len(stages)))
        pipelines.append(Pipeline(template=template, nodes=nodes, num_microbatches=2))
    return Plan(pipelines=tuple(pipelines))


def measured(plan: Plan, true_ms: tuple[float, ...], slow: dict[int, float]) -> dict[tuple[int, int], float]:
    """What the workers measure when layers take these times and some nodes take a factor longer."""
    return {
        (slot.node, 0): slow.get(slot.node, 1.0)
        * sum(sum(true_ms[stage.first_layer : stage.end_layer]) for stage in slot.stages)
        for slot in plan.slots
    }


THREE = plan((0, 2, 4), (0, 1, 4), (0, 3, 4))


def test_slow_node_is_found_with_its_factor() -> None:
    times = measured(THREE, PLANNED_MS, {2: 2.0})
    assert slowdowns(profile(*PLANNED_MS), THREE, times) == {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 1.0}


def test_slow_node_with_several_stages_is_found() -> None:
    """Two pipelines whose nodes take turns: the first runs layers 0 and 2, the second 1 and 3."""
    stages = tuple(
        StageSpec(first_layer=i, end_layer=i + 1, node_index=i % 2, forward_ms=1.0, backward_ms=2.0) for i in range(4)
    )
    template = PipelineTemplate(num_nodes=2, stages=stages)
    two = Plan(pipelines=tuple(Pipeline(template=template, nodes=(n, n + 1), num_microbatches=2) for n in (0, 2)))
    times = measured(two, (1.0, 2.0, 5.0, 4.0), {2: 1.5})
    assert times == {(0, 0): 6.0, (1, 0): 6.0, (2, 0): 9.0, (3, 0): 6.0}
    assert slowdowns(profile(*PLANNED_MS), two, times) == {0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0}


def units(*shares: tuple[float, ...]) -> Pipeline:
    """A pipeline of a language model on its first node, and lanes of an encoder with these parts of its samples.

    Args:
        shares: By further node, those of its lanes.
    """
    stages = [StageSpec(lane=LaneName("llm"), first_layer=2, end_layer=4, node_index=0, forward_ms=2, backward_ms=4)]
    lanes = [(node, share) for node, of_node in enumerate(shares, start=1) for share in of_node]
    for number, (node, share) in enumerate(lanes):
        lane, forward_ms = LaneName("vision", number), 4 * share
        stage = StageSpec(
            lane=lane, first_layer=0, end_layer=2, node_index=node, forward_ms=forward_ms, backward_ms=2 * forward_ms
        )
        stages.append(stage)
    template = PipelineTemplate(num_nodes=1 + len(shares), stages=tuple(stages))
    return Pipeline(template=template, nodes=tuple(range(1 + len(shares))), num_microbatches=2)


@pytest.mark.parametrize("slow", [None, 1, 2, 3, 5])
def test_lanes_are_expected_to_take_their_part_of_the_samples(slow: int | None) -> None:
    """Three encoder nodes share, in another pipeline one does all, in a third one has two lanes."""
    pipelines, first, planned = [], 0, dict[tuple[int, int], float]()
    for pipeline in (units((1.0,)), units((0.5,), (0.25,), (0.25,)), units((0.5, 0.5))):
        nodes = tuple(range(first, first + len(pipeline.nodes)))
        pipelines.append(replace(pipeline, nodes=nodes))
        first += len(nodes)
    plan = Plan(pipelines=tuple(pipelines))
    for slot in plan.slots:
        true_ms = sum(stage.forward_ms + stage.backward_ms for stage in slot.stages)
        planned[slot.node, 0] = 3.0 * true_ms * (2.0 if slot.node == slow else 1.0)
    found = slowdowns(profile(6.0, 6.0, 3.0, 3.0), plan, planned)
    assert found == {node: 2.0 if node == slow else 1.0 for node in range(8)}


@pytest.mark.parametrize("slow", [None, 0, 1, 2, 3])
def test_what_more_calls_take_in_one_pipeline_is_not_the_node_s_fault(slow: int | None) -> None:
    """The second pipeline's encoder has two lanes, each of which takes as long for half of the samples."""
    first, second = units((1.0,)), units((1.0, 1.0))
    plan = Plan(pipelines=(first, replace(second, nodes=(2, 3))))
    times = {
        (slot.node, 0): (2.0 if slot.node == slow else 1.0)
        * sum(stage.forward_ms + stage.backward_ms for stage in slot.stages)
        for slot in plan.slots
    }
    assert times[3, 0] == 2 * times[1, 0] or slow in (1, 3)
    found = slowdowns(profile(6.0, 6.0, 3.0, 3.0), plan, times)
    assert found == {node: 2.0 if node == slow else 1.0 for node in range(4)}


def test_slow_node_of_two_pipelines_is_found() -> None:
    two = plan((0, 2, 4), (0, 1, 4))
    times = measured(two, PLANNED_MS, {3: 1.5})
    assert slowdowns(profile(*PLANNED_MS), two, times) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.5}


@given(st.tuples(*[st.floats(0.1, 100.0)] * 4), st.tuples(*[st.floats(0.1, 100.0)] * 4))
def test_profile_that_is_wrong_makes_nobody_slow(planned_ms: tuple[float, ...], true_ms: tuple[float, ...]) -> None:
    found = slowdowns(profile(*planned_ms), THREE, measured(THREE, true_ms, {}))
    assert set(found.values()) == {1.0}


@pytest.mark.parametrize(
    ("true_ms", "node"), [((0.7, 0.7, 0.7, 1.4), 0), ((0.7, 1.4, 1.4, 0.7), 2), ((1.4, 1.0, 0.7, 1.4), 4)]
)
def test_wrong_profile_beside_a_slow_node_makes_its_neighbour_no_slower(true_ms: tuple[float, ...], node: int) -> None:
    found = slowdowns(profile(1.0, 1.0, 1.0, 1.0), THREE, measured(THREE, true_ms, {node: 50.0}))
    assert found.pop(node) > 30
    assert set(found.values()) == {1.0}


@given(st.dictionaries(st.integers(0, 5), st.floats(1.0, 1.24)))
def test_small_differences_are_noise(slow: dict[int, float]) -> None:
    found = slowdowns(profile(*PLANNED_MS), THREE, measured(THREE, PLANNED_MS, slow))
    assert set(found.values()) == {1.0}


def test_factors_are_relative_to_the_faster_of_the_others() -> None:
    times = measured(THREE, PLANNED_MS, dict.fromkeys(range(4), 2.0))
    assert slowdowns(profile(*PLANNED_MS), THREE, times) == {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0, 4: 1.0, 5: 1.0}


@pytest.mark.parametrize("missing", [{1, 2}, {0, 3, 5}], ids=["one pipeline is whole", "none is"])
def test_no_comparison_without_two_whole_pipelines(missing: set[int]) -> None:
    times = {worker: ms for worker, ms in measured(THREE, PLANNED_MS, {4: 3.0}).items() if worker[0] not in missing}
    assert slowdowns(profile(*PLANNED_MS), THREE, times) == {}


def test_nodes_of_a_pipeline_without_a_measurement_are_left_out() -> None:
    times = {**measured(THREE, PLANNED_MS, {4: 3.0}), (0, 0): 0.0}
    found = slowdowns(profile(*PLANNED_MS), THREE, times)
    assert found == {2: 1.0, 3: 1.0, 4: 3.0, 5: 1.0}


def test_layers_without_a_planned_time_are_not_compared() -> None:
    assert slowdowns(profile(0.0, 0.0, 0.0, 0.0), THREE, measured(THREE, PLANNED_MS, {4: 3.0})) == {}


def test_forward_that_runs_again_is_part_of_what_is_expected() -> None:
    """A checkpointed stage takes a third longer, which is no fault of its node."""
    again = plan((0, 4), checkpointing=True).pipelines[0]
    once = plan((0, 4), (0, 4)).pipelines
    mixed = Plan(
        pipelines=(
            again,
            *(Pipeline(template=p.template, nodes=(i + 1,), num_microbatches=2) for i, p in enumerate(once)),
        )
    )
    times = {(0, 0): 16.0, (1, 0): 12.0, (2, 0): 12.0}
    assert slowdowns(profile(*PLANNED_MS), mixed, times) == {0: 1.0, 1: 1.0, 2: 1.0}


def shared_plan(*ways: tuple[int, int]) -> Plan:
    """Pipelines of one node, the devices of which have a microbatch each (the first number) or share each."""
    pipelines: list[Pipeline] = []
    for node, (shard, degree) in enumerate(ways):
        stage = StageSpec(
            first_layer=0,
            end_layer=4,
            node_index=0,
            num_devices=shard * degree,
            shard=shard,
            forward_ms=1,
            backward_ms=2,
        )
        template = PipelineTemplate(num_nodes=1, stages=(stage,))
        pipelines.append(Pipeline(template=template, nodes=(node,), num_microbatches=2))
    return Plan(pipelines=tuple(pipelines))


@pytest.mark.parametrize("parallel_ms", [7.0, 12.0, 40.0], ids=["as planned", "no gain", "slow exchanges"])
@pytest.mark.parametrize("slow", [None, 1, 4])
def test_what_a_method_takes_is_not_the_fault_of_its_nodes(slow: int | None, parallel_ms: float) -> None:
    """Nodes are compared with those that share their layers in the same way; the only one that does so with none."""
    plan = shared_plan((2, 1), (2, 1), (2, 1), (1, 2), (1, 2), (1, 2), (1, 1))
    costs = (LayerCost(forward_ms=1.0, backward_weight_ms=2.0), LayerCost(forward_ms=0.6, backward_weight_ms=1.15))
    layers = tuple(LayerProfile(name=f"l{i}", costs=costs) for i in range(4))
    times = {
        (slot.node, slot.local_rank): (2.0 if slot.node == slow else 1.0)
        * {(2, 1): 15.0, (1, 2): parallel_ms, (1, 1): 12.0}[slot.stages[0].shard, slot.stages[0].tp_degree]
        for slot in plan.slots
    }
    found = slowdowns(ModelProfile(layers=layers, tp_degrees=(1, 2)), plan, times)
    assert found == {node: 2.0 if node == slow else 1.0 for node in range(7)}
