"""What the judge says of any answer is what another simulation of it says, and no less than the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Replica, Setting
from resilient.planners.stages.device_layout import used_devices
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.evaluation.another_simulator import AnotherSimulator, tasks_of


def _unit(name: str, rng: np.random.Generator) -> UnitCosts:
    def curve(tp: int) -> Curve:
        attention, linear, fixed = rng.uniform(0, (0.02, 2, 20))
        return Curve(attention=attention / tp, linear=linear / tp, fixed=fixed)

    def layer(number: int) -> UnitLayer:
        curves = [
            LayerCurves(
                forward=curve(tp), backward_input=curve(tp), backward_weight=curve(tp), activation_bytes=kept / tp
            )
            for kept in [float(rng.uniform(50, 300))]
            for tp in (1, 2)
        ]
        sizes = rng.integers(0, 10_000, 3).tolist()
        return UnitLayer(
            name=str(number),
            curves=tuple(curves),
            parameter_bytes=sizes[0],
            gradient_bytes=sizes[1],
            optimizer_bytes=sizes[2],
        )

    layers = tuple(layer(number) for number in range(int(rng.integers(1, 5))))
    return UnitCosts(name=name, layers=layers, degrees=((1, 1), (2, 1)), boundary_bytes=30.0, output_bytes=50.0)


def _spread(unit: UnitCosts, dp: int, tp: int, rng: np.random.Generator) -> Parallelism:
    pp = int(rng.integers(1, min(len(unit.layers), 3) + 1))
    cuts = np.sort(rng.permutation(np.arange(1, len(unit.layers)))[: pp - 1])
    layers = np.diff(cuts, prepend=0, append=len(unit.layers)).tolist()
    return Parallelism(dp=dp, pp=pp, tp=tp, stage_layers=tuple(layers), recompute=float(rng.choice([0, 0.5, 1])))


def _batch(names: list[str], rng: np.random.Generator) -> SampleTable:
    """Some samples have nothing for an encoder, and at times one is longer than all others."""
    count = int(rng.integers(1, 13))
    tokens = {name: np.rint(rng.lognormal(3, 1, count)).astype(np.int64) for name in names}
    units = {name: each + 1 if name == LLM else each * (rng.random(count) < 0.7) for name, each in tokens.items()}
    units[LLM][0] *= int(rng.choice([1, 30]))
    return SampleTable(units={name: Lengths.of(each) for name, each in units.items()})


def _answer(setting: Setting, batch: SampleTable, rng: np.random.Generator) -> tuple[Configuration, Assignment]:
    """Return any configuration, and an assignment that may defer samples, or encode them in other pipelines."""
    colocated, replicas = bool(rng.random() < 0.5), int(rng.integers(1, 4))
    degree = int(rng.integers(1, 3))
    together = Encoders.COLOCATED if rng.random() < 0.5 else Encoders.PARALLEL
    lanes = int(rng.integers(1, 5))
    units: dict[str, Parallelism] = {}
    for unit in setting.costs.units:
        dp = replicas if colocated or unit.name == LLM else lanes if together is Encoders.COLOCATED else 0
        tp = degree if colocated or together is Encoders.COLOCATED else int(rng.integers(1, 3))
        units[unit.name] = _spread(unit, dp or int(rng.integers(1, 5)), tp, rng)
    number = int(rng.integers(1, 4))
    found = Configuration(
        units=units, num_microbatches=number, colocated=colocated, encoders=together, lead=int(rng.integers(1, 3))
    )
    replica, microbatch = rng.integers(0, replicas, len(batch)), rng.integers(0, number, len(batch))
    places: dict[str, Place] = {}
    for unit in setting.costs.units:
        places[unit.name] = Place(replica=replica, microbatch=microbatch)
        if unit.name != LLM and rng.random() < 0.5:
            places[unit.name] = Place(
                replica=rng.integers(0, replicas, len(batch)), microbatch=rng.integers(0, number, len(batch))
            )
    return found, Assignment(units=places)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_any_answer_takes_the_time_and_memory_that_another_simulator_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [*("vision", "audio", "video")[: int(rng.integers(1, 4))], LLM, *("image",)[: int(rng.integers(0, 2))]]
    costs = CostModel(units=tuple(_unit(name, rng) for name in names))
    link = Link(latency_ms=float(rng.choice([0.0, 3.0])), bytes_per_s=float(rng.choice([1e4, 1e6])))
    setting = Setting(
        costs=costs.frozen([name for name in names[:-1] if rng.random() < 0.3]),
        cluster=Cluster(intra_node=link),
        num_nodes=1,
        global_batch=1,
        microbatch=1,
    )
    batch = _batch(names, rng)
    configuration, assignment = _answer(setting, batch, rng)
    cluster = replace(setting.cluster, devices_per_node=used_devices(configuration))
    setting = replace(setting, global_batch=len(batch), cluster=cluster)
    replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp
    result = evaluate(setting, configuration, assignment, batch, replicas)
    rows = tasks_of(result.timeline.schedule)
    another = AnotherSimulator(setting, configuration, assignment, batch)
    assert another.expected() == {task: 1 for row in rows for task in row}
    assert result.timeline.iteration_ms == pytest.approx(another.step_ms(rows), rel=1e-6, abs=1e-5)
    assert result.peak_bytes == pytest.approx(another.peak_bytes(rows), rel=1e-4, abs=50)  # whole bytes of each cell
    assert result.iteration_ms >= (1 - 1e-6) * bound_ms(setting, batch)
