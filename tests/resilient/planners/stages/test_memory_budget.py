"""What Entrain's microbatches keep: as the simulation finds it, within the limit where they can be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Planner, Replica, Setting
from resilient.planners.published.dflop.planner import Dflop
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.published.entrain.planner import Entrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.memory_budget import MemoryBudget
from tests.resilient.planners.jobs_of_planners import COSTS, setting


def heavy(count: int, seed: int, sigma: float) -> SampleTable:
    """Samples of which few have most of the tokens, and some have nothing for the encoder."""
    draw = np.random.default_rng((count, seed))
    vision = (draw.lognormal(5, sigma, count) * (draw.random(count) < 0.8)).astype(np.int64)
    text = draw.lognormal(5, sigma / 2, count).astype(np.int64) + 1
    return SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(text + vision // 2)})


def spread(encoder: int, language: int, cp: int = 1, encoders: int = 2) -> Configuration:
    """Two replicas of so many stages, of so many devices that share sequences, and encoders for both together."""
    stages = {"vision": (4 // encoder,) * encoder, LLM: (8 // language,) * language}
    copies = {"vision": encoders, LLM: 2}
    units = {
        name: Parallelism(dp=copies[name], pp=len(each), cp=cp, stage_layers=each) for name, each in stages.items()
    }
    return Configuration(units=units, num_microbatches=8)


def used(
    at: Setting, configuration: Configuration, found: Assignment, batch: SampleTable, replicas: list[Replica]
) -> float:
    early, late = found.units["vision"], found.units[LLM]
    most = 0.0
    for number, (each, budget) in enumerate(
        zip(replicas, MemoryBudget.of_each(at, configuration, replicas), strict=True)
    ):
        assert budget is not None
        own = np.flatnonzero(late.replica == number)
        number = max(each.num_microbatches, int(late.microbatch[own].max(initial=0)) + 1)
        most = max(most, budget.used(batch[own], early.microbatch[own], late.microbatch[own], number))
    return most


SPREADS = st.builds(
    spread,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 1, 2, 4]),
    st.sampled_from([2, 2, 3, 4]),
)


@settings(max_examples=50, deadline=None)
@given(
    configuration=SPREADS,
    number=st.integers(1, 12),
    sigma=st.sampled_from([0.5, 1.5]),
    memory=st.integers(100_000, 500_000),
    frozen=st.sampled_from([[], ["vision"], ["vision.0", "vision.1", "vision.2"]]),
    left=st.sampled_from([1.0, 1.0, 0.75, 0.5]),
    splits=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_used_is_what_the_simulation_finds_and_fits_where_it_must(
    configuration: Configuration,
    number: int,
    sigma: float,
    memory: int,
    frozen: list[str],
    left: float,
    splits: bool,
    seed: int,
) -> None:
    # Devices that are left hold the state of all.
    memory += int(96_000 * (1 / left - 1))
    at = replace(setting(memory), costs=COSTS.frozen(frozen), splits=splits)
    batch = heavy(32, seed, sigma)
    replicas = [Replica(num_microbatches=number, speed=part, devices=part) for part in (1.0, left)]
    budgets = [budget for budget in MemoryBudget.of_each(at, configuration, replicas) if budget is not None]
    free = Entrain().assign(replace(at, cluster=setting().cluster), configuration, batch, replicas)
    if not np.logical_or.reduce([budget.holds(batch) for budget in budgets]).all():
        with pytest.raises(ValueError, match=r"^tokens of sample \d+ in '\w+' must be <= "):
            Entrain().assign(at, configuration, batch, replicas)
        return
    found = Entrain().assign(at, configuration, batch, replicas)
    for each in (free, found):
        fits = evaluate(at, configuration, each, batch, replicas).peak_bytes <= memory
        assert (used(at, configuration, each, batch, replicas) <= 1) == fits
    assert used(at, configuration, found, batch, replicas) <= 1
    if used(at, configuration, free, batch, replicas) <= 1:
        assert all((place.microbatch == free.units[name].microbatch).all() for name, place in found.units.items())


def test_what_is_used_is_what_the_simulation_finds_of_any_samples_that_are_deferred() -> None:
    """Of encoders with one lane for each replica of the language model, with two, and with one and two; however far
    stages run ahead."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        configuration = spread(*(int(rng.choice(each)) for each in ([1, 2, 4], [1, 2, 4, 8], [1], [2, 3, 4])))
        configuration = replace(configuration, lead=int(rng.integers(1, 4)))
        frozen = [[], ["vision"], ["vision.0", "vision.1"], ["vision", "llm.0", "llm.1", "llm.2"]][rng.integers(4)]
        at = replace(setting(), costs=COSTS.frozen(frozen), splits=bool(rng.integers(2)))
        number, count = int(rng.integers(1, 12)), int(rng.integers(4, 40))
        batch, replicas = heavy(count, seed, float(rng.choice([0.5, 1.5]))), [Replica(num_microbatches=number)] * 2
        replica, late = rng.integers(0, 2, count), rng.integers(0, number, count)
        early = np.maximum(late - (rng.random(count) < rng.choice([0.0, 0.3, 0.7])), 0)
        places = {"vision": Place(replica=replica, microbatch=early), LLM: Place(replica=replica, microbatch=late)}
        assignment = Assignment(units=places)
        peak = evaluate(at, configuration, assignment, batch, replicas).peak_bytes
        fits = replace(at, cluster=replace(at.cluster, memory_bytes=peak))
        assert used(fits, configuration, assignment, batch, replicas) == pytest.approx(1.0, abs=1e-4), seed


