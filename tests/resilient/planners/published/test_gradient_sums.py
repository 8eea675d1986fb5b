"""What planners predict that sums of gradients add to a step is what the simulation adds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import (
    Assignment,
    Configuration,
    Encoders,
    Parallelism,
    Place,
    Planner,
    Replica,
    Setting,
)
from resilient.planners.published.baselines.balanced import EncoderFirst, StaticContext
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.stages.expected_step import expected, parallelism
from resilient.planners.stages.stage_work import exposed_sum_ms, gradient_sum_ms
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import setting, table

SLOW = Cluster(devices_per_node=4, intra_node=Link(bytes_per_s=1e6), inter_node=Link(bytes_per_s=1e5))


def unit(name: str, layers: list[tuple[float, int]]) -> UnitCosts:
    """Layers of so many ms per token, forward, and so many bytes of gradients; the backward takes twice the forward."""
    curves = [Curve(linear=ms) for ms, _ in layers]
    return UnitCosts(
        name=name,
        layers=tuple(
            UnitLayer(
                name=str(i),
                curves=(LayerCurves(forward=curve, backward_input=curve, backward_weight=curve),) * 2,
                gradient_bytes=num_bytes,
            )
            for i, (curve, (_, num_bytes)) in enumerate(zip(curves, layers, strict=True))
        ),
        degrees=((1, 1), (2, 1)),
    )


def test_what_the_last_backwards_do_not_hide_is_exposed() -> None:
    llm, vision = unit("llm", [(1.0, 1000)] * 4), unit("vision", [(1.0, 0)])
    spreads = {
        "llm": Parallelism(dp=2, pp=2, stage_layers=(2, 2)),
        "vision": Parallelism(dp=2, pp=1, stage_layers=(1,)),
    }
    # 2000 bytes of a stage over the faster link: 2 * 1/2 * 2 ms, half of which waits for the last layer's backward
    llm_only = {"llm": spreads["llm"]}
    assert exposed_sum_ms([llm], llm_only, SLOW, {"llm": np.array([0.0, 0.0])}) == pytest.approx(2.0)
    assert exposed_sum_ms([llm], llm_only, SLOW, {"llm": np.array([0.5, 0.5])}) == pytest.approx(1.5)
    assert exposed_sum_ms([llm], llm_only, SLOW, {"llm": np.array([9.0, 0.0])}) == pytest.approx(1.0)
    backward_ms = {"llm": np.array([9.0, 9.0]), "vision": np.array([0.75])}
    assert exposed_sum_ms([vision, llm], spreads, SLOW, backward_ms) == pytest.approx(0.25)
    backward_ms["vision"] = np.array([2.0])
    assert exposed_sum_ms([vision, llm], spreads, SLOW, backward_ms) == 0.0


layers = st.lists(st.tuples(st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.integers(0, 3000)), min_size=1, max_size=5)


@given(layers, layers, st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_more_is_exposed_in_simulation_than_predicted(
    pictures: list[tuple[float, int]],
    text: list[tuple[float, int]],
    one: int,
    other: int,
    dp: int,
    number: int,
    near: bool,
) -> None:
    """On nodes of one device, or all on one node: predictions do not know where nodes divide pipelines."""
    cluster = replace(SLOW, devices_per_node=64 if near else 1)
    units = unit("vision", pictures), unit("llm", text)
    lengths = Lengths.of(np.ones(dp * number, np.int64))
    spreads = {
        each.name: parallelism(each, lengths, dp, min(pp, len(each.layers)), 1)
        for each, pp in zip(units, (one, other), strict=True)
    }
    place = Place(replica=np.repeat(np.arange(dp), number), microbatch=np.tile(np.arange(number), dp))
    result = evaluate(
        Setting(costs=CostModel(units=units), cluster=cluster, num_nodes=30, global_batch=dp * number, microbatch=1),
        Configuration(units=spreads, num_microbatches=number),
        Assignment(units={"vision": place, "llm": place}),
        SampleTable(units={"vision": lengths, "llm": lengths}),
        [Replica(num_microbatches=number)] * dp,
    )
    backward_ms = {
        each.name: np.add.reduceat(
            [2 * layer.curves[0].forward.linear for layer in each.layers],
            np.cumsum((0, *spreads[each.name].stage_layers[:-1])),
        )
        for each in units
    }
    predicted = exposed_sum_ms(units, spreads, cluster, backward_ms)
    assert result.sum_ms <= predicted + 1e-5
    if number == 1:  # nothing is late for another reason, as an encoder is that is slower
        assert result.sum_ms == pytest.approx(predicted, abs=1e-5)


@given(layers, st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_expected_sums_are_those_of_the_stage_with_most_gradients(chain: list[tuple[float, int]], dp: int) -> None:
    costs, lengths = unit("llm", chain), Lengths.of(np.array([3, 5]))
    for each in expected(costs, lengths, 8, 4):
        stages = np.arange(1, len(each.slowest_ms) + 1)
        found = each.sum_ms(np.full_like(stages, dp), stages, SLOW)
        spreads = [parallelism(costs, lengths, dp, pp, each.tp) for pp in stages.tolist()]
        assert found.tolist() == [gradient_sum_ms(costs, spread, SLOW).max() for spread in spreads]


CHOOSING: tuple[Planner, ...] = (
    EncoderFirst(),
    StaticContext(),
    Cornstarch(),
    Cornstarch(name="colocated", encoders=(Encoders.COLOCATED,)),
    DistTrain(),
)


def mean_samples(samples: SampleTable, count: int) -> SampleTable:
    """So many times the sample that predictions are made for."""
    means = {
        name: (np.full(count, round(float(each.tokens.mean()))), np.full(count, round(float(each.squares.mean()))))
        for name, each in samples.units.items()
    }
    return SampleTable(
        units={name: Lengths(tokens=sums, squares=squares, longest=sums) for name, (sums, squares) in means.items()}
    )


@pytest.mark.parametrize("planner", CHOOSING, ids=lambda planner: planner.name)
def test_counting_sums_never_slows_a_step_and_some_are_faster(planner: Planner) -> None:
    job, samples = setting(), table(400)
    if isinstance(planner, Cornstarch | DistTrain):  # they simulate what they know, too
        samples = mean_samples(samples, 400)
    # Messages are not predicted; between these nodes they take no time.
    job = replace(job, costs=CostModel(units=tuple(replace(each, output_bytes=0.0) for each in job.costs.units)))
    ignored, batch = planner.configure(job, samples), mean_samples(samples, job.global_batch)
    faster: list[bool] = []
    for bytes_per_s in (1e8, 1e6, 1e5):
        slow = replace(job, cluster=Cluster(devices_per_node=2, inter_node=Link(bytes_per_s=bytes_per_s)))
        counted = planner.configure(slow, samples)
        steps: list[float] = []
        for chosen in (counted, ignored):
            replicas = [Replica(num_microbatches=chosen.num_microbatches)] * chosen.units["llm"].dp
            assignment = planner.assign(slow, chosen, batch, replicas)
            steps.append(evaluate(slow, chosen, assignment, batch, replicas).iteration_ms)
        assert counted.predicted_ms == pytest.approx(steps[0], rel=0.1)
        assert steps[0] <= 1.001 * steps[1]
        faster.append(steps[0] < 0.9 * steps[1])
    assert not faster[0]
    # Wherever all units are on all devices, these send as much through the cards at any degrees.
    assert any(faster) or planner.name == "static-cp"
