"""DFLOP: the best of all splits by the paper's formula, and even microbatches on any replicas."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.common.extras import MissingPackageError
from resilient.planners.costs.correction import UNCORRECTED, Observation
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import cut_chain, longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Configuration, Parallelism, Place, Replica, Setting
from resilient.planners.published.dflop.planner import Dflop, stage_weights
from resilient.planners.published.dflop.vector_packing import peak
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_budget import MemoryBudget
from resilient.planners.stages.stage_work import by_stage, gradient_sum_ms, state_bytes
from resilient.templates.common.arrays import Ints
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import COSTS, after_failures, check_places, learnt, setting, table, unit

SMALL = CostModel(units=(unit("vision", 2, 0.001, 1e-6), unit("llm", 3, 0.002, 1e-6)))
THREE = CostModel(units=(*SMALL.units, unit("generator", 2, 0.003, 0.0)))
TWO_ENCODERS = CostModel(units=(unit("audio", 2, 0.002, 0.0), *SMALL.units))


def heavy(count: int, seed: int) -> SampleTable:
    """Samples of which few have most of the tokens."""
    vision = np.random.default_rng((count, seed)).lognormal(5, 1, count).astype(np.int64) + 1
    return SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision + 50)})


def used(job: Setting, found: Configuration, batch: SampleTable, place: Place, replicas: Sequence[Replica]) -> float:
    """The largest part that is used of what a stage of any replica has left."""
    most = 0.0
    for number, (each, budget) in enumerate(zip(replicas, MemoryBudget.of_each(job, found, replicas), strict=True)):
        assert budget is not None
        own = np.flatnonzero(place.replica == number)
        microbatch = place.microbatch[own]
        most = max(most, budget.used(batch[own], microbatch, microbatch, each.num_microbatches))
    return most


class ByHand:
    """The step's time and the most memory of a device, by the formulas of the module's docstring."""

    def __init__(self, job: Setting, samples: SampleTable) -> None:
        self.job, self.samples = job, samples
        self.stages, self.longest_ms = cache(self._stages), cache(self._longest_ms)

    def _stages(self, name: str, tp: int, pp: int, dp: int) -> tuple[float, float, float, float]:
        """Time of a sample, sums of gradients, state and bytes per token, each of the stage where it is most."""
        unit, lengths = self.job.costs.by_name[name], self.samples.units[name]
        index = unit.index(tp, 1)
        layers = [
            float((layer.curves[index].forward + layer.backward(index)).of(lengths).mean()) for layer in unit.layers
        ]
        at = Parallelism(dp=dp, pp=pp, tp=tp, stage_layers=cut_chain(layers, pp))
        values = (
            by_stage(at, layers),
            gradient_sum_ms(unit, at, self.job.cluster),
            state_bytes(self.job, unit, at),
            by_stage(at, [layer.curves[index].activation_bytes for layer in unit.layers]),
        )
        slowest, sums, state, per_token = (float(each.max()) for each in values)
        return slowest, sums, state, per_token

    def _longest_ms(self, name: str, tp: int) -> float:
        """Of the longest of so many samples drawn, the chance that it is no longer than the k-th tells the mean."""
        times = sorted(self.job.costs.by_name[name].work(tp).of(self.samples.units[name]).tolist())
        chances = [(k / len(times)) ** self.job.global_batch for k in range(len(times) + 1)]
        return sum(ms * (chances[k + 1] - chances[k]) for k, ms in enumerate(times))

    def _stretch(self, name: str, tp: int, limit: float) -> float:
        """By how much samples take longer of whose tokens no more than the limit pass all stages at a time."""
        lengths = self.samples.units[name]
        times = self.job.costs.by_name[name].work(tp).of(lengths)
        return float(np.dot(times, np.maximum(lengths.tokens / limit, 1)) / times.sum())

    def __call__(self, spread: Mapping[str, Parallelism], count: int) -> tuple[float, float]:
        names, replicas = list(spread), spread[LLM].dp
        encoders, others = names[: names.index(LLM)], names[names.index(LLM) :]
        depth = max(spread[name].pp for name in encoders) + sum(spread[name].pp for name in others)
        slowest, sums, memory, stretch = 0.0, 0.0, 0.0, 1.0
        limit = self.job.cluster.memory_bytes or np.inf
        longest: dict[str, float] = {}
        for name, at in spread.items():
            lengths, fixed = self.samples.units[name], self.job.costs.by_name[name].work(at.tp).fixed
            number, alone = self.job.global_batch / (count * at.dp), max(1.0, replicas / at.dp)
            stage_ms, sum_ms, state, per_token = self.stages(name, at.tp, at.pp, at.dp)
            slowest, sums = max(slowest, number * stage_ms + fixed / at.pp), max(sums, sum_ms)
            longest[name] = (self.longest_ms(name, at.tp) + fixed) * alone
            # Two standard deviations more than the mean.
            most = float(lengths.tokens.mean()) + 2 * float(lengths.tokens.std()) / self.job.global_batch**0.5
            mean, largest = number * most, float(lengths.tokens.max()) * alone
            after = others if name in encoders else others[others.index(name) + 1 :]
            behind = at.pp + sum(spread[each].pp for each in after)
            memory = max(memory, state + (mean * (behind - 1) + max(mean, largest)) * per_token)
            if state < limit:
                stretch = max(stretch, self._stretch(name, at.tp, (limit - state) / (behind * per_token * alone)))
        through = max(longest[name] for name in encoders) + sum(longest[name] for name in others)
        return (count - 1) * stretch * slowest + max(depth * slowest, through) + sums, memory


@settings(max_examples=20, deadline=None)
@given(
    costs=st.sampled_from([SMALL, THREE, TWO_ENCODERS]),
    num_nodes=st.integers(2, 3),
    batch=st.integers(1, 9),
    memory=st.none() | st.integers(60_000, 400_000),
    seed=st.integers(0, 5),
)
def test_no_split_is_better(costs: CostModel, num_nodes: int, batch: int, memory: int | None, seed: int) -> None:
    job = Setting(
        costs=costs,
        cluster=Cluster(
            devices_per_node=2, memory_bytes=memory, intra_node=Link(bytes_per_s=1e8), inter_node=Link(bytes_per_s=1e7)
        ),
        num_nodes=num_nodes,
        global_batch=batch,
        microbatch=1,
    )
    of = table(30, seed)
    samples = SampleTable(units={each.name: of.units["llm" if each.name == LLM else "vision"] for each in costs.units})
    options = [
        [
            Parallelism(dp=dp, pp=pp, tp=tp)
            for dp in range(1, batch + 1)
            for pp in range(1, len(each.layers) + 1)
            for tp in (1, 2)
            if dp * pp * tp <= job.num_devices
        ]
        for each in costs.units
    ]
    by_hand = ByHand(job, samples)
    fitting: list[float] = []
    for way in product(*options):
        if sum(each.num_devices for each in way) <= job.num_devices:
            spread = dict(zip(samples.units, way, strict=True))
            replicas = spread[LLM].dp
            for count in {batch // (number * replicas) for number in range(1, batch // replicas + 1)}:
                if count * max(each.dp for each in way) > batch:
                    continue
                ms, used = by_hand(spread, count)
                if memory is None or used <= memory:
                    fitting.append(ms)
    if not fitting:
        with pytest.raises(ValueError, match=r"^num_nodes must be enough for 'dflop', got "):
            Dflop().configure(job, samples)
        return
    found = Dflop().configure(job, samples)
    ms, used = by_hand(found.units, found.num_microbatches)
    assert found.predicted_ms == pytest.approx(ms, rel=1e-6)
    assert ms == pytest.approx(min(fitting), rel=1e-6)
    assert memory is None or used <= memory * (1 + 1e-9)
    assert sum(each.num_devices for each in found.units.values()) <= job.num_devices
    for each in costs.units:
        assert sum(found.units[each.name].stage_layers) == len(each.layers)
        assert len(found.units[each.name].stage_layers) == found.units[each.name].pp
    assert found == Dflop().configure(job, samples)


def test_a_model_that_does_not_fit_is_refused() -> None:
    message = (
        "num_nodes must be enough for 'dflop', got 8 of 2 devices; use more nodes, a smaller microbatch, or another "
        "planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Dflop().configure(setting(memory_bytes=1000), table(50))


@settings(max_examples=25, deadline=None)
@given(after_failures(), st.integers(0, 60), st.integers(0, 100))
def test_places_on_the_replicas_that_failures_leave(replicas: list[Replica], count: int, seed: int) -> None:
    planner, job = Dflop(), setting()
    found = planner.configure(job, table(50))
    batch = table(count, seed)
    assignment = planner.assign(job, found, batch, replicas)
    check_places(assignment, planner.assign(job, found, batch, replicas), count, replicas)
    _, microbatch, speeds = slots(replicas)
    first = np.flatnonzero(microbatch == 0)
    weights = stage_weights(job, found, batch)
    place = assignment.units[LLM]
    reached = peak(weights, first[place.replica] + place.microbatch, speeds)
    longest = longest_first(np.rint(weights.max(axis=0) * 1e6), speeds)
    assert reached <= peak(weights, longest, speeds) * (1 + 1e-6)


def test_a_replica_with_half_the_speed_and_half_the_microbatches_has_half_the_work() -> None:
    job = setting()
    found = Dflop().configure(job, table(50))
    draw = np.random.default_rng(0)
    batch = SampleTable(units={name: Lengths.of(draw.integers(50, 500, 400)) for name in found.units})
    replicas = [Replica(num_microbatches=8), Replica(num_microbatches=4, speed=0.5)]
    place = Dflop().assign(job, found, batch, replicas).units[LLM]
    weights = stage_weights(job, found, batch)
    work = weights[weights.sum(axis=1).argmax()]
    fast, slow = np.bincount(place.replica, work)
    assert fast / slow == pytest.approx(2, rel=0.02)


def test_processes_agree_unless_a_limit_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    job, batch, replicas = setting(), table(20), [Replica(num_microbatches=4)]
    found = Dflop().configure(job, table(50))
    Dflop().assign(job, found, batch, replicas)
    with pytest.raises(MissingPackageError, match=r"^Dflop\(time_limit_s=\.\.\.\) needs highspy, "):
        Dflop(time_limit_s=60).assign(job, found, batch, replicas)


@settings(max_examples=20, deadline=None)
@given(memory=st.integers(300_000, 1_000_000), seed=st.integers(0, 20), lost=st.integers(0, 4))
def test_what_fits_is_within_memory_in_the_simulation(memory: int, seed: int, lost: int) -> None:
    job, known = setting(memory), table(64, seed)
    try:
        found = Dflop().configure(job, known)
        replicas = degraded_replicas(job, found, lost)
    except ValueError:
        return
    batch = table(32, seed)
    try:
        assignment = Dflop().assign(job, found, batch, replicas)
    except ValueError:
        return  # a sample does not fit alone
    check_places(assignment, Dflop().assign(job, found, batch, replicas), 32, list(replicas))
    if used(job, found, batch, assignment.units[LLM], replicas) <= 1:
        assert evaluate(job, found, assignment, batch, replicas).peak_bytes <= memory + 1


def test_jobs_that_fit_are_not_refused() -> None:
    """With 800 kB devices every job fits, and every batch but those in which a sample does not fit alone."""
    batches = [(table(64, seed), table(32, seed)) for seed in range(21)]
    job, refused = setting(800_000), list[str]()
    for known, batch in batches:
        found = Dflop().configure(job, known)
        try:
            Dflop().assign(job, found, batch, degraded_replicas(job, found, 2))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) <= 3
    assert all(message.startswith("tokens of sample ") for message in refused)


def test_large_microbatches_are_kept_apart_where_memory_is_short() -> None:
    units = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        "llm": Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=6)
    lengths = {"vision": np.zeros(6, dtype=np.int64), "llm": np.array([1000, 1000, 1000, 100, 100, 100])}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    replicas = [Replica(num_microbatches=6)]
    # A stage of four layers holds two microbatches: room for 1500 tokens of them beside its state.
    large, short = setting(4 * 16_000 + 4 * 100 * 2100), setting(4 * 16_000 + 4 * 100 * 1500)
    place = Dflop().assign(large, found, batch, replicas).units[LLM]
    assert used(large, found, batch, place, replicas) == pytest.approx(2000 / 2100)
    place = Dflop().assign(short, found, batch, replicas).units[LLM]
    assert used(short, found, batch, place, replicas) == pytest.approx(1100 / 1500)
    assert place.microbatch.tolist() == [0, 2, 4, 1, 3, 5]


def test_a_sample_that_needs_all_the_room_is_next_to_empty_microbatches() -> None:
    units = {
        "vision": Parallelism(dp=1, pp=1, stage_layers=(4,)),
        "llm": Parallelism(dp=1, pp=2, stage_layers=(4, 4)),
    }
    found = Configuration(units=units, num_microbatches=6)
    lengths = {"vision": np.zeros(11, dtype=np.int64), "llm": np.array([1400, *[200] * 10])}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    # A stage of four layers holds two microbatches: room for 1500 tokens of them beside its state.
    job, replicas = setting(4 * 16_000 + 4 * 100 * 1500), [Replica(num_microbatches=6)]
    assignment = Dflop().assign(job, found, batch, replicas)
    assert evaluate(job, found, assignment, batch, replicas).peak_bytes <= 4 * 16_000 + 4 * 100 * 1500
    assert set(assignment.units[LLM].microbatch.tolist()) == {0, 2, 3, 4, 5}


TRUTH = CostModel(units=(unit("vision", 4, 0.0003, 1e-6), unit("llm", 8, 0.002, 3e-5)))


def true_peak(job: Setting, found: Configuration, batch: SampleTable, replicas: list[Replica], planner: Dflop) -> float:
    """What the slowest microbatch truly takes, of the job as it is known."""
    _, microbatch, speeds = slots(replicas)
    place = planner.assign(job, found, batch, replicas).units[LLM]
    bucket = np.flatnonzero(microbatch == 0)[place.replica] + place.microbatch
    return peak(stage_weights(replace(job, costs=TRUTH, correction=UNCORRECTED), found, batch), bucket, speeds)


def test_measured_times_level_what_costs_have_wrong() -> None:
    job = setting()
    found = Dflop().configure(job, table(50))
    corrected = learnt(job, TRUTH, found)
    replicas = [Replica(num_microbatches=5), Replica(num_microbatches=3, speed=0.7)]
    before, after = (
        np.array([true_peak(at, found, table(60, seed), replicas, Dflop()) for seed in range(10)])
        for at in (job, corrected)
    )
    assert (after <= before * 1.005).all()
    assert after.mean() < 0.95 * before.mean()


@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 7), seed=st.integers(0, 99), speed=st.sampled_from([1.0, 0.5]))
def test_the_best_buckets_of_corrected_times_are_truly_no_slower(count: int, seed: int, speed: float) -> None:
    # Lengths at which the factors were learnt exactly: one in each bucket.
    draw = np.random.default_rng((count, seed))
    lengths = {name: np.rint(2 ** draw.integers(4, 12, count).astype(float)).astype(np.int64) for name in COSTS.by_name}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    job = setting()
    found = Dflop().configure(job, table(50))
    seen = [
        Observation(unit=name, tp=spread.tp, tokens=int(length), predicted_ms=before, actual_ms=after)
        for name, spread in found.units.items()
        for length, before, after in zip(
            lengths[name],
            COSTS.by_name[name].work(spread.tp).of(batch.units[name]).tolist(),
            TRUTH.by_name[name].work(spread.tp).of(batch.units[name]).tolist(),
            strict=True,
        )
    ]
    corrected = replace(job, correction=UNCORRECTED.observe(seen))
    replicas = [Replica(num_microbatches=2), Replica(num_microbatches=1, speed=speed)]
    before, after = (true_peak(at, found, batch, replicas, Dflop(time_limit_s=60)) for at in (job, corrected))
    assert after <= before * (1 + 2e-6)


def test_a_long_sample_takes_more_devices_for_each_replica() -> None:
    job = replace(setting(), cluster=Cluster(devices_per_node=2, memory_bytes=None))
    even = np.full(1000, 200)
    tail = even.copy()
    tail[::50] = 8000

    def replicas(lengths: Ints) -> int:
        samples = SampleTable(units={name: Lengths.of(lengths) for name in ("vision", "llm")})
        return Dflop().configure(job, samples).units[LLM].dp

    assert replicas(tail) < replicas(even)


@pytest.mark.parametrize("memory", [900_000, 1_500_000])
def test_heavy_tails_fit_and_take_no_longer_than_predicted(memory: int) -> None:
    job, known = replace(setting(memory), global_batch=256), heavy(2000, 0)
    found = Dflop().configure(job, known)
    assert found.predicted_ms == pytest.approx(ByHand(job, known)(found.units, found.num_microbatches)[0])
    # Memory does not hold the largest samples on all stages at a time.
    free = ByHand(replace(setting(), global_batch=256), known)
    assert found.predicted_ms > 1.05 * free(found.units, found.num_microbatches)[0]
    replicas = degraded_replicas(job, found, 0)
    taken: list[float] = []
    for seed in range(1, 6):
        batch = heavy(256, seed)
        result = evaluate(job, found, Dflop().assign(job, found, batch, replicas), batch, replicas)
        assert result.peak_bytes <= memory
        taken.append(result.iteration_ms / found.predicted_ms)
    assert 0.6 < np.mean(taken) < 1


def test_replicas_that_are_alike_deal_out_long_microbatches() -> None:
    units = {name: Parallelism(dp=2, pp=1, stage_layers=(count,)) for name, count in (("vision", 4), (LLM, 8))}
    lengths = np.array([4000, 3900, 3800, 3700, 50, 50, 50, 50])
    batch = SampleTable(units={name: Lengths.of(lengths) for name in units})
    found = Configuration(units=units, num_microbatches=4)
    place = Dflop().assign(setting(), found, batch, [Replica(num_microbatches=4)] * 2).units[LLM]
    assert sorted(place.replica[[0, 3]].tolist() + place.replica[[1, 2]].tolist()) == [0, 0, 1, 1]
    assert place.replica[0] == place.replica[3]
    assert place.microbatch.tolist()[:4] == [0, 0, 1, 1]
