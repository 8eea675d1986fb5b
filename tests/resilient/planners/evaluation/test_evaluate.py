"""The simulator that compares planners: equal to the schedule simulator on chains, and no task before its inputs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.planners.stages.call_work import curves_at
from resilient.planners.stages.stage_work import gathers_ms
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate

DEGREES = ((1, 1), (1, 2), (1, 4))


def unit(name: str, speeds: list[float], **of_layer: object) -> UnitCosts:
    """A unit with a layer per entry: ms per token of the forward, twice that of the backward."""
    curves = [
        tuple(
            LayerCurves(
                forward=Curve(linear=speed / cp),
                backward_input=Curve(linear=speed / cp),
                backward_weight=Curve(linear=speed / cp),
                activation_bytes=8 / cp,
            )
            for _, cp in DEGREES
        )
        for speed in speeds
    ]
    layers = tuple(UnitLayer(name=str(i), curves=each, **of_layer) for i, each in enumerate(curves))  # pyright: ignore
    return UnitCosts(name=name, layers=layers, degrees=DEGREES)


def setting(*units: UnitCosts, cluster: Cluster | None = None) -> Setting:
    return Setting(
        costs=CostModel(units=units), cluster=cluster or Cluster(), num_nodes=64, global_batch=8, microbatch=1
    )


def spread(dp: int, pp: int, **more: int) -> Parallelism:
    return Parallelism(dp=dp, pp=pp, stage_layers=(1,) * pp, **more)


def place(replica: list[int], microbatch: list[int]) -> Place:
    return Place(replica=np.array(replica), microbatch=np.array(microbatch))


def table(**tokens: list[int]) -> SampleTable:
    return SampleTable(units={name: Lengths.of(np.array(each)) for name, each in tokens.items()})


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_evaluate_equals_the_schedule_simulator_on_a_chain(
    samples: list[tuple[int, int]], depth: int, latency_ms: float, kind: ScheduleKind, scarce: bool
) -> None:
    """As far as memory holds it: where it holds a byte less than eager 1F1B needs, that is 1F1B."""
    pictures, text = [each[0] for each in samples], [each[1] for each in samples]
    vision, llm = [0.5, 1.5][: depth - 1] or [1.0], [1.0, 2.0, 0.25][:depth]
    number = len(samples)
    tokens = np.array([pictures] * len(vision) + [text] * depth)
    forward = np.array([*vision, *llm])[:, None] * tokens
    costs = ActionCosts(
        forward_ms=forward, backward_input_ms=2 * forward, latency_ms=latency_ms, activation_bytes=8 * tokens
    )
    timeline = simulate(generate(kind, len(forward), number), costs)
    memory = max(timeline.peak_bytes) - scarce
    if scarce:
        timeline = simulate(generate(ScheduleKind.ONE_F_ONE_B, len(forward), number), costs)
    cluster = Cluster(inter_node=Link(latency_ms=latency_ms), memory_bytes=memory)
    result = evaluate(
        setting(unit("vision", vision), unit("llm", llm), cluster=cluster),
        Configuration(
            units={"vision": spread(1, len(vision)), "llm": spread(1, depth)},
            num_microbatches=number,
            lead=1 + (kind is ScheduleKind.EAGER),
        ),
        Assignment(units=dict.fromkeys(("vision", "llm"), place([0] * number, list(range(number))))),
        table(vision=pictures, llm=text),
        [Replica(num_microbatches=number)],
    )
    assert result.iteration_ms == timeline.iteration_ms
    assert result.bubble == pytest.approx(sum(timeline.bubble_ms) / timeline.iteration_ms / len(forward))
    assert result.peak_bytes == max(timeline.peak_bytes)


def _one(
    costs: tuple[UnitCosts, ...],
    samples: SampleTable,
    *,
    cluster: Cluster | None = None,
    speed: float = 1.0,
    dp: int = 1,
    colocated: bool = False,
    shard: int = 1,
) -> Result:
    """All samples in one microbatch of each replica, one stage for each unit."""
    number = np.arange(len(samples)) % dp
    where = Place(replica=number, microbatch=0 * number)
    return evaluate(
        setting(*costs, cluster=cluster),
        Configuration(
            units={each.name: Parallelism(dp=dp, pp=1, stage_layers=(len(each.layers),)) for each in costs},
            num_microbatches=1,
            colocated=colocated,
            shard=shard,
        ),
        Assignment(units={each.name: where for each in costs}),
        samples,
        [Replica(num_microbatches=1, speed=speed)] * dp,
    )


def test_a_slow_replica_takes_longer() -> None:
    llm = (unit("llm", [1.0]),)
    assert _one(llm, table(llm=[4])).iteration_ms == 12
    assert _one(llm, table(llm=[4]), speed=0.5).iteration_ms == 24


def test_gradients_are_summed_around_a_ring_after_the_backward() -> None:
    llm = (unit("llm", [1.0], gradient_bytes=1000),)
    slow = Cluster(inter_node=Link(bytes_per_s=1e6))
    result = _one(llm, table(llm=[4, 4]), cluster=slow, dp=2)
    assert (result.iteration_ms, result.sum_ms) == (13, 1)


def test_full_sharding_hides_messages_behind_computation_only_as_far_as_that_takes() -> None:
    llm = (unit("llm", [1.0], parameter_bytes=10_000, gradient_bytes=20_000),)
    slow = Cluster(inter_node=Link(bytes_per_s=1e6))
    result = _one(llm, table(llm=[4, 4]), cluster=slow, dp=2, shard=2)
    assert result.iteration_ms == 5 + (5 + 10)
    # Half of the layer, all of it and of one like it, and activations
    assert result.peak_bytes == 15_000 + 2 * 30_000 + 4 * 8


def test_devices_of_a_node_that_divide_a_copy_gather_inside_and_sum_between_nodes() -> None:
    llm = (unit("llm", [1.0], parameter_bytes=10_000, gradient_bytes=20_000, optimizer_bytes=40_000),)
    nodes = Cluster(devices_per_node=2, intra_node=Link(bytes_per_s=1e6), inter_node=Link(bytes_per_s=1e6))
    result = _one(llm, table(llm=[4, 4, 4, 4]), cluster=nodes, dp=4, shard=2)
    # Half of the gradients, by two devices each, while the other half is summed by the others through their cards
    assert (result.iteration_ms, result.sum_ms) == (5 + (5 + 10) + 10, 10)
    assert result.peak_bytes == 70_000 / 2 + 2 * 30_000 + 4 * 8


@pytest.mark.parametrize(("cards", "gather_ms"), [(None, 3.75), (1, 7.5)])
def test_what_leaves_a_node_goes_through_all_its_cards(cards: int | None, gather_ms: float) -> None:
    llm = unit("llm", [1.0], parameter_bytes=10_000, gradient_bytes=0)
    nodes = Cluster(devices_per_node=2, inter_node=Link(bytes_per_s=1e6), cards_per_node=cards)
    found = gathers_ms(llm, spread(4, 1), nodes, 4)
    assert [each.tolist() for each in found] == [[gather_ms]] * 2


def test_devices_that_divide_a_copy_are_in_step() -> None:
    costs = (unit("vision", [1.0]), unit("llm", [1.0]))
    samples = table(vision=[1, 4], llm=[4, 1])
    apart = _one(costs, samples, dp=2, colocated=True)
    together = _one(costs, samples, dp=2, colocated=True, shard=2)
    assert (apart.iteration_ms, together.iteration_ms) == (3 * 5, 3 * 8)
    assert (apart.bubble, together.bubble) == (0, pytest.approx(3 / 8))


def test_memory_is_state_with_a_sharded_optimizer_and_activations_in_flight() -> None:
    costs = unit("llm", [1.0], parameter_bytes=100, gradient_bytes=200, optimizer_bytes=600)
    assert _one((costs,), table(llm=[4, 4]), dp=2).peak_bytes == 300 + 300 + 4 * 8


def test_colocated_units_share_memory_and_take_turns() -> None:
    costs = (unit("vision", [1.0], parameter_bytes=100), unit("llm", [1.0], parameter_bytes=10))
    result = _one(costs, table(vision=[2], llm=[3]), colocated=True)
    assert result.iteration_ms == 3 * (2 + 3)
    assert result.peak_bytes == 110 + 8 * (2 + 3)
    assert result.bubble == 0


def test_frozen_parts_have_no_backward_and_keep_nothing() -> None:
    costs = CostModel(units=(unit("vision", [1.0]), unit("llm", [1.0, 1.0]))).frozen(["vision", "llm.0"])
    result = _one(costs.units, table(vision=[2], llm=[3]))
    assert result.iteration_ms == 2 + 2 * 3 + 3
    assert result.peak_bytes == 3 * 8


@pytest.mark.parametrize(("tokens", "longest_ms"), [([16, 2, 3], 16 / 4), ([16, 6, 5], 11 / 2)])
def test_groups_run_side_by_side_and_the_longest_decides(tokens: list[int], longest_ms: float) -> None:
    where = Place(
        replica=np.zeros(3, int), microbatch=np.zeros(3, int), group=np.array([0, 1, 1]), degree=np.array([4, 2, 2])
    )
    result = evaluate(
        setting(unit("llm", [1.0])),
        Configuration(units={"llm": spread(1, 1, cp=6)}, num_microbatches=1),
        Assignment(units={"llm": where}),
        table(llm=tokens),
        [Replica(num_microbatches=1)],
    )
    assert result.iteration_ms == 3 * longest_ms


def test_curves_between_profiled_degrees_divide_work_exactly() -> None:
    for work, cp, expected in ((6.0, 3, 2.0), (8.0, 8, 1.0)):
        one = unit("llm", [work])
        assert curves_at(one, one.layers[0], 1, cp).forward.linear == pytest.approx(expected)


def test_variability_counts_the_microbatches_of_all_replicas() -> None:
    result = _one((unit("llm", [1.0]),), table(llm=[2, 4]), dp=2)
    assert result.std_ms == {"llm": 3.0}


def test_evaluate_refuses_places_outside_the_replicas() -> None:
    message = "places in 'llm' must be within 1 replicas, got replica 1; assign the batch to these replicas"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("llm", [1.0])),
            Configuration(units={"llm": spread(1, 1)}, num_microbatches=1),
            Assignment(units={"llm": place([1], [0])}),
            table(llm=[1]),
            [Replica(num_microbatches=1)],
        )


def test_evaluate_refuses_layers_that_are_not_spread() -> None:
    message = "stage_layers of 'llm' must spread 2 layers over 1 stages, got (1,); give each stage its number of layers"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("llm", [1.0, 1.0])),
            Configuration(units={"llm": replace(spread(1, 1))}, num_microbatches=1),
            Assignment(units={"llm": place([0], [0])}),
            table(llm=[1]),
            [Replica(num_microbatches=1)],
        )


def _shared(encoders: Encoders, llm: UnitCosts, **speeds: list[float]) -> Result:
    """Two microbatches of one token; the language model's layers are stages."""
    names = [*speeds, "llm"]
    costs = [*(unit(name, each, parameter_bytes=100) for name, each in speeds.items()), llm]
    return evaluate(
        setting(*costs),
        Configuration(
            units={each.name: Parallelism(dp=1, pp=1, stage_layers=(len(each.layers),)) for each in costs[:-1]}
            | {"llm": spread(1, len(llm.layers))},
            num_microbatches=2,
            encoders=encoders,
        ),
        Assignment(units=dict.fromkeys(names, place([0, 0], [0, 1]))),
        table(**{name: [1, 1] for name in names}),
        [Replica(num_microbatches=2)],
    )