def test_even_microbatches_have_large_ones_apart() -> None:
    configuration = Configuration(
        units={LLM: Parallelism(dp=1, pp=2, stage_layers=(4, 4))}, num_microbatches=6
    )  # the first stage holds two
    budget = MemoryBudget.of(replace(setting(10**6), costs=replace(COSTS, units=COSTS.units[1:])), configuration)
    assert budget is not None
    samples = SampleTable(units={LLM: Lengths.of(np.array([90, 80, 70, 10, 10, 10]))})
    assert budget.even(samples, 6).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_batches_of_the_data_that_was_sampled_fit(sigma: float) -> None:
    """Where a configuration was found, with little to spare."""
    samples, least = heavy(2000, 0, sigma), 30_000
    base = replace(setting(), global_batch=64)
    while True:
        at = replace(base, cluster=replace(base.cluster, memory_bytes=least))
        try:
            configuration = Entrain().configure(at, samples)
            break
        except ValueError as error:
            needed = re.search(r"must be >= (\d+), what the least", str(error))
            assert needed
            least = int(needed[1]) + 1
    replicas = degraded_replicas(at, configuration, 0)
    for seed in range(1, 11):
        batch = heavy(64, seed, sigma)
        assignment = Entrain().assign(at, configuration, batch, replicas)
        assert evaluate(at, configuration, assignment, batch, replicas).peak_bytes <= least


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_would_not_fit_is_made_to(seed: int) -> None:
    batch, replicas, configuration = heavy(32, seed, 1.5), [Replica(num_microbatches=16)] * 2, spread(2, 4)
    peaks: list[int] = []
    at = setting()
    for _ in range(2):
        assignment = Entrain().assign(at, configuration, batch, replicas)
        peaks.append(evaluate(at, configuration, assignment, batch, replicas).peak_bytes)
        at = setting(peaks[0] * 4 // 5)
    assert peaks[1] <= peaks[0] * 4 // 5


@pytest.mark.parametrize("planner", [DistTrain(), Dflop(), Entrain()])
def test_a_sample_that_does_not_fit_alone_is_named(planner: Planner) -> None:
    names = ("small.jpg", "huge.jpg", "tiny.jpg")
    batch = SampleTable(
        units={"vision": Lengths.of(np.array([10, 500, 0])), LLM: Lengths.of(np.array([10, 50, 90]))}, names=names
    )
    at = setting(48_000 + 400 * 300)  # the encoder's parameters and what it keeps of 300 tokens
    message = (
        "tokens of 'huge.jpg' in 'vision' must be <= 300, which fit into memory alone, got 500; leave it out, or "
        "configure the job for longer samples"
    )
    configuration = spread(1, 2)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        planner.assign(at, configuration, batch, [Replica(num_microbatches=2)] * 2)
    message = message.replace("'huge.jpg'", "sample 1")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        planner.assign(at, configuration, replace(batch, names=()), [Replica(num_microbatches=2)] * 2)


def test_memory_without_room_is_refused() -> None:
    message = (
        "memory_bytes must be more than the 48000 bytes of parameters, gradients and optimizer on a device of "
        "'vision', got 48000; configure the job again"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Entrain().assign(setting(48_000), spread(1, 8), heavy(8, 0, 1.0), [Replica(num_microbatches=2)] * 2)
