"""The simulator that compares planners: equal to the schedule simulator on chains, and no task before its inputs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.planners.evaluate import Result, evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.planners.samples import Lengths, SampleTable
from resilient.planners.stage_work import curves_at
from resilient.planners.timeline import Tasks, end_times
from resilient.templates.cluster import Cluster, Link
from resilient.templates.generators import Kind, generate
from resilient.templates.simulate import Costs, simulate

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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_evaluate_equals_the_schedule_simulator_on_a_chain(samples: list[tuple[int, int]], depth: int) -> None:
    pictures, text = [each[0] for each in samples], [each[1] for each in samples]
    vision, llm = [0.5, 1.5][: depth - 1] or [1.0], [1.0, 2.0, 0.25][:depth]
    number = len(samples)
    result = evaluate(
        setting(unit("vision", vision), unit("llm", llm)),
        Configuration(units={"vision": spread(1, len(vision)), "llm": spread(1, depth)}, num_microbatches=number),
        Assignment(units=dict.fromkeys(("vision", "llm"), place([0] * number, list(range(number))))),
        table(vision=pictures, llm=text),
        [Replica(num_microbatches=number)],
    )
    forward = np.array([[speed * each for each in pictures] for speed in vision])
    forward = np.concatenate([forward, [[speed * each for each in text] for speed in llm]])
    schedule = generate(Kind.ONE_F_ONE_B, len(forward), number)
    timeline = simulate(schedule, Costs(forward_ms=forward, backward_input_ms=2 * forward))
    assert result.iteration_ms == timeline.iteration_ms
    assert result.bubble == pytest.approx(sum(timeline.bubble_ms) / timeline.iteration_ms / len(forward))


places = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@given(places, st.booleans(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_evaluate_starts_nothing_before_its_inputs_wherever_samples_are(
    samples: list[tuple[int, ...]], colocated: bool, encoder_pp: int, llm_pp: int, encoder_dp: int
) -> None:
    columns = [[each[i] for each in samples] for i in range(5)]
    if colocated:
        encoder_dp = 2
    result = evaluate(
        setting(unit("vision", [1.0] * encoder_pp), unit("llm", [1.0] * llm_pp)),
        Configuration(
            units={"vision": spread(encoder_dp, encoder_pp), "llm": spread(2, llm_pp)},
            num_microbatches=4,
            colocated=colocated,
        ),
        Assignment(units={"vision": place(*columns[:2]), "llm": place(*columns[2:4])}),
        table(vision=columns[4], llm=[each + 1 for each in columns[4]]),
        [Replica(num_microbatches=4), Replica(num_microbatches=4, speed=0.5)],
    )
    for picture_replica, picture, replica, microbatch, pictures in samples:
        if pictures:
            seen = _spans(result, "vision", picture_replica, encoder_pp - 1, picture)
            used = _spans(result, "llm", replica, 0, microbatch)
            assert seen[False][0][1] <= used[False][0][0]
            assert any(start >= used[True][0][1] for start, _ in seen[True])
    spans = result.spans
    for lane in range(len(result.lanes)):
        of_lane = spans.lane == lane
        assert (spans.start_ns[of_lane][1:] >= spans.end_ns[of_lane][:-1]).all()
    for device in range(2 * llm_pp) if colocated and encoder_pp == llm_pp else ():
        vision, llm = spans.lane == device, spans.lane == 2 * llm_pp + device
        if vision.any() and llm.any():
            assert spans.end_ns[vision & ~spans.backward].max() <= spans.start_ns[llm].min()
            assert spans.start_ns[vision & spans.backward].min() >= spans.end_ns[llm].max()
    assert spans.end_ns.max() / 1e6 == result.iteration_ms
    assert 0 <= result.bubble < 1


def _spans(result: Result, name: str, pipeline: int, stage: int, microbatch: int) -> dict[bool, list[tuple[int, int]]]:
    spans, found = result.spans, {False: list[tuple[int, int]](), True: list[tuple[int, int]]()}
    lane = next(i for i, e in enumerate(result.lanes) if (e.unit, e.pipeline, e.stage) == (name, pipeline, stage))
    for i in np.flatnonzero((spans.lane == lane) & (spans.microbatch == microbatch)):
        found[bool(spans.backward[i])].append((int(spans.start_ns[i]), int(spans.end_ns[i])))
    return found


def _one(
    costs: tuple[UnitCosts, ...],
    samples: SampleTable,
    *,
    cluster: Cluster | None = None,
    speed: float = 1.0,
    dp: int = 1,
    colocated: bool = False,
    sharded: bool = False,
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
            sharded=sharded,
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
    result = _one(llm, table(llm=[4, 4]), cluster=slow, dp=2, sharded=True)
    assert result.iteration_ms == 5 + (5 + 10)
    assert result.peak_bytes == 15_000 + 4 * 8


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
    assert result.peak_bytes == 3 * 8 * 2


def test_groups_run_side_by_side_and_the_longest_decides() -> None:
    where = Place(
        replica=np.zeros(3, int), microbatch=np.zeros(3, int), group=np.array([0, 1, 1]), degree=np.array([4, 2, 2])
    )
    result = evaluate(
        setting(unit("llm", [1.0])),
        Configuration(units={"llm": spread(1, 1, cp=4)}, num_microbatches=1),
        Assignment(units={"llm": where}),
        table(llm=[16, 2, 3]),
        [Replica(num_microbatches=1)],
    )
    assert result.iteration_ms == 3 * max(16 / 4, 5 / 2)


def test_curves_between_profiled_degrees_divide_work_exactly() -> None:
    assert curves_at(unit("llm", [6.0]), 0, 1, 3)[0].linear == pytest.approx(2.0)
    assert curves_at(unit("llm", [8.0]), 0, 1, 8)[0].linear == pytest.approx(1.0)


def test_variability_counts_the_microbatches_of_all_replicas() -> None:
    result = _one((unit("llm", [1.0]),), table(llm=[2, 4]), dp=2)
    assert result.std_ms == {"llm": 3.0}


def test_evaluate_refuses_places_outside_the_replicas() -> None:
    message = "places in 'llm' must be within 1 replicas of [1] microbatches, got replica 0 and microbatch 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("llm", [1.0])),
            Configuration(units={"llm": spread(1, 1)}, num_microbatches=1),
            Assignment(units={"llm": place([0], [1])}),
            table(llm=[1]),
            [Replica(num_microbatches=1)],
        )


def test_evaluate_refuses_layers_that_are_not_spread() -> None:
    message = "stage_layers of 'llm' must spread 2 layers over 1 stages, got (1,)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("llm", [1.0, 1.0])),
            Configuration(units={"llm": replace(spread(1, 1))}, num_microbatches=1),
            Assignment(units={"llm": place([0], [0])}),
            table(llm=[1]),
            [Replica(num_microbatches=1)],
        )


def test_evaluate_refuses_encoders_that_share_stages() -> None:
    message = (
        "encoders must be parallel to be simulated, got replicated; compare by predicted_ms, or give them stages of "
        "their own"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(
            setting(unit("llm", [1.0])),
            Configuration(units={"llm": spread(1, 1)}, num_microbatches=1, encoders=Encoders.REPLICATED),
            Assignment(units={"llm": place([0], [0])}),
            table(llm=[1]),
            [Replica(num_microbatches=1)],
        )


def test_tasks_that_wait_in_a_circle_are_refused() -> None:
    tasks = Tasks(
        row=np.array([0, 1]),
        length_ns=np.array([1, 1]),
        sources=np.array([0, 1]),
        targets=np.array([1, 0]),
        delays_ns=np.array([0, 0]),
    )
    with pytest.raises(
        ValueError, match=r"^tasks must not wait for each other in a circle, got one over rows \[0, 1\]$"
    ):
        end_times(tasks)