def _shown(result: Result, name: str, stage: int = 0) -> str:
    """The computations of a stage with their starts and ends in ms."""
    return " ".join(
        f"{span.action.op.text}{span.action.index} {span.start_ns / 1e6:g}-{span.end_ns / 1e6:g}"
        for span in result.timeline.spans
        if span.action.op.computes and (span.action.lane.unit, span.action.stage) == (name, stage)
    )


def test_colocated_encoders_follow_each_other_in_each_microbatch() -> None:
    result = _shared(Encoders.COLOCATED, unit("llm", [5.0]), vision=[1.0], audio=[2.0])
    # One device runs both encoders, the second microbatch while the language model has the first.
    assert _shown(result, "vision") == "F0 0-1 F1 3-4 B0 22-24 B1 37-39"
    assert _shown(result, "audio") == "F0 1-3 F1 4-6 B0 18-22 B1 33-37"
    assert _shown(result, "llm") == "F0 3-8 B0 8-18 F1 18-23 B1 23-33"
    assert result.bubble == pytest.approx(1 - (18 + 30) / (2 * 39))
    # Both encoders' layers, and two microbatches of both
    assert result.peak_bytes == 200 + 2 * 16
    graph = result.timeline.schedule.graph
    assert [str(lane) for lane, _ in graph.stages_of(0)] == ["vision.0", "audio.0"]


