"""Entrain: the best configuration by its formula, and places with deferral on any replicas."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import Correction, Factor, buckets
from resilient.planners.costs.cost_model import CostModel, Curve, UnitCosts
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import Floats, cut_chain, loads
from resilient.planners.planner import Assignment, Configuration, Parallelism, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import in_order
from resilient.planners.published.entrain.allocation import proportional
from resilient.planners.published.entrain.planner import Entrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.stage_work import exposed_sum_ms, state_bytes
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import (
    COSTS,
    DEGREES,
    after_failures,
    check_places,
    learnt,
    setting,
    table,
    unit,
    with_attention,
)

AUDIO = unit("audio", 3, 0.003, 0.0)
MODELS = {
    "two": COSTS,
    "frozen": COSTS.frozen(["vision", "llm"]),
    "three": CostModel(units=(COSTS.units[0], AUDIO, COSTS.units[1])),
    "alone": CostModel(units=COSTS.units[1:]),
}
NETWORK = Link(latency_ms=0.01, bytes_per_s=1e7)


def drawn(costs: CostModel, count: int, seed: int = 0) -> SampleTable:
    of = table(count, seed)
    lengths = {"audio": Lengths.of(table(count, seed + 1).units["vision"].tokens), **of.units}
    return SampleTable(units={each.name: lengths[each.name] for each in costs.units})


def job(costs: CostModel, num_nodes: int, *, batch: int = 16, memory: int | None = None) -> Setting:
    cluster = Cluster(
        devices_per_node=2,
        memory_bytes=memory,
        intra_node=NETWORK,
        inter_node=replace(NETWORK, bytes_per_s=1e6),
    )
    return Setting(costs=costs, cluster=cluster, num_nodes=num_nodes, global_batch=batch, microbatch=2)


def by_hand(at: Setting, samples: SampleTable, spread: dict[str, Parallelism]) -> tuple[float, float]:
    """The step's time and the most memory of a device, by the formulas of the module's docstring."""
    names = [each.name for each in at.costs.units]
    language = names.index(LLM)
    number = at.global_batch // at.microbatch // spread[LLM].dp
    link = at.cluster.inter_node if at.num_nodes > 1 else at.cluster.intra_node
    slowest, branches, tail, memory, behind = 0.0, [0.0], 0.0, 0.0, 0
    encoders, through = np.zeros(len(samples)), np.zeros(len(samples))
    backward: dict[str, Floats] = {}
    whole: dict[str, Parallelism] = {}
    for position in reversed(range(len(names))):
        each, lengths = at.costs.units[position], samples.units[names[position]]
        to = spread[each.name]
        tokens, squares = 2 * float(lengths.tokens.mean()), 2 * float(lengths.squares.mean())
        layers = np.add(*each.layer_ms(tokens, squares, to.tp, to.cp))
        stage_of = np.repeat(np.arange(to.pp), cut_chain(layers, to.pp))
        slowest = max(slowest, *loads(layers, stage_of, to.pp))
        both = 1 + any(layer.input_gradient for layer in each.layers[1:])
        time = sum(layers) + (to.pp - 1) * both * link.transfer_ms(each.boundary_bytes * tokens / (to.tp * to.cp))
        to = whole[each.name] = replace(to, stage_layers=cut_chain(layers, to.pp))
        backward[each.name] = loads(each.layer_ms(tokens, squares, to.tp, to.cp)[1], stage_of, to.pp)
        in_flight = np.minimum(behind + np.arange(to.pp, 0, -1) + (position < language), number)
        kept = loads(
            [layer.curves[each.index(to.tp, to.cp)].activation_bytes for layer in each.layers], stage_of, to.pp
        )
        trains = loads([layer.trainable or layer.input_gradient for layer in each.layers], stage_of, to.pp) > 0
        # All of mean size, or somewhat more, but one, which is the largest sample where that is more.
        more = 2 * float(lengths.tokens.std()) / (at.global_batch / to.dp) ** 0.5 * 2  # microbatches of two
        held = in_flight * (tokens + more) + max(0.0, float(lengths.tokens.max()) - tokens)
        memory = max(memory, *(state_bytes(at, each, to) + kept * trains * held))
        curve = each.work(to.tp, to.cp)
        alone = np.where(lengths.tokens > 0, curve.of(lengths) + curve.fixed, 0.0)
        if position < language:
            encoders = np.maximum(encoders, alone)
            llm = spread[LLM]
            shared = min(to.tp * to.cp, llm.tp * llm.cp)
            messages = 1 + at.costs.units[language].layers[0].input_gradient
            branches.append(time + messages * link.transfer_ms(each.output_bytes * tokens / shared))
        else:
            tail += time
            through += alone
            behind += to.pp
    sums = exposed_sum_ms(at.costs.units, whole, at.cluster, backward)
    branch = max(branches) + tail
    # The largest of so many that are drawn is one of the first k with probability (k / n)^B.
    below = np.arange(len(samples) + 1.0) ** at.global_batch / len(samples) ** float(at.global_batch)
    longest = sum(np.diff(below) * np.sort(encoders + through))
    longer = max(1, longest / branch)
    return max(number, longer) * slowest + longer * (branch - slowest) + sums, memory


@settings(max_examples=40, deadline=None)
@given(
    costs=st.sampled_from(sorted(MODELS)),
    num_nodes=st.integers(1, 9),
    memory=st.none() | st.integers(50_000, 400_000),
    seed=st.integers(0, 5),
)
def test_no_configuration_is_better(costs: str, num_nodes: int, memory: int | None, seed: int) -> None:
    at = job(MODELS[costs], num_nodes, memory=memory)
    samples = drawn(at.costs, 30, seed)
    names = [each.name for each in at.costs.units]
    rated: list[tuple[float, float]] = []
    for dp, degrees in product((1, 2, 4, 8), product(DEGREES, repeat=len(names))):
        sizes = [tp * cp for tp, cp in degrees]
        if at.num_devices // dp < sum(sizes):
            continue
        work = [
            sum(np.add(*each.layer_ms(2 * lengths.tokens.mean(), 2 * lengths.squares.mean(), tp, cp))) * tp * cp
            for each, (tp, cp) in zip(at.costs.units, degrees, strict=True)
            for lengths in [samples.units[each.name]]
        ]
        stages = np.array(proportional(work, sizes, at.num_devices // dp)) // sizes
        if all(pp <= len(each.layers) for pp, each in zip(stages, at.costs.units, strict=True)):
            spread = [
                Parallelism(dp=dp, pp=int(pp), tp=tp, cp=cp) for pp, (tp, cp) in zip(stages, degrees, strict=True)
            ]
            rated.append(by_hand(at, samples, dict(zip(names, spread, strict=True))))
    fitting = [ms for ms, used in rated if memory is None or used <= memory]
    if not fitting:
        message = "memory_bytes must be >= " if rated else "num_nodes must give every unit stages in proportion to "
        with pytest.raises(ValueError, match=f"^{message}"):
            Entrain().configure(at, samples)
        return
    found = Entrain().configure(at, samples)
    ms, used = by_hand(at, samples, dict(found.units))
    assert found.predicted_ms == pytest.approx(ms, rel=1e-6)
    assert ms == pytest.approx(min(fitting), rel=1e-6)
    assert memory is None or used <= memory
    assert list(found.units) == names
    assert sum(each.num_devices for each in found.units.values()) <= at.num_devices
    for each in at.costs.units:
        spread = found.units[each.name]
        assert spread.dp * found.num_microbatches == 8
        assert (len(spread.stage_layers), sum(spread.stage_layers)) == (spread.pp, len(each.layers))


def test_few_samples_that_take_long_are_predicted_and_make_pipelines_short() -> None:
    at, draw = replace(setting(), global_batch=64), np.random.default_rng(0)
    even, tail = np.full(1000, 200), np.full(1000, 200)
    tail[::50] = 6000
    depths: list[int] = []
    for lengths in (even, tail):
        samples = SampleTable(units={name: Lengths.of(lengths) for name in ("vision", LLM)})
        found = Entrain().configure(at, samples)
        depths.append(found.units[LLM].pp)
        taken: list[float] = []
        for _ in range(10):
            batch, replicas = samples[draw.permutation(1000)[:64]], degraded_replicas(at, found, 0)
            planned = Entrain().assign(at, found, batch, replicas)
            taken.append(evaluate(at, found, planned, batch, replicas).iteration_ms)
        assert np.mean(taken) == pytest.approx(found.predicted_ms, rel=0.15)
    assert depths[1] < depths[0]


@pytest.mark.parametrize(
    ("at", "samples", "message"),
    [
        (
            job(COSTS, 1, memory=1000),
            table(30),
            "memory_bytes must be >= 1731155, what the least demanding configuration needs, got 1000; use more nodes, "
            "a smaller microbatch, or larger devices",
        ),
        (
            job(MODELS["three"], 1),
            drawn(MODELS["three"], 30),
            "num_nodes must give every unit stages in proportion to its work, and no more than it has layers, got 1 of "
            "2 devices for 8 microbatches; use more nodes, or fewer",
        ),
        (
            job(CostModel(units=COSTS.units[:1]), 1),
            table(30),
            "costs must have a unit 'llm', got ['vision']; name it so",
        ),
        (job(COSTS, 1), table(0), "samples must be one or more, got none; draw some from the data set"),
    ],
)
def test_what_cannot_be_configured_is_refused(at: Setting, samples: SampleTable, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Entrain().configure(at, samples)


def test_few_samples_are_noted() -> None:
    assert Entrain().configure(setting(), table(500)).notes == ()
    (note,) = Entrain().configure(setting(), table(10)).notes
    assert re.fullmatch(r"only batches of \d+ samples agree on \(\d+, \d+\) devices, and got 10; give more", note)


def test_an_allocation_on_the_edge_is_noted() -> None:
    whole = unit("llm", 8, 0.002, 0.0)
    curve = replace(whole.layers[0].curves[0], forward=Curve(linear=0.002))
    layers = tuple(replace(layer, curves=(curve,)) for layer in whole.layers)
    alone = replace(whole, degrees=((1, 1),), layers=layers)
    costs = CostModel(units=(replace(alone, name="vision"), alone))
    at = job(costs, 3, batch=2)  # six devices: shares of 2.5 and 3.5
    vision, text = np.tile([40, 60], 100), np.full(200, 70)
    samples = SampleTable(units={"vision": Lengths.of(vision), "llm": Lengths.of(text)})
    (note,) = Entrain().configure(at, samples).notes
    assert note.startswith("batches of 4096 samples do not agree on (")


def test_what_a_call_takes_beside_counts_for_the_allocation() -> None:
    """Half of the encoder's time: without it, its share would lie on the edge between one and two of six devices."""
    vision, text = np.tile([40, 60], 100), np.full(200, 150)
    samples = SampleTable(units={"vision": Lengths.of(vision), "llm": Lengths.of(text)})
    plain = unit("llm", 8, 0.002, 0.0)
    curve = replace(plain.layers[0].curves[0], forward=Curve(linear=0.002))
    units: list[UnitCosts] = []
    for name, fixed in (("vision", 0.6), ("llm", 0.0)):
        curves = (replace(curve, forward=replace(curve.forward, fixed=fixed)),)
        layers = tuple(replace(layer, curves=curves) for layer in plain.layers)
        units.append(replace(plain, name=name, degrees=((1, 1),), layers=layers))
    found = Entrain().configure(job(CostModel(units=tuple(units)), 3, batch=2), samples)
    assert [each.num_devices for each in found.units.values()] == [2, 4]
    assert found.notes == ()


