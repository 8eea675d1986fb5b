"""DistTrain: the best of all configurations by the paper's formulas, and places on any replicas."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import UNCORRECTED, Observation
from resilient.planners.costs.cost_model import CostModel, Floats
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.packing.balance import cut_chain, loads, longest_first
from resilient.planners.packing.memory_constrained_order import order_fits
from resilient.planners.packing.microbatch_order import fill_intervals, pipeline_ms
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica, Setting
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.published.disttrain.search import disttrain_configurations
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.planners.stages.stage_work import by_stage, gradient_sum_ms
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.devices import cluster_of
from tests.resilient.planners.jobs_of_planners import COSTS, after_failures, check_places, setting, table, unit

SMALL = CostModel(units=(unit("vision", 2, 0.001, 1e-6), unit("llm", 3, 0.002, 1e-6)))
THREE = CostModel(units=(*SMALL.units, unit("generator", 2, 0.003, 0.0)))


def drawn(costs: CostModel, seed: int) -> SampleTable:
    of = table(30, seed)
    return SampleTable(units={each.name: of.units["llm" if each.name == LLM else "vision"] for each in costs.units})


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def by_hand(job: Setting, samples: SampleTable, spread: dict[str, Parallelism]) -> tuple[float, float]:
    """The step's time and the most memory of a device, by the formulas of the module's docstring."""
    llm, names = spread[LLM].dp, list(spread)
    steps = job.global_batch // (llm * job.microbatch)
    warm, slowest, sums, memory = 0.0, 0.0, 0.0, 0.0
    for each in job.costs.units:
        at, lengths = spread[each.name], samples.units[each.name]
        # An encoder's replica has microbatches of several pipelines, or is one of a pipeline's lanes.
        several = -(-llm // at.dp)
        number = job.microbatch * several / max(at.dp // llm, 1)
        index = each.index(at.tp, 1)
        layers = [
            float((layer.curves[index].forward + layer.backward(index)).of(lengths).mean()) for layer in each.layers
        ]
        fixed = each.work(at.tp).fixed
        # The longest sample of a microbatch is whole.
        times = np.sort((each.work(at.tp)).of(lengths))
        below = (np.arange(len(times) + 1) / len(times)) ** job.microbatch
        lane_ms = max(number * sum(layers), float(times @ np.diff(below)))
        warm += lane_ms + fixed
        cut = replace(at, stage_layers=cut_chain(layers, at.pp))
        stage_of = np.repeat(np.arange(at.pp), cut.stage_layers)
        part = max(loads(layers, stage_of, at.pp)) / sum(layers)
        slowest = max(slowest, lane_ms * part + fixed / at.pp)
        sums = max(sums, float(gradient_sum_ms(each, cut, job.cluster).max()))
        state = by_stage(cut, [layer.parameter_bytes + layer.gradient_bytes for layer in each.layers]).max() / at.tp
        state += by_stage(cut, [layer.optimizer_bytes for layer in each.layers]).max() / at.tp / at.dp
        token = by_stage(cut, [layer.curves[index].activation_bytes for layer in each.layers]).max()
        # Encoders, the language model and the generator follow each other.
        held = min(sum(spread[name].pp for name in names[names.index(each.name) :]), steps)
        mean = float(lengths.tokens.mean())
        deviation = 3 * float(lengths.tokens.std()) * np.sqrt(number * several * held)
        budget = mean * number * held + max(deviation, (float(lengths.tokens.max()) - mean) * several)
        memory = max(memory, state + token * budget)
    return warm + slowest * (steps - 1) + sums, memory


@settings(max_examples=25, deadline=None)
@given(
    costs=st.sampled_from([SMALL, THREE]),
    num_nodes=st.integers(2, 4),
    batch=st.sampled_from([4, 6, 8]),
    microbatch=st.sampled_from([1, 2]),
    memory=st.none() | st.sampled_from([300_000, 500_000, 800_000, 1_200_000]),
    bytes_per_s=st.sampled_from([None, 1e7, 1e6, 1e5]),
    seed=st.integers(0, 5),
)
def test_no_configuration_is_better(
    costs: CostModel,
    num_nodes: int,
    batch: int,
    microbatch: int,
    memory: int | None,
    bytes_per_s: float | None,
    seed: int,
) -> None:
    job = Setting(
        costs=costs,
        cluster=Cluster(devices_per_node=2, memory_bytes=memory, inter_node=Link(bytes_per_s=bytes_per_s)),
        num_nodes=num_nodes,
        global_batch=batch,
        microbatch=microbatch,
    )
    samples = drawn(costs, seed)
    total = batch // microbatch
    ways: list[dict[str, Parallelism]] = []
    for llm in divisors(total):
        options = [
            [
                Parallelism(dp=dp, pp=pp, tp=tp)
                for dp in ([llm] if each.name == LLM else divisors(llm * microbatch))
                for pp in range(1, len(each.layers) + 1)
                for tp in (1, 2)
                if dp * pp * tp <= job.num_devices
            ]
            for each in costs.units
        ]
        ways += [dict(zip(samples.units, way, strict=True)) for way in product(*options)]
    ways = [way for way in ways if sum(each.num_devices for each in way.values()) <= job.num_devices]
    rated = [(*by_hand(job, samples, way), sum(each.num_devices for each in way.values())) for way in ways]
    fitting = [(ms, devices) for ms, used, devices in rated if memory is None or used <= memory]
    if not fitting:
        with pytest.raises(ValueError, match=r"^num_nodes must be enough for 'disttrain', got "):
            DistTrain().configure(job, samples)
        return
    found = disttrain_configurations(job, samples)[0]
    ms, used = by_hand(job, samples, dict(found.units))
    assert found.predicted_ms == pytest.approx(ms, rel=1e-6)
    assert ms == pytest.approx(min(fitting)[0], rel=1e-6)
    assert memory is None or used <= memory
    assert found.num_microbatches == total // found.units[LLM].dp
    assert list(found.units) == [each.name for each in costs.units]
    for each in costs.units:
        assert sum(found.units[each.name].stage_layers) == len(each.layers)
        assert len(found.units[each.name].stage_layers) == found.units[each.name].pp
    assert found == disttrain_configurations(job, samples)[0]


def test_devices_that_do_not_help_are_left_out() -> None:
    job = replace(setting(), num_nodes=64, global_batch=2, microbatch=1)
    found = DistTrain().configure(job, table(50))
    assert sum(each.num_devices for each in found.units.values()) < job.num_devices


def test_a_model_that_does_not_fit_is_refused() -> None:
    message = (
        "num_nodes must be enough for 'disttrain', got 8 of 2 devices; use more nodes, a smaller microbatch, or "
        "another planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DistTrain().configure(setting(memory_bytes=1000), table(50))


@pytest.mark.parametrize(("data", "chunks"), [("interleaved", 2), ("video", 1)])
def test_two_stages_are_on_each_device_where_that_is_faster(data: str, chunks: int) -> None:
    model, planner = "qwen2-vl-7b", DistTrain()
    job = Setting(
        costs=derive_costs(model, "h200"), cluster=cluster_of("h200", 8), num_nodes=4, global_batch=64, microbatch=1
    )
    known = workload(data, 128, 0, model)
    found = planner.configure(job, known)
    assert found.units[LLM].chunks == chunks
    plain = [each for each in disttrain_configurations(job, known) if each.units[LLM].pp > 1]
    step_ms = [each.predicted_ms for each in timed(planner, job, plain, known_batches(job, known, 2))]
    assert min(step_ms) > found.predicted_ms or chunks == 1


@settings(max_examples=25, deadline=None)
@given(after_failures(), st.integers(0, 60), st.integers(0, 100))
def test_places_on_the_replicas_that_failures_leave(replicas: list[Replica], count: int, seed: int) -> None:
    planner, job = DistTrain(), setting()
    found = planner.configure(job, table(50))
    batch = table(count, seed)
    assignment = planner.assign(job, found, batch, replicas)
    check_places(assignment, planner.assign(job, found, batch, replicas), count, replicas)
    # An encoder's replica computes what comes from all that it serves.
    work = sum(
        job.costs.by_name[name].work(each.tp).of(batch.units[name]) * found.units[LLM].dp / each.dp
        for name, each in found.units.items()
    )
    expected = longest_first(work, [each.speed for each in replicas])
    assert np.bincount(assignment.units[LLM].replica, work, len(replicas)) == pytest.approx(
        np.bincount(expected, work, len(replicas))
    )


def test_microbatches_run_in_a_better_order_than_they_come_in() -> None:
    stages = {"vision": Parallelism(dp=1, pp=1, stage_layers=(4,)), LLM: Parallelism(dp=1, pp=2, stage_layers=(4, 4))}
    configuration = Configuration(units=stages, num_microbatches=16)
    batch = table(16)
    place = DistTrain().assign(setting(), configuration, batch, [Replica(num_microbatches=16)]).units[LLM]
    assert sorted(place.microbatch.tolist()) == list(range(16))
    vision, llm = COSTS.by_name["vision"], COSTS.by_name[LLM]
    has = batch.units["vision"].tokens > 0
    forward = np.stack([vision.forward().of(batch.units["vision"]) + vision.forward().fixed * has] * 3)
    forward[1:] = (llm.forward().of(batch.units[LLM]) + llm.forward().fixed) / 2
    backward = np.stack([vision.backward().of(batch.units["vision"])] + [llm.backward().of(batch.units[LLM]) / 2] * 2)
    ordered = pipeline_ms(np.argsort(place.microbatch), forward, backward)
    assert ordered < pipeline_ms(range(16), forward, backward)
    published = DistTrain(order=fill_intervals).assign(setting(), configuration, batch, [Replica(num_microbatches=16)])
    order = np.argsort(published.units[LLM].microbatch)
    assert order.tolist() == fill_intervals(forward, backward).tolist()
    assert ordered <= pipeline_ms(order, forward, backward)


@settings(max_examples=30, deadline=None)
@given(memory=st.integers(300_000, 1_000_000), seed=st.integers(0, 99), published=st.booleans())
@example(memory=942_001, seed=36, published=True)
def test_no_slower_than_other_orders_that_memory_holds(memory: int, seed: int, published: bool) -> None:
    stages = {"vision": Parallelism(dp=1, pp=1, stage_layers=(4,)), LLM: Parallelism(dp=1, pp=4, stage_layers=(2,) * 4)}
    configuration, batch = Configuration(units=stages, num_microbatches=20), table(20, seed)
    planner = DistTrain(order=fill_intervals) if published else DistTrain()
    job, replicas = setting(memory), [Replica(num_microbatches=20)]
    budget = MemoryBudget.of(job, configuration)
    assert budget is not None
    times: list[Floats] = []
    for way in ("forward", "backward"):
        vision, llm = (getattr(COSTS.by_name[name], way)() for name in ("vision", LLM))
        fixed = vision.fixed * (batch.units["vision"].tokens > 0)
        rows = [vision.of(batch.units["vision"]) + fixed, *[(llm.of(batch.units[LLM]) + llm.fixed) / 4] * 4]
        times.append(np.stack(rows))
    if max((batch.units[name].tokens * each.parts.max()).max() for name, each in budget.units.items()) > 1:
        with pytest.raises(ValueError, match=r"^tokens of sample \d+ in '\w+' must be <= "):
            planner.assign(job, configuration, batch, replicas)
        return
    place = planner.assign(job, configuration, batch, replicas).units[LLM].microbatch
    if len(set(place.tolist())) < 20:
        return  # no order of the microbatches that samples come in was found
    found, needs = np.argsort(place), budget.needs(batch, np.arange(20), 20)
    own, others = planner.order(*times), (np.arange(20), fill_intervals(*times))
    if published and order_fits(own, needs, budget.windows):
        others = ()  # it is taken as published, even where no order at all is faster
    for order in (own, *others):
        if order_fits(order, needs, budget.windows):
            assert order_fits(found, needs, budget.windows)
            assert pipeline_ms(found, *times) <= pipeline_ms(order, *times) * (1 + 1e-6)


def test_microbatches_that_fit_are_ordered() -> None:
    """All but a batch whose longest sample is too long for a stage: the property above has something to look at."""
    stages = {"vision": Parallelism(dp=1, pp=1, stage_layers=(4,)), LLM: Parallelism(dp=1, pp=4, stage_layers=(2,) * 4)}
    configuration, job = Configuration(units=stages, num_microbatches=20), setting(1_000_000)
    refused: list[str] = []
    for seed in range(40):
        try:
            found = DistTrain().assign(job, configuration, table(20, seed), [Replica(num_microbatches=20)])
        except ValueError as error:
            refused.append(str(error))
        else:
            assert len(set(found.units[LLM].microbatch.tolist())) == 20
    assert len(refused) <= 1
    assert all(message.startswith("tokens of sample ") for message in refused)


@pytest.mark.parametrize("seed", range(3))
def test_memory_that_is_a_little_short_costs_little(seed: int) -> None:
    """Fewer large microbatches are in a row then. Where they are all apart, each of them is waited for."""
    stages = {
        "vision": Parallelism(dp=1, pp=2, stage_layers=(2, 2)),
        LLM: Parallelism(dp=1, pp=4, stage_layers=(2, 2, 2, 2)),
    }
    found, replicas = Configuration(units=stages, num_microbatches=64), [Replica(num_microbatches=64)]

    def result(job: Setting, assignment: Assignment) -> Result:
        return evaluate(job, found, assignment, batch, replicas)

    batch = table(64, seed)
    free = result(setting(), DistTrain().assign(setting(), found, batch, replicas))
    job = setting(int(0.9 * free.peak_bytes))
    held = result(job, DistTrain().assign(job, found, batch, replicas))
    budget = MemoryBudget.of(job, found)
    assert budget is not None
    place = Place(replica=np.zeros(64, np.int64), microbatch=budget.even(batch, 64))
    apart = result(job, Assignment(units=dict.fromkeys(stages, place)))
    assert held.peak_bytes <= 0.9 * free.peak_bytes
    assert held.iteration_ms <= 1.1 * free.iteration_ms
    assert apart.iteration_ms >= 1.5 * free.iteration_ms


def test_memory_holds_what_the_order_puts_in_a_row() -> None:
    peaks: list[float] = []
    for memory in (800_000, 1_200_000, 1_600_000):
        job = setting(memory)
        found = DistTrain().configure(job, table(1000))
        replicas = [Replica(num_microbatches=found.num_microbatches)] * found.units[LLM].dp
        for seed in range(4):
            batch = table(32, seed)
            held = DistTrain().assign(job, found, batch, replicas)
            free = DistTrain().assign(setting(), found, batch, replicas)
            assert evaluate(job, found, held, batch, replicas).peak_bytes <= memory
            peaks.append(evaluate(job, found, free, batch, replicas).peak_bytes / memory)
    assert min(peaks) < 1 < max(peaks)


@pytest.mark.parametrize("slow", ["vision", LLM])
def test_samples_are_spread_by_corrected_times(slow: str) -> None:
    """In truth long samples take a unit twice as long; a second table is the truth."""

    def true(batch: SampleTable) -> SampleTable:
        each = batch.units[slow]
        factor = np.where(each.longest >= 256, 2, 1)
        doubled = Lengths(tokens=each.tokens * factor, squares=each.squares * factor, longest=each.longest)
        return SampleTable(units={**batch.units, slow: doubled})

    def true_ms(name: str, batch: SampleTable) -> Floats:
        return job.costs.by_name[name].work(found.units[name].tp).of(batch.units[name])

    planner, job = DistTrain(), setting()
    found = planner.configure(job, table(50))
    replicas = [Replica(num_microbatches=3, speed=speed) for speed in (1.0, 1.0, 0.75, 1.0, 0.5)]
    learnt = UNCORRECTED
    for seed in range(5):
        batch = table(64, seed)
        ms = zip(true_ms(slow, batch).tolist(), true_ms(slow, true(batch)).tolist(), strict=True)
        calls = zip(batch.units[slow].longest.tolist(), ms, strict=True)
        tp = found.units[slow].tp
        learnt = learnt.observe(
            [
                Observation(unit=slow, tp=tp, tokens=tokens, predicted_ms=one, actual_ms=other)
                for tokens, (one, other) in calls
                if tokens
            ]
        )
    for seed in range(5, 10):
        batch, last_ms = table(96, seed), list[float]()
        for correction in (learnt, UNCORRECTED):
            places = planner.assign(replace(job, correction=correction), found, batch, replicas).units[LLM]
            work = sum(true_ms(name, true(batch)) * found.units[LLM].dp / each.dp for name, each in found.units.items())
            done = np.bincount(places.replica, work, len(replicas)) / [each.speed for each in replicas]
            last_ms.append(float(done.max()))
        assert last_ms[0] < last_ms[1]
