"""Entrain's search: the best configuration by its formula comes first."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import Floats, cut_chain, loads
from resilient.planners.packing.proportion import proportional
from resilient.planners.planner import Parallelism, Setting
from resilient.planners.published.entrain.planner import Entrain
from resilient.planners.published.entrain.search import entrain_configurations
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.stage_work import exposed_sum_ms, state_bytes
from tests.resilient.planners.jobs_of_planners import (
    COSTS,
    DEGREES,
    setting,
    table,
)
from tests.resilient.planners.published.entrain.jobs import MODELS, drawn, job


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
        message = "memory_bytes must be >= " if rated else "num_nodes must let 'entrain' give every unit stages in "
        with pytest.raises(ValueError, match=f"^{message}"):
            next(entrain_configurations(at, samples))
        return
    found = next(entrain_configurations(at, samples))
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
        found = next(entrain_configurations(at, samples))
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
            "num_nodes must let 'entrain' give every unit stages in proportion to its work, and no more than it has "
            "layers, got 1 of 2 devices for 8 microbatches; use more nodes, or fewer",
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
        next(entrain_configurations(at, samples))
