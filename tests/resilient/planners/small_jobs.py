"""Jobs of a few small units on a few devices, one of them a stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.planner import Setting
from resilient.templates.inputs.cluster import Cluster, Link


def small_unit(name: str, layer_ms: Sequence[float], fixed: float = 0.1) -> UnitCosts:
    """Return a unit of layers that take so long for a token."""
    layers = [
        UnitLayer(
            name=str(index),
            curves=(
                LayerCurves(
                    forward=Curve(linear=ms, attention=0.001, fixed=fixed),
                    backward_input=Curve(linear=ms),
                    backward_weight=Curve(linear=ms),
                    activation_bytes=100.0,
                ),
            ),
            parameter_bytes=1000,
            gradient_bytes=1000,
            optimizer_bytes=2000,
        )
        for index, ms in enumerate(layer_ms)
    ]
    return UnitCosts(name=name, layers=tuple(layers), degrees=((1, 1),), boundary_bytes=10.0, output_bytes=10.0)


def small_table(draw: np.random.Generator, names: Sequence[str], count: int) -> SampleTable:
    """Return samples whose lengths are drawn."""
    lengths = {name: np.rint(draw.lognormal(3, 1, count)).astype(np.int64) for name in names}
    pictures = {name: each * (draw.random(count) < 0.7) for name, each in lengths.items() if name != LLM}
    return SampleTable(units={name: Lengths.of(each) for name, each in (pictures | {LLM: lengths[LLM] + 1}).items()})


def small_job(seed: int, devices_per_node: int) -> tuple[Setting, SampleTable, SampleTable]:
    """One or two encoders, frozen or not, of two to six layers, and a language model of six to nine."""
    draw = np.random.default_rng(seed)
    names = [*("vision", "audio")[: int(draw.integers(1, 3))], LLM]
    frozen = [name for name in names[:-1] if draw.random() < 0.4]
    units = [
        small_unit(
            name, draw.uniform(0.5, 2, int(draw.integers(6, 10) if name == LLM else draw.integers(2, 7))).tolist()
        )
        for name in names
    ]
    setting = Setting(
        costs=CostModel(units=tuple(units)).frozen(frozen),
        cluster=Cluster(
            devices_per_node=devices_per_node,
            inter_node=Link(latency_ms=0.01, bytes_per_s=1e8),
            intra_node=Link(bytes_per_s=1e9),
        ),
        num_nodes=int(draw.integers(1, 6)),
        global_batch=int(draw.integers(1, 25)),
        microbatch=int(draw.integers(1, 4)),
        num_pipelines=1,
    )
    return setting, small_table(draw, names, 64), small_table(draw, names, setting.global_batch)