@settings(max_examples=25, deadline=None)
@given(after_failures(), st.integers(0, 60), st.integers(0, 100))
def test_places_on_the_replicas_that_failures_leave(replicas: list[Replica], count: int, seed: int) -> None:
    planner, at = Entrain(), setting()
    found = planner.configure(at, table(100))
    batch = table(count, seed)
    assignment = planner.assign(at, found, batch, replicas)
    check_places(assignment, planner.assign(at, found, batch, replicas), count, replicas)
    early, late = assignment.units["vision"], assignment.units[LLM]
    assert (early.replica == late.replica).all()
    assert set((late.microbatch - early.microbatch).tolist()) <= {0, 1}
    evaluate(at, found, assignment, batch, replicas)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.5, 0.75, 1.0]), min_size=1, max_size=5), st.integers(0, 40), st.integers(0, 100))
def test_replicas_get_samples_by_the_plain_rule(speeds: list[float], count: int, seed: int) -> None:
    configuration = Configuration(
        units={"vision": Parallelism(dp=1, pp=1, stage_layers=(4,)), LLM: Parallelism(dp=1, pp=1, stage_layers=(8,))},
        num_microbatches=3,
    )
    at, batch = setting(), table(count, seed)
    encoder = COSTS.by_name["vision"].work().of(batch.units["vision"])
    llm = COSTS.by_name[LLM].work().of(batch.units[LLM])
    load, expected = [0.0] * len(speeds), [0] * count
    for sample in sorted(range(count), key=lambda sample: -encoder[sample]):
        least = {speed: min((load[r], r) for r in range(len(speeds)) if speeds[r] == speed) for speed in speeds}
        expected[sample] = min(((has + llm[sample]) / speed, r) for speed, (has, r) in least.items())[1]
        load[expected[sample]] += llm[sample]
    replicas = [Replica(num_microbatches=3, speed=speed) for speed in speeds]
    found = Entrain().assign(at, configuration, batch, replicas)
    assert found.units[LLM].replica.tolist() == expected


