"""Templates have the lanes that planners answered, on devices of their own or shared, and each layer in each lane."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.curves import LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.pipelines.decision import decision_of, template_of, with_lanes
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.registry import PLANNERS, planner
from resilient.planners.stages.one_pipeline import several
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.template import PipelineTemplate
from tests.resilient.planners.jobs_of_planners import COSTS
from tests.resilient.planners.small_jobs import small_job

CHOSEN = ("uniform", "cornstarch", "disttrain", "dhp", "resilient")


@pytest.mark.parametrize("devices_per_node", [1, 2])
@pytest.mark.parametrize("name", CHOSEN)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_each_lane_has_each_layer_of_its_unit_once(name: str, devices_per_node: int, seed: int) -> None:
    setting, known, _ = small_job(seed, devices_per_node)
    try:
        configuration = planner(name).configure(setting, known)
    except ArgumentError:
        return
    template = template_of(setting, configuration, known)
    assert decision_of(template) == configuration
    assert msgspec.json.decode(msgspec.json.encode(template), type=PipelineTemplate) == template
    first = 0
    for unit in setting.costs.units:
        lanes = [lane for lane in template.lanes if lane.unit == unit.name]
        assert [lane.number for lane in lanes] == list(range(num_lanes(configuration, unit.name)))
        for lane in lanes:
            cuts = [(stage.first_layer, stage.end_layer) for stage in template.stages if stage.lane == lane]
            assert (cuts[0][0], cuts[-1][1]) == (first, first + len(unit.layers))
            assert all(before[1] == after[0] for before, after in pairwise(cuts))
        first += len(unit.layers)
    places = [
        (stage.node_index, device)
        for (stage, *_) in template.rows
        for device in range(stage.first_device, stage.first_device + stage.num_devices)
    ]
    assert sorted(places) == [divmod(device, devices_per_node) for device in range(setting.num_devices)]
    assert all(stage.shard == stage.num_devices == configuration.shard for stage in template.stages)


def num_lanes(configuration: Configuration, unit: str) -> int:
    """Return how many lanes a unit has: devices that divide a copy are one."""
    return with_lanes(configuration).units[unit].dp // configuration.shard


def test_a_lane_of_several_takes_its_share_of_a_microbatch() -> None:
    setting, known, _ = small_job(0, 1)
    setting = replace(setting, num_nodes=3, microbatch=4)
    one = planner("disttrain").configure(setting, known)
    vision = replace(one.units["vision"], pp=1, stage_layers=(len(setting.costs.units[0].layers),))
    rest = {name: each for name, each in one.units.items() if name != "vision"}
    times: list[float] = []
    for lanes in (1, 2):
        units = {"vision": replace(vision, dp=lanes), **rest}
        template = template_of(setting, replace(one, units=units, colocated=False), known)
        shares = [stage.forward_ms for stage in template.stages if stage.lane.unit == "vision"]
        assert len(shares) == lanes
        times.append(shares[0])
    tokens, squares = (4 * float(each.mean()) for each in (known.units["vision"].tokens, known.units["vision"].squares))
    expected = [float(setting.costs.units[0].layer_ms(tokens / lanes, squares / lanes)[0].sum()) for lanes in (1, 2)]
    np.testing.assert_allclose(times, expected)


def test_stages_are_described_as_they_are_planned() -> None:
    """An encoder and a stage of the language model on one node, the other stage on another; half of it runs again."""
    near, far = Link(latency_ms=1.0, bytes_per_s=1e6), Link(latency_ms=10.0, bytes_per_s=1e5)
    vision, llm = COSTS.frozen(["vision", "llm.0"]).units
    costs = replace(COSTS, units=(vision, replace(llm, boundary_bytes=8.0)))
    cluster = Cluster(devices_per_node=2, intra_node=near, inter_node=far)
    setting = Setting(costs=costs, cluster=cluster, num_nodes=2, global_batch=8, microbatch=2)
    spreads = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=1, pp=2, stage_layers=(4, 4), recompute=0.5),
    }
    configuration = Configuration(units=spreads, num_microbatches=4)
    samples = SampleTable(units={"vision": Lengths.of([[100], [300]]), LLM: Lengths.of([[1000], [500]])})
    encoder, first, second = template_of(setting, configuration, samples).stages
    assert [(stage.node_index, stage.first_device) for stage in (encoder, first, second)] == [(0, 0), (0, 1), (1, 0)]
    # of 3 layers with a backward 2 run again, behind one that has none; of 4 likewise 2
    assert [stage.recomputed_layers for stage in (encoder, first, second)] == [0, 3, 2]
    forward, backward = costs.units[1].layer_ms(1500.0, 1000.0**2 + 500.0**2)
    assert first.backward_ms == pytest.approx(float(backward[:4].sum() + forward[1:3].sum()))
    assert second.backward_ms == pytest.approx(float(backward[4:].sum() + forward[4:6].sum()))
    assert encoder.send_ms == 0.0
    assert first.send_ms == pytest.approx(2 * (1.0 + 400 * 64.0 / 1e6 * 1e3))
    assert second.send_ms == pytest.approx(2 * (10.0 + 1500 * 8.0 / 1e5 * 1e3))
    # frozen layers have parameters alone, and keep nothing but what is sent, to the step's end; the first stage holds
    # two microbatches, with what it sends and room for its gradient, the features that its frozen layer is computed
    # from, and the next ones; when layers run again, one at a time, those that kept all have let it go, and there may
    # be what the last one handed on to them, with its gradient
    border, layer = 1500 * 8, 1500 * 100
    assert encoder.memory_bytes == 4 * 4000 + 4 * 400 * 64
    assert first.memory_bytes == 4000 + 3 * 16000 + 2 * 400 * 64 + 2 * (2 * border + layer + 2 * border) + 2 * border
    assert second.memory_bytes == 4 * 16000 + 2 * border + 2 * border + 2 * layer


def test_what_does_not_run_is_refused() -> None:
    setting, known, _ = small_job(1, 1)
    one = planner("uniform").configure(replace(setting, num_nodes=2), known)
    with pytest.raises(ArgumentError, match=r"^replicas of the language model must be one in a pipeline, got 2; ask "):
        template_of(setting, several(one, 2), known)
    wide = {**one.units, LLM: replace(one.units[LLM], cp=2)}
    wanted = r"^devices of a stage must be one, or tensor parallel in one node, got a plan in which "
    with pytest.raises(ArgumentError, match=wanted + r"2 devices divide the tokens of samples in 'llm'; profile no "):
        template_of(setting, replace(one, units=wide), known)
    shared = {**one.units, LLM: replace(one.units[LLM], tp=2)}
    with pytest.raises(ArgumentError, match=wanted + "devices of a stage are in two nodes; profile no other "):
        template_of(setting, replace(one, units=shared, colocated=False), known)
    with pytest.raises(ArgumentError, match=wanted + "of 2 devices of 'llm' 1 are to run 'vision'; "):
        template_of(setting, replace(one, units=shared, encoders=Encoders.REPLICATED), known)


def test_a_device_has_several_stages_of_a_lane() -> None:
    near, far = Link(latency_ms=1.0, bytes_per_s=1e6), Link(latency_ms=10.0, bytes_per_s=1e5)
    cluster = Cluster(devices_per_node=2, intra_node=near, inter_node=far)
    costs = replace(COSTS, units=(COSTS.units[0], replace(COSTS.units[1], boundary_bytes=8.0)))
    setting = Setting(costs=costs, cluster=cluster, num_nodes=2, global_batch=8, microbatch=1)
    spreads = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=1, pp=3, chunks=2, stage_layers=(1, 1, 1, 1, 2, 2)),
    }
    samples = SampleTable(units={"vision": Lengths.of([[100]]), LLM: Lengths.of([[1000]])})
    template = template_of(setting, Configuration(units=spreads, num_microbatches=8), samples)
    encoder, *stages = template.stages
    assert [(stage.node_index, stage.first_device) for stage in stages] == [(0, 1), (1, 0), (1, 1)] * 2
    assert template.row_stages == ((0,), (1, 4), (2, 5), (3, 6))
    assert [stage.end_layer - stage.first_layer for stage in stages] == [1, 1, 1, 1, 2, 2]
    message_ms = 1000 * 8.0 / 1e6 * 1e3
    within, between = 2 * (1.0 + message_ms), 2 * (10.0 + 10 * message_ms)
    features_ms = 2 * (1.0 + 100 * 64.0 / 1e6 * 1e3)
    assert [stage.send_ms for stage in stages] == pytest.approx(
        [features_ms, between, within, between, between, within]
    )
    # each with its own layers' state, and so many microbatches as when its row holds most: 8, 6 and 4; the first gets
    # features, the others activations, all but the last hand them on, and gradients go back
    held, sizes, features = [5, 3, 3, 3, 3, 1], [1, 1, 1, 1, 2, 2], 100 * 64
    assert [stage.memory_bytes for stage in stages] == [
        layers * 16000 + 2 * (8000 if number else features) + cells * (layers * 100_000 + 16_000 * (number < 5))
        for number, (layers, cells) in enumerate(zip(sizes, held, strict=True))
    ]
    assert encoder.memory_bytes > 4 * 16000


def test_stages_of_several_devices_take_their_part_of_time_and_memory() -> None:
    """An encoder of one device, and one that stands by, before two nodes with a stage of two devices each."""
    near, far = Link(latency_ms=1.0, bytes_per_s=1e6), Link(latency_ms=10.0, bytes_per_s=1e5)
    vision, llm = COSTS.units
    costs = replace(COSTS, units=tuple(at_two_degrees(each) for each in (vision, replace(llm, boundary_bytes=8.0))))
    cluster = Cluster(devices_per_node=2, intra_node=near, inter_node=far)
    setting = Setting(costs=costs, cluster=cluster, num_nodes=3, global_batch=8, microbatch=1)
    spreads = {
        "vision": Parallelism(dp=2, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=1, pp=2, tp=2, stage_layers=(4, 4)),
    }
    samples = SampleTable(units={"vision": Lengths.of([[100]]), LLM: Lengths.of([[1000]])})
    template = template_of(setting, Configuration(units=spreads, num_microbatches=8), samples)
    *encoders, first, second = template.stages
    assert [(stage.node_index, stage.first_device, stage.tp_degree) for stage in template.stages] == [
        (0, 0, 1), (0, 1, 1), (1, 0, 2), (2, 0, 2),
    ]  # fmt: skip
    assert template.round_size == 1
    forward, _ = llm.layer_ms(1000.0, 1000.0**2)
    assert first.forward_ms == pytest.approx(float(forward[:4].sum()) / 2)
    assert second.send_ms == pytest.approx(2 * (10.0 + 1000 * 8.0 / 2 / 1e5 * 1e3))
    assert second.memory_bytes == 4 * 16000 / 2 + 4 * 1000 * 60 + 2 * 1000 * 8 / 2
    assert encoders[0].memory_bytes >= 4 * 16000


@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in ("fsdp", "static-cp")])
@pytest.mark.parametrize("degrees", [(2,), (1, 2)])
def test_what_planners_answer_with_tensor_parallelism_runs(name: str, degrees: tuple[int, ...]) -> None:
    """On three nodes of two devices."""
    setting, known, _ = small_job(1, 2)
    two = replace(setting.costs, units=tuple(map(at_two_degrees, setting.costs.units)))
    setting = replace(setting, costs=two.at_degrees(degrees), num_nodes=3)
    template = template_of(setting, planner(name).configure(setting, known), known)
    places = [
        (stage.node_index, stage.first_device + device)
        for stage, *_ in template.rows
        for device in range(stage.num_devices)
    ]
    assert sorted(places) == [(node, device) for node in range(3) for device in range(2)]
    assert {stage.tp_degree for stage in template.stages} <= set(degrees)
    assert template.round_size == 1


def at_two_degrees(unit: UnitCosts) -> UnitCosts:
    """Return a unit whose layers two devices may share, of which each keeps 60 bytes of a token."""

    def shared(alone: LayerCurves) -> LayerCurves:
        forward, inputs, weights = (each * 0.5 for each in (alone.forward, alone.backward_input, alone.backward_weight))
        return LayerCurves(forward=forward, backward_input=inputs, backward_weight=weights, activation_bytes=60)

    layers = tuple(replace(layer, curves=(layer.curves[0], shared(layer.curves[0]))) for layer in unit.layers)
    return replace(unit, layers=layers, degrees=((1, 1), (2, 1)))


def test_encoders_of_every_stage_share_the_samples_of_a_microbatch() -> None:
    link = Link(latency_ms=1.0, bytes_per_s=1e6)
    setting = Setting(costs=COSTS, cluster=Cluster(inter_node=link), num_nodes=2, global_batch=8, microbatch=2)
    spreads = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    configuration = Configuration(units=spreads, num_microbatches=4, encoders=Encoders.REPLICATED, colocated=True)
    samples = SampleTable(units={"vision": Lengths.of([[100], [300]]), LLM: Lengths.of([[1000], [500]])})
    template = template_of(setting, configuration, samples)
    assert template.row_stages == ((0, 2), (1, 3))
    assert list(map(str, template.lanes)) == ["vision.0", "vision.1", "llm.0"]
    encoders, first = template.stages[:2], template.stages[2]
    forward, _ = COSTS.units[0].layer_ms(200.0, 50_000.0)
    assert [stage.forward_ms for stage in encoders] == pytest.approx([float(forward.sum())] * 2)
    # half of the tokens come from the other node
    assert first.send_ms == pytest.approx(2 * (1.0 + 200 * 64.0 / 1e6 * 1e3))
    # the second is a microbatch further ahead
    kept, sent = 4 * 200 * 100, 2 * 200 * 64  # the first is on the device that needs what it makes
    assert [stage.memory_bytes for stage in encoders] == [4 * 16000 + 3 * kept, 4 * 16000 + 4 * (kept + sent)]
