"""The order and the waits of a step's tasks: everything at the same time as in a slow simulation written apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.evaluation.naive_step import NaiveStep

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
    names = [*("vision", "audio")[: int(rng.integers(0, 3))], "llm"]
    num_layers = {name: int(rng.integers(1, 5)) for name in names}
    costs = CostModel(units=tuple(_unit(name, count, rng) for name, count in num_layers.items()))
    some = [name for name in (*names, *(f"{name}.0" for name in names)) if rng.random() < 0.3]
    depths = {name: int(rng.integers(1, count + 1)) for name, count in num_layers.items()}
    if encoders is Encoders.REPLICATED:
        depths |= dict.fromkeys(names[:-1], 1)
    elif colocated:
        depths = dict.fromkeys(names, min(depths.values()))
    alike = colocated or encoders is Encoders.REPLICATED
    configuration = Configuration(
        units={
            name: _spread(num_layers[name], depths[name], 2 if alike or name == "llm" else int(rng.integers(1, 4)), rng)
            for name in names
        },
        num_microbatches=4,
        colocated=colocated,
        encoders=encoders,
    )
    slow = Cluster(
        devices_per_node=int(rng.integers(1, 6)),
        intra_node=Link(latency_ms=0.125, bytes_per_s=8e6),
        inter_node=Link(latency_ms=0.5, bytes_per_s=1e6),
    )
    setting = Setting(
        costs=costs.frozen(some), cluster=slow, num_nodes=int(rng.integers(1, 9)), global_batch=8, microbatch=1
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


@pytest.mark.parametrize(("encoders", "colocated"), WAYS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_everything_is_when_a_naive_simulation_has_it(encoders: Encoders, colocated: bool, seed: int) -> None:
    step = _step(encoders, colocated, np.random.default_rng(seed))
    naive, result = NaiveStep(*step), evaluate(*step)
    spans = result.spans
    found = [
        (result.lanes[lane].unit, result.lanes[lane].pipeline, result.lanes[lane].stage, *rest)
        for lane, *rest in zip(
            spans.lane.tolist(),
            spans.backward.tolist(),
            spans.microbatch.tolist(),
            spans.start_ns.tolist(),
            spans.end_ns.tolist(),
            strict=True,
        )
    ]
    assert sorted(found) == naive.spans()
    assert result.iteration_ms == naive.iteration_ms
    assert result.peak_bytes == naive.peak_bytes()
    assert 0 <= result.bubble < 1