def test_all_encoders_place_samples_alike() -> None:
    at = job(MODELS["three"], 8)
    batch = drawn(at.costs, 64)
    configuration = Entrain().configure(at, batch)
    assignment = Entrain().assign(at, configuration, batch, [Replica(num_microbatches=8)] * 2)
    assert assignment.units["vision"] is assignment.units["audio"]
    assert (assignment.units["vision"].microbatch != assignment.units[LLM].microbatch).any()


def test_work_is_more_even_than_in_order_and_the_step_shorter() -> None:
    draw = np.random.default_rng(1)
    vision = draw.lognormal(5, 0.7, 256).astype(np.int64)
    text = draw.lognormal(4.5, 0.7, 256).astype(np.int64)
    batch = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision // 4 + text)})
    at = replace(setting(), global_batch=256, microbatch=8)
    configuration = Entrain().configure(at, batch)
    replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
    unplanned = Assignment(units=dict.fromkeys(batch.units, in_order(256, replicas)))
    plain = evaluate(at, configuration, unplanned, batch, replicas)
    planned = evaluate(at, configuration, Entrain().assign(at, configuration, batch, replicas), batch, replicas)
    assert planned.iteration_ms < 0.95 * plain.iteration_ms
    assert planned.std_ms["vision"] < 0.2 * plain.std_ms["vision"]
    assert planned.std_ms[LLM] < 0.4 * plain.std_ms[LLM]


