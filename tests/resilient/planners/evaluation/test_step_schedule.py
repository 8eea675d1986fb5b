"""What is simulated could run: valid schedules, whole samples, and each action as long as a slow count of it has it."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import described_step, evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.schedules.graph import Backward, Flow, LaneName
from resilient.templates.schedules.schedule import Op
from resilient.templates.schedules.simulator import simulate
from resilient.templates.schedules.validator import validate

WAYS = [(encoders, colocated) for encoders in Encoders for colocated in (False, True)]


def _unit(name: str, num_layers: int, rng: np.random.Generator) -> UnitCosts:
    layers = [
        UnitLayer(
            name=str(index),
            curves=(
                LayerCurves(
                    forward=Curve(linear=float(rng.integers(1, 9)) / 4, attention=0.25, fixed=0.5),
                    backward_input=Curve(linear=float(rng.integers(1, 9)) / 4),
                    backward_weight=Curve(linear=float(rng.integers(1, 9)) / 4, fixed=0.25),
                    activation_bytes=float(rng.integers(1, 9)),
                ),
            ),
        )
        for index in range(num_layers)
    ]
    return UnitCosts(name=name, layers=tuple(layers), boundary_bytes=300.0, output_bytes=700.0)


def _spread(num_layers: int, pp: int, dp: int, rng: np.random.Generator) -> Parallelism:
    cuts = np.sort(rng.choice(np.arange(1, num_layers), pp - 1, replace=False))
    return Parallelism(dp=dp, pp=pp, stage_layers=tuple(np.diff([0, *cuts, num_layers]).tolist()))


def _step(
    encoders: Encoders, colocated: bool, rng: np.random.Generator
) -> tuple[Setting, Configuration, Assignment, SampleTable, list[Replica]]:
    """Draw a step of two pipelines: anything may be anywhere."""
    names = [*("vision", "audio")[: int(rng.integers(0, 3))], LLM, *("image",)[: int(rng.integers(0, 2))]]
    others = [name for name in names if name != LLM]
    num_layers = {name: int(rng.integers(1, 5)) for name in names}
    costs = CostModel(units=tuple(_unit(name, count, rng) for name, count in num_layers.items()))
    some = [name for name in (*names, *(f"{name}.0" for name in names)) if rng.random() < 0.3]
    depths = {name: int(rng.integers(1, count + 1)) for name, count in num_layers.items()}
    if encoders is Encoders.REPLICATED:
        depths |= dict.fromkeys(names if "image" in names else others, 1)
    elif colocated:
        depths = dict.fromkeys(names, min(depths.values()))
    alike = colocated or encoders is Encoders.REPLICATED
    copies = {name: 2 if alike or name == LLM else int(rng.integers(1, 4)) for name in names}
    if encoders is Encoders.COLOCATED and others:
        copies |= dict.fromkeys(others, copies[others[0]])
    configuration = Configuration(
        units={name: _spread(num_layers[name], depths[name], copies[name], rng) for name in names},
        num_microbatches=4,
        colocated=colocated,
        encoders=encoders,
        lead=int(rng.integers(1, 4)),
    )
    slow = Cluster(
        devices_per_node=int(rng.integers(1, 6)),
        intra_node=Link(latency_ms=0.125, bytes_per_s=8e6),
        inter_node=Link(latency_ms=0.5, bytes_per_s=1e6),
    )
    setting = Setting(
        costs=costs.frozen(some),
        cluster=slow,
        num_nodes=int(rng.integers(1, 9)),
        global_batch=8,
        microbatch=1,
        splits=bool(rng.integers(0, 2)),
    )
    replicas = [
        Replica(num_microbatches=int(rng.integers(1, 5)), speed=float(rng.choice([1.0, 0.5]))) for _ in range(2)
    ]
    count = int(rng.integers(1, 13))
    counts = np.array([each.num_microbatches for each in replicas])
    places: dict[str, Place] = {}
    for name in names:
        replica = rng.integers(0, 2, count)
        places[name] = Place(replica=replica, microbatch=rng.integers(0, counts[replica]))
    lengths = {name: Lengths.of(rng.integers(0, 6, count)) for name in names}
    return setting, configuration, Assignment(units=places), SampleTable(units=lengths), replicas


Samples = dict[tuple[str, int, int], list[int]]
"""Of each cell, by unit, lane and number."""


def _dealt(setting: Setting, configuration: Configuration, assignment: Assignment, batch: SampleTable) -> Samples:
    """Deal samples to the lanes of their pipelines, one by one."""
    found: Samples = defaultdict(list)
    for unit in setting.costs.units:
        spread, place = configuration.units[unit.name], assignment.units[unit.name]
        dp, lengths = configuration.units[LLM].dp, batch.units[unit.name]
        curve = unit.work()
        ms = (curve.attention * lengths.squares + curve.linear * lengths.tokens).tolist()
        loads: dict[int, float] = defaultdict(float)
        cells = sorted(set(zip(place.microbatch.tolist(), place.replica.tolist(), strict=True)))
        for microbatch, pipeline in cells:
            own = np.flatnonzero((place.replica == pipeline) & (place.microbatch == microbatch)).tolist()
            first, end = pipeline * spread.dp // dp, (pipeline + 1) * spread.dp // dp
            heaps: list[list[int]] = [[] for _ in range(max(end - first, 1))]
            for sample in sorted(own, key=lambda sample: -ms[sample]):
                min(heaps, key=lambda heap: sum(ms[each] for each in heap)).append(sample)
            heaps.sort(key=lambda heap: -sum(ms[each] for each in heap))
            lanes = sorted(range(first, first + len(heaps)), key=lambda lane: loads[lane])
            sharing = [each for each in range(2) if spread.dp < dp and each * spread.dp // dp == first]
            cell = microbatch * len(sharing) + sharing.index(pipeline) if len(sharing) > 1 else microbatch
            for lane, heap in zip(lanes, heaps, strict=True):
                loads[lane] += sum(ms[sample] for sample in heap)
                used = [sample for sample in heap if lengths.tokens[sample]]
                if used:
                    found[unit.name, lane, cell] = sorted(used)
    return found


def _apart(cells: Samples, at: tuple[str, int, int], names: list[str]) -> list[list[int]]:
    """Return the samples of a cell by the cell of the next unit that they go to, others with the first ones."""
    position, language = names.index(at[0]), names.index(LLM)
    then = LLM if position < language else names[-1] if position == language != len(names) - 1 else ""
    where = {sample: cell for cell, samples in cells.items() if cell[0] == then for sample in samples}
    used = sorted({where[sample] for sample in cells[at] if sample in where})
    first = used[0] if used else None
    return [[each for each in cells[at] if where.get(each, first) == to] for to in used or [None]]


@pytest.mark.parametrize(("encoders", "colocated"), WAYS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_any_answer_is_a_valid_schedule_of_whole_samples(encoders: Encoders, colocated: bool, seed: int) -> None:
    if encoders is Encoders.REPLICATED:
        return
    setting, configuration, assignment, batch, replicas = _step(encoders, colocated, np.random.default_rng(seed))
    step, _, _ = described_step(setting, configuration, assignment, batch, replicas)
    validate(step.schedule)
    graph, cells = step.schedule.graph, _dealt(setting, configuration, assignment, batch)
    assert {(*lane.name, cell) for lane in graph.lanes for cell in lane.cells} == set(cells)
    forward, later = np.asarray(step.costs.forward_ms), np.asarray(step.costs.backward_weight_ms)
    backward = np.asarray(step.costs.backward_input_ms) + later
    speed = {
        (name, lane, cell): replicas[int(assignment.units[name].replica[own[0]])].speed
        for (name, lane, cell), own in cells.items()
    }
    names = list(configuration.units)
    for lane in graph.lanes:
        backwards = lane.backwards
        unit, spread = setting.costs.by_name[lane.name.unit], configuration.units[lane.name.unit]
        lengths = batch.units[unit.name]
        for stage in range(len(lane.rows)):
            number = graph.first_stage[lane.name] + stage
            layers = unit.layers[sum(spread.stage_layers[:stage]) : sum(spread.stage_layers[: stage + 1])]
            one = sum((layer.curves[0].forward for layer in layers), Curve())
            other = sum((layer.backward(0) for layer in layers), Curve())
            trained = [layer.curves[0].backward_weight for layer in layers if layer.trainable]
            # what nobody before the stage waits for is all in the second part
            second = sum(trained, Curve()) if layers[0].input_gradient else other
            for cell in lane.cells:
                at = (lane.name.unit, lane.name.number, cell)
                parts = _apart(cells, at, names)
                if backwards[-1] is Backward.NONE or (colocated and unit.name != LLM):
                    parts = [cells[at]]
                sums = [(float(lengths.tokens[own].sum()), float(lengths.squares[own].sum())) for own in parts]
                rate, count = speed[at], len(parts)
                assert graph.tables.parts[graph.tables.lane_of[number], cell] == count
                assert forward[number, cell].sum() == pytest.approx(sum(one.call_ms(*each) for each in sums) / rate)
                told = [other.call_ms(*each) / rate for each in sums]
                assert backward[number, cell, :count].tolist() == pytest.approx(told)
                told = [second.call_ms(*each) / rate * setting.splits for each in sums]
                assert later[number, cell, :count].tolist() == pytest.approx(told)
                assert not backward[number, cell, count:].any()


def test_split_backwards_are_seldom_longer_and_then_by_what_a_row_puts_off() -> None:
    """Where messages are free. Cells differ: what is left to a longer wait could have been done in a shorter one."""
    longer: list[int] = []
    for seed in range(150):
        setting, *others = _step(Encoders.PARALLEL, False, np.random.default_rng(seed))
        free = (replace(setting, cluster=Cluster(), splits=each) for each in (False, True))
        whole, split = (described_step(each, *others)[0] for each in free)  # pyright: ignore[reportArgumentType]
        before, after = (simulate(step.schedule, step.costs).iteration_ms for step in (whole, split))
        op, *place, _ = split.schedule.codes.T
        signs = np.select([op == Op.BACKWARD_INPUT, op == Op.BACKWARD_WEIGHT], [1, -1])
        change = np.asarray(split.costs.backward_weight_ms)[tuple(place)] * signs
        put_off = [np.cumsum(change[slice(*ends)]).max(initial=0) for ends in pairwise((0, *split.schedule.ends))]
        assert after <= before + max(put_off) + 1e-6
        longer += [seed] * (after > before + 1e-6)
    assert len(longer) <= 3, "behind frozen stages nobody waits for what the first one that trains differentiates"


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_all_that_the_language_model_uses_is_handed_over_by_its_bytes(seed: int) -> None:
    setting, configuration, assignment, batch, replicas = _step(Encoders.PARALLEL, False, np.random.default_rng(seed))
    step, _, _ = described_step(setting, configuration, assignment, batch, replicas)
    cells = _dealt(setting, configuration, assignment, batch)
    where = {(name, sample): (lane, cell) for (name, lane, cell), own in cells.items() for sample in own}
    tokens: dict[Flow, float] = defaultdict(float)
    for (name, sample), (lane, cell) in where.items():
        if name != LLM and (LLM, sample) in where:
            target, there = where[LLM, sample]
            flow = Flow(LaneName(name, lane), cell, LaneName(LLM, target), there)
            if name == "image":
                flow = Flow(*flow[2:], *flow[:2])
            tokens[flow] += float(batch.units[name].tokens[sample])
    assert set(step.schedule.graph.flows) == set(tokens)
    assert len(set(step.schedule.graph.row_of)) == step.schedule.graph.num_stages
    cluster = setting.cluster
    latencies, transfers = (np.asarray(each) for each in (step.costs.flow_latency_ms, step.costs.flow_transfer_ms))
    node = _nodes(configuration, cluster.devices_per_node)
    for flow, latency, transfer in zip(step.schedule.graph.flows, latencies, transfers, strict=True):
        inside = node[flow.source][-1] == node[flow.target][0]
        link = cluster.intra_node if inside else cluster.inter_node
        assert latency == link.latency_ms
        assert latency + transfer == pytest.approx(link.transfer_ms(tokens[flow] * 700.0))
    passed = np.asarray(step.costs.transfer_ms).sum(axis=2)
    for lane in step.schedule.graph.lanes:
        for stage, (one, other) in enumerate(pairwise(node[lane.name])):
            number = step.schedule.graph.first_stage[lane.name] + stage
            link = cluster.intra_node if one == other else cluster.inter_node
            assert np.asarray(step.costs.latency_ms)[number] == link.latency_ms
            for cell in lane.cells:
                sent = batch.units[lane.name.unit].tokens[cells[lane.name.unit, lane.name.number, cell]].sum() * 300.0
                assert link.latency_ms + passed[number, cell] == pytest.approx(link.transfer_ms(sent))


def _nodes(configuration: Configuration, devices_per_node: int) -> dict[LaneName, list[int]]:
    """Return the node of each stage's device: of the first pipeline those of encoders, and so on."""
    found: dict[LaneName, list[int]] = {}
    number = 0
    for pipeline in range(2):
        for name in sorted(configuration.units, key=lambda name: name == LLM):
            spread = configuration.units[name]
            first, end = pipeline * spread.dp // 2, (pipeline + 1) * spread.dp // 2
            for lane in range(first, max(end, first + 1)):
                if LaneName(name, lane) not in found:
                    devices = range(number, number + spread.pp)
                    found[LaneName(name, lane)] = [each // devices_per_node for each in devices]
                    number += spread.pp
    return found


@pytest.mark.parametrize(("cards", "parts"), [(None, 2), (2, 2), (1, 1), (4, 2)])
def test_parts_of_a_message_that_leaves_a_node_share_its_cards(cards: int | None, parts: int) -> None:
    """Two rows of two devices, each a node: stages of one unit, or an encoder and the language model."""
    rng = np.random.default_rng(0)
    degrees = ((1, 1), (2, 1))
    vision, llm = (
        replace(each, degrees=degrees, layers=tuple(replace(one, curves=one.curves * 2) for one in each.layers))
        for each in (_unit("vision", 1, rng), _unit(LLM, 2, rng))
    )
    link = Link(bytes_per_s=1e6)
    setting = Setting(
        costs=CostModel(units=(vision, llm)),
        cluster=Cluster(devices_per_node=2, inter_node=link, cards_per_node=cards),
        num_nodes=3,
        global_batch=1,
        microbatch=1,
    )
    spreads = {
        "vision": Parallelism(dp=1, pp=1, tp=2, stage_layers=(1,)),
        LLM: Parallelism(dp=1, pp=2, tp=2, stage_layers=(1, 1)),
    }
    place = Place(replica=np.zeros(1, np.int64), microbatch=np.zeros(1, np.int64))
    step, _, _ = described_step(
        setting,
        Configuration(units=spreads, num_microbatches=1),
        Assignment(units=dict.fromkeys(spreads, place)),
        SampleTable(units={"vision": Lengths.of([[4]]), LLM: Lengths.of([[6]])}),
        [Replica(num_microbatches=1)],
    )
    assert np.ravel(step.costs.flow_transfer_ms).tolist() == [link.transfer_ms(4 * 700 / parts)]
    assert np.asarray(step.costs.transfer_ms)[1].ravel().tolist() == [link.transfer_ms(6 * 300 / parts)]


def test_parts_of_a_cell_are_calls_with_fixed_times_and_attention_of_their_own() -> None:
    """Of six samples of one cell of the language model three are drawn in one cell and one in another."""
    names = (LLM, "image")
    costs = CostModel(units=tuple(_unit(name, 1, np.random.default_rng(0)) for name in names))
    setting = Setting(costs=costs, cluster=Cluster(), num_nodes=8, global_batch=8, microbatch=1)
    llm, image = np.array([1, 2, 4, 8, 16, 32]), np.array([3, 0, 1, 1, 0, 1])
    spread, zeros = Parallelism(dp=1, pp=1, stage_layers=(1,)), np.zeros(6, np.int64)
    drawn = Place(replica=zeros, microbatch=np.array([0, 0, 1, 0, 0, 0]))
    assignment = Assignment(units={LLM: Place(replica=zeros, microbatch=zeros), "image": drawn})
    batch = SampleTable(units={LLM: Lengths.of(llm), "image": Lengths.of(image)})
    step, _, _ = described_step(
        setting,
        Configuration(units=dict.fromkeys(names, spread), num_microbatches=2),
        assignment,
        batch,
        [Replica(num_microbatches=2)],
    )
    assert [flow.target_cell for flow in step.schedule.graph.flows] == [0, 1]
    layer = costs.by_name[LLM].layers[0]
    (one, other), of = (layer.curves[0].forward, layer.backward(0)), [np.array([1, 2, 8, 16, 32]), np.array([4])]
    assert min(one.fixed, one.attention, other.fixed) > 0
    for times, curve in ((step.costs.forward_ms, one), (step.costs.backward_input_ms, other)):
        taken = [curve.call_ms(each.sum(), (each**2).sum()) for each in of]
        assert np.asarray(times)[0, 0].tolist() == pytest.approx(taken)
    once, _, _ = described_step(
        setting,
        Configuration(units=dict.fromkeys(names, spread), num_microbatches=2, shard=2),
        assignment,
        batch,
        [Replica(num_microbatches=2)],
    )
    assert np.asarray(once.costs.forward_ms)[0, 0].tolist() == pytest.approx([one.call_ms(63, (llm**2).sum())])


def test_a_sample_is_not_divided_over_lanes_and_several_are_spread() -> None:
    """Four lanes: one long picture takes as long as ever, four take as long as one; lanes take turns with long ones."""
    for pictures, lasts in (([100], 100), ([100] * 4, 100), ([100, 1, 1, 1, 1], 100), ([40, 30, 20, 10, 10], 40)):
        assert _vision_ms([pictures], lanes=4) == [lasts]
    assert _vision_ms([[9, 1], [9, 1]], lanes=2) == [9, 10]
    assert _vision_ms([[4], [4], [4]], lanes=2) == [4, 4, 8]


def _vision_ms(microbatches: list[list[int]], lanes: int) -> list[float]:
    """Return when an encoder of 1 ms a token has made what each microbatch needs."""
    vision = [tokens for each in microbatches for tokens in each]
    microbatch = np.repeat(np.arange(len(microbatches)), [len(each) for each in microbatches])
    curves = (LayerCurves(forward=Curve(linear=1.0), backward_input=Curve(), backward_weight=Curve()),)
    units = tuple(UnitCosts(name=name, layers=(UnitLayer(name="0", curves=curves),)) for name in ("vision", LLM))
    costs = CostModel(units=units).frozen(["vision"])
    setting = Setting(costs=costs, cluster=Cluster(), num_nodes=8, global_batch=8, microbatch=1)
    spreads = {
        "vision": Parallelism(dp=lanes, pp=1, stage_layers=(1,)),
        LLM: Parallelism(dp=1, pp=1, stage_layers=(1,)),
    }
    result = evaluate(
        setting,
        Configuration(units=spreads, num_microbatches=len(microbatches)),
        Assignment(units=dict.fromkeys(spreads, Place(replica=0 * microbatch, microbatch=microbatch))),
        SampleTable(units={"vision": Lengths.of(np.array(vision)), LLM: Lengths.of(np.ones(len(vision), np.int64))}),
        [Replica(num_microbatches=len(microbatches))],
    )
    ends = np.zeros(len(microbatches))
    for span in result.timeline.spans:
        if span.action.lane.unit == "vision" and span.action.op is Op.FORWARD:
            ends[span.action.index] = max(ends[span.action.index], span.end_ns / 1e6)
    return ends.tolist()


def test_units_on_the_same_devices_are_spread_alike() -> None:
    rng = np.random.default_rng(1)
    setting, configuration, assignment, batch, replicas = _step(Encoders.PARALLEL, True, rng)
    while "vision" not in configuration.units:
        setting, configuration, assignment, batch, replicas = _step(Encoders.PARALLEL, True, rng)
    units = dict(configuration.units)
    units["vision"] = replace(units["vision"], dp=4)
    told = [f"{name}: {unit.dp} of 1" for name, unit in units.items() if name != LLM]
    given = ", ".join([*told, "llm: 2 of 1"])
    message = (
        "units on the same devices must have equally many replicas, and stages of as many devices, got "
        f"{given}; spread them alike"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluate(setting, replace(configuration, units=units), assignment, batch, replicas)


def test_replicated_encoders_have_samples_where_the_language_model_has_them() -> None:
    message = (
        "places in 'vision' must be those of the language model where encoders are replicated, got others; assign them "
        "alike"
    )
    refused = 0
    for seed in range(9):
        setting, configuration, assignment, batch, replicas = _step(
            Encoders.REPLICATED, False, np.random.default_rng(seed)
        )
        alike = Assignment(units=dict.fromkeys(assignment.units, assignment.units[LLM]))
        validate(described_step(setting, configuration, alike, batch, replicas)[0].schedule)
        if "vision" in assignment.units:
            pictures = batch.units["vision"].tokens > 0
            place, other = assignment.units["vision"], assignment.units[LLM]
            if np.any((place.replica != other.replica)[pictures]):
                refused += 1
                with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                    evaluate(setting, configuration, assignment, batch, replicas)
    assert refused
