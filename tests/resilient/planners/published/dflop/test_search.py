"""DFLOP's configurations: the best of all splits by its formulas, and of the best of them the fastest in simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import known_batches, simulated
from resilient.planners.packing.balance import cut_chain
from resilient.planners.planner import Parallelism, Setting
from resilient.planners.published.dflop.planner import Dflop
from resilient.planners.published.dflop.search import dflop_configurations
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.stage_work import by_stage, gradient_sum_ms, state_bytes
from resilient.templates.common.arrays import Ints
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import setting, table, unit

SMALL = CostModel(units=(unit("vision", 2, 0.001, 1e-6), unit("llm", 3, 0.002, 1e-6)))
THREE = CostModel(units=(*SMALL.units, unit("generator", 2, 0.003, 0.0)))
TWO_ENCODERS = CostModel(units=(unit("audio", 2, 0.002, 0.0), *SMALL.units))


def heavy(count: int, seed: int) -> SampleTable:
    """Samples of which few have most of the tokens."""
    vision = np.random.default_rng((count, seed)).lognormal(5, 1, count).astype(np.int64) + 1
    return SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(vision + 50)})


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

    def _lane(self, name: str, tp: int, lanes: int, samples: float) -> float:
        """Mean samples that take as long as those of the fullest lane, over microbatches of so many samples.

        It has an even share or the longest sample of a microbatch, which are those that are longest of all.
        """
        if lanes == 1:
            return samples
        times = np.sort(self.job.costs.by_name[name].work(tp).of(self.samples.units[name]))[::-1]
        if not times.any():
            return samples / lanes
        # As many of the longest as there are microbatches in so many samples; of the last one a part.
        counted = np.clip(len(times) / samples - np.arange(len(times)), 0, 1)
        return float(np.average(np.maximum(times / times.mean(), samples / lanes), weights=counted))

    def is_of_use(self, name: str, at: Parallelism) -> bool:
        """Whether the slowest stage is faster, or needs less memory, than with fewer stages."""
        one, *others = (self._largest(name, at.tp, pp) for pp in range(at.pp, 0, -1))
        return not others or any(now < min(before) for now, before in zip(one, zip(*others, strict=True), strict=True))

    def _largest(self, name: str, tp: int, pp: int) -> tuple[float, ...]:
        slowest, _, _, per_token = self.stages(name, tp, pp, 1)
        layers = self.job.costs.by_name[name].layers
        cut = cut_chain([1.0] * len(layers), pp)
        return slowest, max(cut), per_token

    def __call__(self, spread: Mapping[str, Parallelism], count: int) -> tuple[float, float]:
        names, replicas = list(spread), spread[LLM].dp
        encoders, others = names[: names.index(LLM)], names[names.index(LLM) :]
        depth = max(spread[name].pp for name in encoders) + sum(spread[name].pp for name in others)
        slowest, sums, memory, stretch = 0.0, 0.0, 0.0, 1.0
        limit = self.job.cluster.memory_bytes or np.inf
        longest: dict[str, float] = {}
        for name, at in spread.items():
            lengths, fixed = self.samples.units[name], self.job.costs.by_name[name].work(at.tp).fixed
            lanes, alone = max(1, at.dp // replicas), -(-replicas // at.dp)
            samples = self.job.global_batch / (count * replicas)
            number = samples * alone / lanes
            stage_ms, sum_ms, state, per_token = self.stages(name, at.tp, at.pp, at.dp)
            whole = self._lane(name, at.tp, lanes, samples) * alone
            slowest, sums = max(slowest, whole * stage_ms + fixed / at.pp), max(sums, sum_ms)
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
    options = [
        [each for each in ways if by_hand.is_of_use(name, each)]
        for name, ways in zip(samples.units, options, strict=True)
    ]
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
    candidates = dflop_configurations(job, samples)
    for each in candidates:
        ms, used = by_hand(each.units, each.num_microbatches)
        assert each.predicted_ms == pytest.approx(ms, rel=1e-6)
        assert memory is None or used <= memory * (1 + 1e-9)
    found = candidates[0]
    assert found.predicted_ms == pytest.approx(min(fitting), rel=1e-6)
    assert sum(each.num_devices for each in found.units.values()) <= job.num_devices
    for each in costs.units:
        assert sum(found.units[each.name].stage_layers) == len(each.layers)
        assert len(found.units[each.name].stage_layers) == found.units[each.name].pp
    assert candidates == dflop_configurations(job, samples)


def test_a_long_sample_takes_more_devices_for_each_replica() -> None:
    job = replace(setting(), cluster=Cluster(devices_per_node=2, memory_bytes=None))
    even = np.full(1000, 200)
    tail = even.copy()
    tail[::50] = 8000

    def replicas(lengths: Ints) -> int:
        samples = SampleTable(units={name: Lengths.of(lengths) for name in ("vision", "llm")})
        return dflop_configurations(job, samples)[0].units[LLM].dp

    assert replicas(tail) < replicas(even)


@pytest.mark.parametrize("memory", [900_000, 1_500_000])
def test_heavy_tails_fit_and_take_no_longer_than_predicted(memory: int) -> None:
    job, known = replace(setting(memory), global_batch=256), heavy(2000, 0)
    found = dflop_configurations(job, known)[0]
    assert found.predicted_ms == pytest.approx(ByHand(job, known)(found.units, found.num_microbatches)[0], rel=1e-6)
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


def test_the_fastest_of_the_best_expected_is_chosen() -> None:
    job, known = replace(setting(), global_batch=64), heavy(2000, 3)
    candidates = dflop_configurations(job, known)
    taken: list[float] = []
    for each in candidates[:8]:
        results = list(simulated(Dflop(), job, each, known_batches(job, known, 2)))
        taken.append(sum(result.iteration_ms for result in results) / 2)
    assert taken.index(min(taken)) > 0
    found = Dflop().configure(job, known)
    assert found.units == candidates[taken.index(min(taken))].units
    assert found.predicted_ms == pytest.approx(min(taken))


def test_samples_stay_whole_on_lanes_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pictures are large: more lanes beside them have less to do, and even shares of all lanes are too little."""
    costs = CostModel(units=(unit("vision", 1, 0.08, 0.0), unit(LLM, 8, 0.002, 0.0)))
    cluster = Cluster(devices_per_node=8, memory_bytes=None)
    job = Setting(costs=costs, cluster=cluster, num_nodes=2, global_batch=64, microbatch=1)
    vision = np.full(2000, 10)
    vision[::8] = 4000
    samples = SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(np.full(2000, 800))})
    found = dflop_configurations(job, samples)[0]
    results = list(simulated(Dflop(), job, found, known_batches(job, samples, 4)))
    assert np.mean([result.iteration_ms for result in results]) < found.predicted_ms
    monkeypatch.setattr("resilient.planners.published.dflop.search._SLACK", 3.0)
    candidates, by_hand = dflop_configurations(job, samples), ByHand(job, samples)
    assert any(each.units["vision"].dp > each.units[LLM].dp for each in candidates)
    for each in candidates:
        assert each.predicted_ms == pytest.approx(by_hand(each.units, each.num_microbatches)[0], rel=1e-6)
