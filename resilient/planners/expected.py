"""What an average sample costs a unit: what planners decide on before they see a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilient.planners.balance import Floats, cut_chain, slowest_stages
from resilient.planners.costs import Curve, UnitCosts
from resilient.planners.planner import Parallelism
from resilient.planners.samples import Lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """One unit at one tensor-parallel degree; means of times over the samples, not times of the mean sample.

    Args:
        tp: The degree.
        sample_ms: Forward and backward of a sample in all layers.
        call_ms: What each call takes beside, in all layers.
        slowest_ms: ``sample_ms`` of the slowest stage, by the number of stages less one.
        activation_bytes: What all layers keep of a sample, on each device.
    """

    tp: int
    sample_ms: float
    call_ms: float
    slowest_ms: Floats
    activation_bytes: float


def expected(unit: UnitCosts, lengths: Lengths, max_devices: int, max_tp: int) -> list[Expected]:
    """Return a unit's costs at each of its tensor-parallel degrees.

    Args:
        unit: The unit.
        lengths: Of some samples.
        max_devices: Of one replica.
        max_tp: Devices of a node.

    Raises:
        ValueError: There are no samples, or no such degree was profiled.
    """
    found: list[Expected] = []
    if not len(lengths.tokens):
        raise ValueError("samples must be one or more, got none; draw some from the data set")
    for tp, cp in unit.degrees:
        if cp > 1 or tp > min(max_tp, max_devices):
            continue
        curves = _work(unit, tp)
        layers = _sample_ms(curves, lengths)
        found.append(
            Expected(
                tp=tp,
                sample_ms=float(layers.sum()),
                call_ms=sum(curve.fixed for curve in curves) if lengths.tokens.any() else 0.0,
                slowest_ms=slowest_stages(layers, min(len(layers), max_devices // tp)),
                activation_bytes=unit.activation_bytes(tp) * float(lengths.tokens.mean()),
            )
        )
    if not found:
        raise ValueError(
            f"degrees of {unit.name!r} must have one without context parallelism on {min(max_tp, max_devices)} devices "
            f"or fewer, got {unit.degrees}; profile it, or use larger nodes"
        )
    return found


def parallelism(unit: UnitCosts, lengths: Lengths, dp: int, pp: int, tp: int) -> Parallelism:
    """Return how a unit is spread, with its layers cut where :class:`Expected` assumes it."""
    return Parallelism(dp=dp, pp=pp, tp=tp, stage_layers=cut_chain(_sample_ms(_work(unit, tp), lengths), pp))


def stage_curves(unit: UnitCosts, spread: Parallelism) -> list[tuple[Curve, Curve]]:
    """Return the forward and the backward of each stage."""
    index = unit.index(spread.tp, spread.cp)
    ends = np.cumsum(spread.stage_layers).tolist()
    return [
        (
            sum((layer.curves[index].forward for layer in unit.layers[first:end]), Curve()),
            sum((layer.backward(index) for layer in unit.layers[first:end]), Curve()),
        )
        for first, end in zip((0, *ends), ends, strict=False)
    ]


def _work(unit: UnitCosts, tp: int) -> list[Curve]:
    index = unit.index(tp, 1)
    return [layer.curves[index].forward + layer.backward(index) for layer in unit.layers]


def _sample_ms(curves: list[Curve], lengths: Lengths) -> Floats:
    """Return each layer's mean time of a sample, without what a call takes beside. [num_layers]"""
    tokens, squares = float(lengths.tokens.mean()), float(lengths.squares.mean())
    return np.array([curve.attention * squares + curve.linear * tokens for curve in curves])