@pytest.mark.parametrize("seed", range(3))
def test_what_was_learnt_makes_the_true_step_shorter(seed: int) -> None:
    """Attention takes thirty times what is usual, and was predicted to take nothing."""
    at, truth, batch = (
        replace(setting(), costs=with_attention(COSTS, 0.0)),
        with_attention(COSTS, 30.0),
        table(400, seed),
    )
    configuration, replicas = Entrain().configure(setting(), table(200)), [Replica(num_microbatches=4)] * 4
    spread = configuration.units[LLM]
    steps: list[float] = []
    slowest: list[float] = []
    for known in (at, learnt(at, truth, configuration)):
        found = Entrain().assign(known, configuration, batch, replicas)
        steps.append(evaluate(replace(at, costs=truth), configuration, found, batch, replicas).iteration_ms)
        true_ms = truth.by_name[LLM].work(spread.tp, spread.cp).of(batch.units[LLM])
        slowest.append(float(loads(true_ms, found.units[LLM].replica, 4).max()))
    assert steps[1] < 0.99 * steps[0]
    assert slowest[1] < 0.98 * slowest[0]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.sampled_from([0.3, 1.0]), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_once_learnt_the_true_times_of_replicas_hold_their_bound(count: int, speeds: list[float], seed: int) -> None:
    """None is done more than a longest sample for each after the mean: it would have gone to another."""
    configuration = Entrain().configure(setting(), table(200))
    of_bucket = np.random.default_rng(seed).uniform(0.3, 3.0, 126)
    factors = {
        (name, spread.tp, bucket): Factor(value=float(of_bucket[bucket]), num_steps=1)
        for name, spread in configuration.units.items()
        for bucket in range(126)
    }
    at, batch = replace(setting(), correction=Correction(factors=factors)), table(count, seed)
    replicas = [Replica(num_microbatches=4, speed=speed) for speed in speeds]
    place = Entrain().assign(at, configuration, batch, replicas).units[LLM]
    lengths, spread = batch.units[LLM], configuration.units[LLM]
    true_ms = COSTS.by_name[LLM].work(spread.tp, spread.cp).of(lengths) * of_bucket[buckets(lengths.longest)]
    done = loads(true_ms, place.replica, len(speeds)) / speeds
    assert done.max() <= (true_ms.sum() + (len(speeds) - 1) * true_ms.max()) / sum(speeds) * (1 + 1e-9)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_the_step_is_shorter_than_in_order_on_what_failures_leave(lost: int) -> None:
    configuration = replace(Entrain().configure(setting(), table(200)), num_microbatches=16)
    replicas = degraded_replicas(setting(), configuration, lost)
    assert any(each.speed < 1 for each in replicas)
    at, steps = replace(setting(), global_batch=256), np.zeros(2)
    for seed in range(5):
        batch = table(256, seed)
        unplanned = Assignment(units=dict.fromkeys(batch.units, in_order(256, replicas)))
        for index, found in enumerate((Entrain().assign(at, configuration, batch, replicas), unplanned)):
            steps[index] += evaluate(at, configuration, found, batch, replicas).iteration_ms
    assert steps[0] < 0.9 * steps[1]


def test_microbatches_are_small_where_memory_is() -> None:
    draw = np.random.default_rng(1)
    vision = draw.lognormal(5, 0.8, 32).astype(np.int64)
    batch = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision // 4 + 10)})
    spread = {name: Parallelism(dp=1, pp=1, stage_layers=(layers,)) for name, layers in (("vision", 4), (LLM, 8))}
    configuration = Configuration(units=spread, num_microbatches=32)

    def used(memory: int | None) -> int:
        at = replace(setting(memory), global_batch=32)
        places = Entrain().assign(at, configuration, batch, [Replica(num_microbatches=32)])
        return len(set(places.units["vision"].microbatch.tolist()))

    # The encoder holds its own, that which the language model has, and one for deferral.
    state, kept = 4 * 16_000, 400 * int(vision.sum())
    assert used(None) == used(2**40) < 10
    assert [used(state + 3 * kept // number + 100) for number in (12, 14)] == [12, 14]