def test_replicated_encoders_run_on_every_stage_of_the_language_model() -> None:
    result = _shared(Encoders.REPLICATED, unit("llm", [2.0, 2.0]), vision=[1.0])
    # A stage is both: 3 ms forward, 6 ms backward.
    assert _shown(result, "llm", 0) == "F0 0-3 F1 3-6 B0 12-18 B1 21-27"
    assert _shown(result, "llm", 1) == "F0 3-6 B0 6-12 F1 12-15 B1 15-21"
    assert result.bubble == pytest.approx(1 - 36 / (2 * 27))
    assert result.peak_bytes == 100 + 2 * 16


def test_all_copies_of_a_replicated_encoder_sum_their_gradients() -> None:
    vision, llm = unit("vision", [1.0], gradient_bytes=1000), unit("llm", [1.0, 1.0])
    result = evaluate(
        setting(vision, llm, cluster=Cluster(inter_node=Link(bytes_per_s=1e6))),
        Configuration(
            units={"vision": spread(1, 1), "llm": spread(1, 2)}, num_microbatches=1, encoders=Encoders.REPLICATED
        ),
        Assignment(units=dict.fromkeys(("vision", "llm"), place([0], [0]))),
        table(vision=[1], llm=[1]),
        [Replica(num_microbatches=1)],
    )
    assert (result.iteration_ms, result.sum_ms) == (2 + 2 + 4 + 4 + 1, 1)


