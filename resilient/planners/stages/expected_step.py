"""What an average sample costs a unit: what planners decide on before they see a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import Lengths
from resilient.planners.packing.balance import cut_chain, slowest_stages
from resilient.planners.planner import Parallelism
from resilient.planners.stages.stage_work import ring_ms
from resilient.planners.stages.virtual_stages import cut_rounds
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.inputs.cluster import Cluster


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """One unit at one tensor-parallel degree; means of times over the samples, not times of the mean sample.

    Args:
        tp: The degree.
        sample_ms: Forward and backward of a sample in all layers.
        call_ms: What each call takes beside, in all layers.
        slowest_ms: ``sample_ms`` of the slowest stage, by the number of stages less one.
        gradient_bytes: On each device of the stage that has most gradients, likewise.
        held_bytes: Parameters and gradients where they are most, likewise.
        optimizer_bytes: The optimizer's, likewise, before it is sharded over replicas.
        token_bytes: What a token keeps where that is most, likewise; layers without a backward keep nothing.
    """

    tp: int
    sample_ms: float
    call_ms: float
    slowest_ms: Floats
    gradient_bytes: Floats
    held_bytes: Floats
    optimizer_bytes: Floats
    token_bytes: Floats

    def sum_ms(self, dp: Ints, pp: Ints, cluster: Cluster) -> Floats:
        """Return how long it takes to sum the gradients of the stage that has most.

        Beyond the papers. It bounds what :func:`~resilient.planners.stages.stage_work.exposed_sum_ms` says from above:
        here no backward hides anything.

        Args:
            dp: Replicas; any shape.
            pp: Stages; of the same shape.
            cluster: The nodes.
        """
        return ring_ms(self.gradient_bytes[pp - 1], dp, dp * pp * self.tp, cluster)


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
        raise ArgumentError("samples", "be one or more", "none", "draw some from the data set")
    gradients, parameters, optimizer = np.array(
        [[layer.gradient_bytes, layer.parameter_bytes, layer.optimizer_bytes] for layer in unit.layers],
        dtype=np.float64,
    ).T
    trains = np.array([layer.has_backward for layer in unit.layers], dtype=np.float64)
    for tp, cp in unit.degrees:
        if cp > 1 or tp > min(max_tp, max_devices):
            continue
        layers = _sample_ms(unit, tp, lengths)
        slowest = slowest_stages(layers, min(len(layers), max_devices // tp))
        kept = trains * [layer.curves[unit.index(tp, cp)].activation_bytes for layer in unit.layers]
        found.append(
            Expected(
                tp=tp,
                sample_ms=float(layers.sum()),
                call_ms=float(unit.coefficients(tp)[2].sum()) if lengths.tokens.any() else 0.0,
                slowest_ms=slowest,
                gradient_bytes=_largest_sums(layers, slowest, gradients) / tp,
                held_bytes=_largest_sums(layers, slowest, parameters + gradients) / tp,
                optimizer_bytes=_largest_sums(layers, slowest, optimizer) / tp,
                token_bytes=_largest_sums(layers, slowest, kept),
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
    return Parallelism(dp=dp, pp=pp, tp=tp, stage_layers=cut_chain(_sample_ms(unit, tp, lengths), pp))


def virtual_stages(unit: UnitCosts, lengths: Lengths, spread: Parallelism, chunks: int) -> Parallelism:
    """Return how a unit is spread with so many stages on each row of devices, its layers cut for that."""
    return replace(
        spread, chunks=chunks, stage_layers=cut_rounds(_sample_ms(unit, spread.tp, lengths), spread.pp, chunks)
    )


def longest_ms(times_ms: Floats, batch: int) -> float:
    """Return the expected time of the longest of so many samples, drawn from these."""
    below = (np.arange(len(times_ms) + 1) / len(times_ms)) ** batch
    return float(np.dot(np.sort(times_ms), np.diff(below)))


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


def _largest_sums(layers: Floats, slowest: Floats, values: Floats) -> Floats:
    """Return the largest sum of the values in a stage, for each number of stages that a chain is cut into.

    Args:
        layers: What the layers take, as :func:`~resilient.planners.packing.balance.cut_chain` cuts them.
        slowest: What the slowest stage does.
        values: Of each layer.
    """
    largest = np.zeros(len(slowest))
    compiled(_fill)(
        np.concatenate(([0.0], np.cumsum(layers))), slowest, np.concatenate(([0.0], np.cumsum(values))), largest
    )
    return largest


def _fill(ends: Floats, slowest: Floats, sums: Floats, largest: Floats) -> None:
    for count in range(len(slowest)):
        first = 0
        for following in range(count, -1, -1):
            # As many layers as the slowest stage takes, but one for each stage that follows.
            end = first + 1
            while end < len(ends) - 1 - following and ends[end + 1] - ends[first] <= slowest[count]:
                end += 1
            largest[count] = max(largest[count], sums[end] - sums[first])
            first = end


def _sample_ms(unit: UnitCosts, tp: int, lengths: Lengths) -> Floats:
    """Return each layer's mean time of a sample, without what a call takes beside. [num_layers]"""
    tokens, squares = float(lengths.tokens.mean()), float(lengths.squares.mean())
    attention, linear, _ = unit.coefficients(tp).sum(axis=1)
    return attention * squares + linear * tokens
