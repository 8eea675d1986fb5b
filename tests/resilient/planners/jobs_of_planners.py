"""A small multimodal job with round numbers, random batches, and replicas as failures leave them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from resilient.planners.costs.correction import UNCORRECTED, Observation
from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.planner import Assignment, Configuration, Replica, Setting
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.replan.replan import first_plan, replan
from resilient.templates.search.template_sizes import TooFewNodes
from tests.templates.jobs import enough_nodes, problems

DEGREES = ((1, 1), (1, 2), (1, 4), (2, 1))


def unit(name: str, num_layers: int, linear: float, attention: float) -> UnitCosts:
    """Equal layers of 16 kB and 100 bytes per token, 30 more while gradients wait; rings take a tenth of their time."""
    curves = tuple(
        LayerCurves(
            forward=Curve(
                attention=attention / (tp * cp),
                linear=linear / (tp * cp) + 0.1 * linear * (cp - 1) / cp,
                fixed=0.05 * cp,
            ),
            backward_input=Curve(linear=linear / (tp * cp)),
            backward_weight=Curve(linear=linear / (tp * cp)),
            activation_bytes=100.0 / (tp * cp),
            deferred_bytes=30.0 / (tp * cp),
        )
        for tp, cp in DEGREES
    )
    layers = tuple(
        UnitLayer(name=str(index), curves=curves, parameter_bytes=4000, optimizer_bytes=8000, gradient_bytes=4000)
        for index in range(num_layers)
    )
    return UnitCosts(name=name, layers=layers, degrees=DEGREES, output_bytes=64.0)


COSTS = CostModel(units=(unit("vision", 4, 0.001, 1e-6), unit("llm", 8, 0.002, 1e-6)))


def setting(memory_bytes: int | None = None) -> Setting:
    """Eight nodes of two devices, 32 samples a step."""
    cluster = Cluster(devices_per_node=2, memory_bytes=memory_bytes)
    return Setting(costs=COSTS, cluster=cluster, num_nodes=8, global_batch=32, microbatch=2)


def table(count: int, seed: int = 0) -> SampleTable:
    """Samples of which some are long, and some have nothing for the encoder."""
    draw = np.random.default_rng((count, seed))
    vision = (draw.lognormal(5, 1, count) * (draw.random(count) < 0.8)).astype(np.int64)
    text = draw.lognormal(5, 1, count).astype(np.int64) + 1
    return SampleTable(units={"vision": Lengths.of(vision), "llm": Lengths.of(text + vision)})


def with_attention(costs: CostModel, times: float) -> CostModel:
    """Costs in which attention takes so many times as long."""
    return replace(costs, units=tuple(_with_attention(each, times) for each in costs.units))


def _with_attention(costs: UnitCosts, times: float) -> UnitCosts:
    def changed(curves: LayerCurves) -> LayerCurves:
        return replace(curves, forward=replace(curves.forward, attention=times * curves.forward.attention))

    layers = tuple(replace(layer, curves=tuple(map(changed, layer.curves))) for layer in costs.layers)
    return replace(costs, layers=layers)


def learnt(at: Setting, truth: CostModel, configuration: Configuration) -> Setting:
    """The job once it has seen how long samples of all lengths take in truth."""
    seen: list[Observation] = []
    tokens = np.unique(np.rint(2 ** np.arange(0, 16, 0.25)).astype(np.int64))
    for name, spread in configuration.units.items():
        predicted, actual = (
            costs.by_name[name].work(spread.tp, spread.cp).of(Lengths.of(tokens)) for costs in (at.costs, truth)
        )
        seen += [
            Observation(unit=name, tp=spread.tp, tokens=length, predicted_ms=before, actual_ms=after)
            for length, before, after in zip(tokens.tolist(), predicted.tolist(), actual.tolist(), strict=True)
        ]
    return replace(at, correction=UNCORRECTED.observe(seen))


@st.composite
def after_failures(draw: st.DrawFn) -> list[Replica]:
    """The pipelines of a plan after some nodes failed, one after the other; each as fast as its slowest stage."""
    problem = draw(problems())
    num_nodes = enough_nodes(problem) + draw(st.integers(0, 5))
    try:
        plan = first_plan(problem, range(num_nodes))
        for _ in range(draw(st.integers(0, 3))):
            lost = draw(st.sampled_from(plan.nodes))
            num_nodes -= 1
            plan = replan(problem, plan, [node for node in range(num_nodes + 1) if node != lost][:num_nodes])
    except TooFewNodes:
        assume(False)
    slowest = [pipeline.template.slowest_ms / pipeline.template.round_size for pipeline in plan.pipelines]
    return [
        Replica(num_microbatches=pipeline.num_microbatches, speed=min(slowest) / ms if ms else 1.0)
        for pipeline, ms in zip(plan.pipelines, slowest, strict=True)
    ]


def check_places(assignment: Assignment, again: Assignment, count: int, replicas: list[Replica]) -> None:
    """Each sample has one place per unit, within its replica's microbatches, and the same one when asked again."""
    assert set(assignment.units) == {"vision", "llm"}
    counts = np.array([each.num_microbatches for each in replicas])
    for name, place in assignment.units.items():
        assert place.replica.shape == place.microbatch.shape == (count,)
        assert ((place.replica >= 0) & (place.replica < len(replicas))).all()
        assert ((place.microbatch >= 0) & (place.microbatch < counts[place.replica])).all()
        np.testing.assert_array_equal(place.replica, again.units[name].replica)
        np.testing.assert_array_equal(place.microbatch, again.units[name].microbatch)
