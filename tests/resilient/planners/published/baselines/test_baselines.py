"""Planners to compare with: random order, FSDP, DIP and static context parallelism; for uniform see beside."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Parallelism, Planner, Replica, Setting
from resilient.planners.published.baselines.balanced import (
    EncoderFirst,
    FullySharded,
    RandomOrder,
    StaticContext,
)
from resilient.planners.published.baselines.mean_microbatch import Stages, in_order
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import unit

PREDICTED: tuple[Planner, ...] = (FullySharded(), EncoderFirst(), StaticContext())
PLANNERS: tuple[Planner, ...] = (Uniform(), RandomOrder(), *PREDICTED)
REPLICAS = st.lists(st.builds(Replica, num_microbatches=st.integers(1, 5), speed=st.floats(0.2, 1)), min_size=1)


COSTS = CostModel(units=(unit("vision", 4, 0.001, 0.0), unit("llm", 8, 0.002, 0.0)))
SETTING = Setting(costs=COSTS, cluster=Cluster(devices_per_node=2), num_nodes=4, global_batch=32, microbatch=2)


def table(count: int) -> SampleTable:
    draw = np.random.default_rng(count)
    return SampleTable(
        units={
            "vision": Lengths.of(draw.integers(0, 900, count)),
            "llm": Lengths.of(draw.integers(10, 2000, count)),
        }
    )


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 40), replicas=REPLICAS, planner=st.sampled_from(PLANNERS))
def test_every_sample_has_one_place_on_any_replicas(count: int, replicas: list[Replica], planner: Planner) -> None:
    configuration = planner.configure(SETTING, table(50))
    batch = table(count)
    assignment = planner.assign(SETTING, configuration, batch, replicas)
    again = planner.assign(SETTING, configuration, batch, replicas)
    assert set(assignment.units) == {"vision", "llm"}
    total = sum(each.num_microbatches for each in replicas)
    for name, place in assignment.units.items():
        np.testing.assert_array_equal(place.replica, again.units[name].replica)
        np.testing.assert_array_equal(place.microbatch, again.units[name].microbatch)
        members = [
            assignment.members(name, index, microbatch)
            for index, each in enumerate(replicas)
            for microbatch in range(each.num_microbatches)
        ]
        assert sorted(np.concatenate(members).tolist()) == list(range(count))
        sizes = [len(each) for each in members]
        assert max(sizes) <= -(-count // total)
        assert min(sizes) >= count // total


def test_samples_are_taken_as_they_come() -> None:
    place = in_order(7, [Replica(num_microbatches=1), Replica(num_microbatches=2, speed=0.5)])
    assert place.replica.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert place.microbatch.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_random_order_is_one_of_all_samples_and_goes_by_its_seed() -> None:
    replicas = [Replica(num_microbatches=4)] * 2
    configuration = Uniform().configure(SETTING, table(50))
    first, second = (
        RandomOrder(seed=seed).assign(SETTING, configuration, table(32), replicas).units["llm"] for seed in (0, 1)
    )
    plain = in_order(32, replicas)
    for place in (first, second):
        assert sorted(zip(place.replica.tolist(), place.microbatch.tolist(), strict=True)) == sorted(
            zip(plain.replica.tolist(), plain.microbatch.tolist(), strict=True)
        )
    assert first.microbatch.tolist() != second.microbatch.tolist()
    assert first.microbatch.tolist() != plain.microbatch.tolist()


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_configurations_use_the_devices_there_are_and_all_layers(planner: Planner) -> None:
    for num_nodes in (1, 2, 3, 7):
        setting = replace(SETTING, num_nodes=num_nodes)
        configuration = planner.configure(setting, table(50))
        used = [spread.num_devices for spread in configuration.units.values()]
        assert (max(used) if configuration.colocated else sum(used)) <= setting.num_devices
        for name, spread in configuration.units.items():
            assert len(spread.stage_layers) == spread.pp
            assert sum(spread.stage_layers) == len(COSTS.by_name[name].layers)
        dp = configuration.units["llm"].dp
        if planner in PREDICTED:
            assert (configuration.num_microbatches - 1) * dp * 2 < 32 <= configuration.num_microbatches * dp * 2
        assert configuration.predicted_ms > 0
        assert configuration == planner.configure(setting, table(50))


@pytest.mark.parametrize("planner", PREDICTED, ids=lambda planner: planner.name)
def test_less_memory_never_makes_a_step_faster_and_none_is_an_error(planner: Planner) -> None:
    def configured(memory_bytes: int | None) -> float:
        setting = replace(SETTING, cluster=Cluster(devices_per_node=2, memory_bytes=memory_bytes))
        return planner.configure(setting, table(50)).predicted_ms

    # The least memory that will do, to a factor of two
    least = next(memory for memory in (2**power for power in range(12, 40)) if _fits(configured, memory))
    times = [configured(None), *(configured(least * 2**power) for power in (3, 2, 1, 0))]
    assert times == sorted(times)
    message = (
        f"num_nodes must be enough for {planner.name!r}, got 4 of 2 devices; "
        f"use more nodes, a smaller microbatch, or another planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        configured(least // 2)


@pytest.mark.parametrize("planner", [*PLANNERS, Cornstarch()], ids=lambda planner: planner.name)
def test_memory_holds_samples_longer_than_the_mean(planner: Planner) -> None:
    samples, peaks = table(1000), list[float]()
    for memory_bytes in (round(2**19 * 1.7**power) for power in range(6)):
        setting = replace(SETTING, cluster=Cluster(devices_per_node=2, memory_bytes=memory_bytes))
        if not _fits(lambda _, setting=setting: planner.configure(setting, samples), 0):
            continue
        found = planner.configure(setting, samples)
        replicas = [Replica(num_microbatches=found.num_microbatches)] * found.units["llm"].dp
        for start in range(0, 1000 - 32, 320):
            batch = samples[np.arange(start, start + 32)]
            result = evaluate(setting, found, planner.assign(setting, found, batch, replicas), batch, replicas)
            peaks.append(result.peak_bytes / memory_bytes)
    assert 0.5 < max(peaks) <= 1


@pytest.mark.parametrize(
    ("planner", "need"),
    [
        # A device's part of 12 layers of 16,000 bytes; 100 bytes that each keeps of 2 x 1000 or 2 x 500 tokens; two
        # whole layers with their gradients.
        (FullySharded(), 12 * 16_000 // 2 + 100 * (4 * 2000 + 8 * 1000) + 2 * 8000),
        # All layers on each half of two devices: encoders keep all four microbatches, the language model one.
        (EncoderFirst(), (12 * 16_000 + 100 * (4 * 2000 * 4 + 8 * 1000)) // 2),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_least_memory_that_will_do(planner: Planner, need: int) -> None:
    samples = SampleTable(
        units={"vision": Lengths.of(np.full(4, 1000)), "llm": Lengths.of(np.full(4, 500))},
    )
    job = replace(SETTING, num_nodes=1, global_batch=8)
    for memory_bytes, fits in ((need, True), (need - 1, False)):
        setting = replace(job, cluster=Cluster(devices_per_node=2, memory_bytes=memory_bytes))
        assert _fits(lambda _, setting=setting: planner.configure(setting, samples), 0) == fits


def test_room_is_for_three_deviations_more_or_the_longest_sample() -> None:
    one = Parallelism(dp=1, pp=1, stage_layers=(8,))
    # A token keeps 800 bytes. Four samples of 200 tokens, give or take 100, have 800, give or take 200.
    stages = Stages.of(COSTS.by_name["llm"], one, Lengths.of(np.array([100, 300])), 4)
    assert stages.activation_bytes([1, 4]).tolist() == pytest.approx([800 * (800 + 3 * 200), 800 * (3200 + 3 * 400)])
    # One of 64 samples has 6300 tokens more than the mean, which is more than three deviations.
    stages = Stages.of(COSTS.by_name["llm"], one, Lengths.of(np.array([100] * 63 + [6500])), 1)
    assert stages.activation_bytes(1).tolist() == pytest.approx([800 * (200 + 6300)])


def _fits(configured: Callable[[int], object], memory_bytes: int) -> bool:
    try:
        configured(memory_bytes)
    except ValueError:
        return False
    return True


def test_sharding_is_hidden_behind_computation_as_far_as_it_can_be() -> None:
    times = [
        FullySharded()
        .configure(replace(SETTING, cluster=Cluster(devices_per_node=2, inter_node=link)), table(50))
        .predicted_ms
        for link in (Link(), Link(bytes_per_s=1e9), Link(bytes_per_s=1e4))
    ]
    assert times[0] == times[1] < times[2]
