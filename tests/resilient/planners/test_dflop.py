"""DFLOP: the best of all splits by the paper's formula, and even microbatches on any replicas."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs_of_planners import after_failures, check_places, setting, table, unit

from resilient.planners.balance import cut_chain, longest_first
from resilient.planners.buckets import peak
from resilient.planners.costs import CostModel
from resilient.planners.dflop import Dflop, stage_weights
from resilient.planners.planner import LLM, Parallelism, Replica, Setting
from resilient.planners.samples import Lengths, SampleTable
from resilient.planners.slots import slots
from resilient.planners.stage_work import by_stage, gradient_sum_ms, state_bytes
from resilient.templates.cluster import Cluster, Link

SMALL = CostModel(units=(unit("vision", 2, 0.001, 1e-6), unit("llm", 3, 0.002, 1e-6)))
THREE = CostModel(units=(*SMALL.units, unit("generator", 2, 0.003, 0.0)))


def by_hand(job: Setting, samples: SampleTable, spread: dict[str, Parallelism], count: int) -> tuple[float, float]:
    """The step's time and the most memory of a device, by the formulas of the module's docstring."""
    depth, replicas = sum(each.pp for each in spread.values()), spread[LLM].dp
    slowest, longest, sums, memory, behind = 0.0, 0.0, 0.0, 0.0, depth
    for each in job.costs.units:
        at, lengths = spread[each.name], samples.units[each.name]
        number, alone = job.global_batch / (count * at.dp), max(1.0, replicas / at.dp)
        index = each.index(at.tp, 1)
        times = each.work(at.tp).of(lengths)
        layers = [
            float((layer.curves[index].forward + layer.backward(index)).of(lengths).mean()) for layer in each.layers
        ]
        at = replace(at, stage_layers=cut_chain(layers, at.pp))
        slowest = max(slowest, number * by_stage(at, layers).max() + each.work(at.tp).fixed / at.pp)
        # Of the longest of so many samples drawn, the chance that it is no longer than the k-th.
        chances = [(k / len(times)) ** job.global_batch for k in range(len(times) + 1)]
        drawn = sum(ms * (chances[k + 1] - chances[k]) for k, ms in enumerate(sorted(times.tolist())))
        longest += (drawn + each.work(at.tp).fixed) * alone
        sums = max(sums, gradient_sum_ms(each, at, job.cluster).max())
        per_token = by_stage(at, [layer.curves[index].activation_bytes for layer in each.layers]).max()
        mean, largest = number * float(lengths.tokens.mean()), float(lengths.tokens.max()) * alone
        kept = (mean * (behind - 1) + max(mean, largest)) * per_token
        memory = max(memory, state_bytes(each, at, sharded=False).max() + kept)
        behind -= at.pp
    return (count - 1) * slowest + max(depth * slowest, longest) + sums, memory


@settings(max_examples=20, deadline=None)
@given(
    costs=st.sampled_from([SMALL, THREE]),
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
    fitting: list[float] = []
    for way in product(*options):
        if sum(each.num_devices for each in way) <= job.num_devices:
            spread = dict(zip(samples.units, way, strict=True))
            replicas = spread[LLM].dp
            for count in {batch // (number * replicas) for number in range(1, batch // replicas + 1)}:
                if count * max(each.dp for each in way) > batch:
                    continue
                ms, used = by_hand(job, samples, spread, count)
                if memory is None or used <= memory:
                    fitting.append(ms)
    if not fitting:
        with pytest.raises(ValueError, match=r"^num_nodes must be enough for the model's units side by side, got "):
            Dflop().configure(job, samples)
        return
    found = Dflop().configure(job, samples)
    ms, used = by_hand(job, samples, dict(found.units), found.num_microbatches)
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
        "num_nodes must be enough for the model's units side by side, got 8 of 2 devices; use more, or larger ones"
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