def test_replicated_encoders_have_one_stage() -> None:
    message = (
        "pp of 'vision' must be 1 where encoders are replicated, got 2; every stage of the language model runs all of "
        "it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("vision", [1.0, 1.0]), unit("llm", [1.0])),
            Configuration(
                units={"vision": spread(1, 2), "llm": spread(1, 1)}, num_microbatches=1, encoders=Encoders.REPLICATED
            ),
            Assignment(units=dict.fromkeys(("vision", "llm"), place([0], [0]))),
            table(vision=[1], llm=[1]),
            [Replica(num_microbatches=1)],
        )


samples = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6)


def _steps(encoders: Encoders, costs: list[UnitCosts], columns: dict[str, list[int]], pp: int) -> Result:
    """One sample in each microbatch; each unit cut into ``pp`` stages, replicated encoders not."""
    number = len(columns["llm"])
    return evaluate(
        setting(*costs),
        Configuration(
            units={
                each.name: spread(1, pp) if each.name == "llm" or encoders is not Encoders.REPLICATED else whole(each)
                for each in costs
            },
            num_microbatches=number,
            encoders=encoders,
        ),
        Assignment(units=dict.fromkeys(columns, place([0] * number, list(range(number))))),
        table(**columns),
        [Replica(num_microbatches=number)],
    )


def whole(costs: UnitCosts) -> Parallelism:
    return Parallelism(dp=1, pp=1, stage_layers=(len(costs.layers),))


@given(samples, st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_one_encoder_is_colocated_with_none_and_without_encoders_nothing_is_shared(
    lengths: list[tuple[int, int]], pp: int
) -> None:
    columns = {"vision": [each[0] for each in lengths], "llm": [each[1] for each in lengths]}
    costs = [unit("vision", [0.5, 1.5][:pp]), unit("llm", [1.0, 2.0][:pp])]
    one, other = (_steps(encoders, costs, columns, pp) for encoders in (Encoders.PARALLEL, Encoders.COLOCATED))
    assert (one.iteration_ms, one.bubble, one.peak_bytes) == (other.iteration_ms, other.bubble, other.peak_bytes)
    alone = [_steps(encoders, costs[1:], {"llm": columns["llm"]}, pp) for encoders in Encoders]
    assert len({(each.iteration_ms, each.bubble, each.peak_bytes) for each in alone}) == 1


@given(samples)
@settings(max_examples=25, deadline=None)
def test_units_that_share_their_only_stage_are_one_unit_that_takes_as_long_as_all(
    lengths: list[tuple[int, int]],
) -> None:
    pictures, text = [each[0] for each in lengths], [each[1] for each in lengths]
    columns = {"vision": pictures, "audio": text, "llm": text}
    apart = [unit("vision", [0.5]), unit("audio", [1.5]), unit("llm", [2.0])]
    # A token of text is one of sound and, where there is a picture, its part of that.
    merged = _steps(Encoders.COLOCATED, apart, columns, 1)
    sums = [0.5 * picture + 1.5 * sound for picture, sound in zip(pictures, text, strict=True)]
    encoder = [round(4 * each) for each in sums]
    single = _steps(Encoders.PARALLEL, [unit("vision", [0.25]), apart[2]], {"vision": encoder, "llm": text}, 1)
    assert merged.iteration_ms == single.iteration_ms
    replicated = _steps(Encoders.REPLICATED, apart, columns, 1)
    total = [round(4 * (each + 2 * words)) for each, words in zip(sums, text, strict=True)]
    assert replicated.iteration_ms == _steps(Encoders.PARALLEL, [unit("llm", [0.25])], {"llm": total}, 1).iteration_ms
    assert replicated.bubble == 0


def test_a_stage_that_takes_no_time_passes_gradients_on() -> None:
    lengths = {"llm": [1, 1]}
    assert _steps(Encoders.PARALLEL, [unit("llm", [1.0, 0.0, 1.0])], lengths, 3).iteration_ms == 3 + 6


def test_a_batch_without_a_token_takes_no_time_wherever_units_are() -> None:
    costs = (unit("vision", [1.0]), unit("llm", [1.0]))
    assert _one(costs, table(vision=[0], llm=[0]), colocated=True).iteration_ms == 0
    assert _one(costs, table(vision=[0], llm=[0])).iteration_ms == 0
