"""What the stages of a unit take: state, what a token keeps, sums of gradients and other messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.cost_model import Curve, UnitCosts
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.stages.virtual_stages import by_row
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.inputs.cluster import Cluster, Link


def dealt_by(unit: UnitCosts, spread: Parallelism) -> Curve:
    """Return the work by which a unit's samples are dealt over its lanes: that of the fewest devices that share one."""
    return unit.work(spread.tp, min((cp for tp, cp in unit.degrees if tp == spread.tp), default=1))


def state_bytes(
    setting: Setting, unit: UnitCosts, spread: Parallelism, *, shard: int = 1, devices: float = 1.0
) -> Floats:
    """Return what parameters, gradients and the optimizer take on a device of each row of a replica. [pp]

    Those that divide a copy have equal parts of all of it; else the optimizer alone is spread, over all replicas. Of
    state that is spread there are copies as the job's redundancy asks for; gradients are none. Of devices in the
    direction of context parallelism each has all parameters: of these, those that are left have no more.

    Args:
        setting: The job.
        unit: The unit.
        spread: How it is spread.
        shard: Devices that divide a copy.
        devices: Part of a replica's devices that is left.
    """
    copies = spread.dp * spread.cp * devices
    part, whole = float(setting.sharded_part(copies)), 1 / min(spread.cp * devices, 1.0)
    of_gradients = of_parameters = whole
    if shard > 1:
        of_gradients = whole / min(shard, spread.dp * spread.cp)
        of_parameters = part = max(of_gradients, part)
    parameters = by_stage(spread, [layer.parameter_bytes for layer in unit.layers]) * of_parameters
    gradients = by_stage(spread, [layer.gradient_bytes for layer in unit.layers]) * of_gradients
    optimizer = by_stage(spread, [layer.optimizer_bytes for layer in unit.layers]) * part
    return by_row(spread, parameters + gradients + optimizer) / spread.tp


def gathered_bytes(units: Sequence[UnitCosts], configuration: Configuration) -> float:
    """Return what a device holds beside its part: the layer that computes, and the one that comes in meanwhile."""
    if configuration.shard == 1:
        return 0.0
    return 2 * max(
        (layer.parameter_bytes + layer.gradient_bytes) / configuration.units[unit.name].tp
        for unit in units
        for layer in unit.layers
    )


def kept_bytes(unit: UnitCosts, spread: Parallelism) -> Floats:
    """Return what each token keeps on a device of each stage, from forward to backward. [num_stages]

    Layers without a backward keep nothing.
    """
    index = unit.index(spread.tp, spread.cp)
    ends = np.cumsum(spread.stage_layers)[:-1]
    passed = np.split(np.array([layer.has_backward for layer in unit.layers]), ends)
    kept = np.split(np.array([layer.curves[index].activation_bytes for layer in unit.layers]), ends)
    found = [token_bytes(unit, spread, spread.cp, each[some]) for each, some in zip(kept, passed, strict=True)]
    return np.array(found)


def num_recomputed(spread: Parallelism, num_layers: int) -> int:
    """Return how many of the layers of a stage that have a backward run again in it: the first ones."""
    return int(np.ceil(spread.recompute * num_layers - 1e-9))


def token_bytes(unit: UnitCosts, spread: Parallelism, degree: int, of_layers: Floats) -> float:
    """Return what a token keeps on each of the devices that share it, of layers of a stage that have a backward.

    Layers that run again keep their inputs, and the one that does so has all of its activations.
    """
    number = num_recomputed(spread, len(of_layers))
    again = of_layers[:number]
    return number * unit.boundary_bytes / degree + float(again.max(initial=0.0) + of_layers[number:].sum())


def gradient_sum_ms(unit: UnitCosts, spread: Parallelism, cluster: Cluster, shard: int = 1) -> Floats:
    """Return how long rings over the replicas (and context-parallel devices) sum each stage's gradients.

    Stages do so at the same time, after their last backward. Of devices that divide a copy, each sums its part with
    those that have the same one. [num_stages]
    """
    shard = min(shard, spread.dp * spread.cp)
    num_bytes = by_stage(spread, [layer.gradient_bytes for layer in unit.layers]) / spread.tp / shard
    return ring_ms(num_bytes, spread.dp * spread.cp / shard, spread.num_devices, cluster)


def exposed_sum_ms(
    units: Sequence[UnitCosts],
    spreads: Mapping[str, Parallelism],
    cluster: Cluster,
    backward_ms: Mapping[str, Floats],
) -> float:
    """Return how much longer a step takes because gradients are summed: what of the sums no backward hides.

    Beyond the papers, whose predictions end with the last backward; without this, they choose many small replicas whose
    sums take as long as the step. A layer's sum starts when its last backward ends, and those of a stage follow each
    other. While a stage sums, the stages before it still run their last backward, and after the language model's first
    stage so do encoders. Where encoders run all their backwards after the language model's, ask for them and for the
    language model apart.

    Args:
        units: Those that are summed.
        spreads: How each is spread.
        cluster: The nodes.
        backward_ms: By unit, what a microbatch's backward takes on each stage; 0 where there is none.
    """
    names = [unit.name for unit in units]
    encoders = names[: names.index(LLM)] if LLM in names else []
    encoders_ms = max((float(backward_ms[name].sum()) for name in encoders), default=0.0)
    exposed = 0.0
    for unit in units:
        spread = spreads[unit.name]
        sums = gradient_sum_ms(unit, spread, cluster)
        left = float(unhidden_ms(sums, backward_ms[unit.name], np.array(spread.stage_layers)))
        exposed = max(exposed, left - encoders_ms if unit.name == LLM else left)
    return exposed


def unhidden_ms(sums_ms: Floats, backward_ms: Floats, layers: Ints) -> Floats:
    """Return how long after the last backward of its first stage a unit has summed its gradients; negative if before.

    Args:
        sums_ms: Of each stage, ``[..., num_stages]``.
        backward_ms: A microbatch's, ``[num_stages]``.
        layers: Of each stage, ``[num_stages]``.
    """
    before = np.cumsum(backward_ms) - backward_ms
    return (np.maximum(sums_ms - backward_ms, sums_ms / layers) - before).max(axis=-1)


def ring_ms(num_bytes: Floats, ring: npt.ArrayLike, num_devices: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how long rings take to sum so many bytes on each of their devices; nothing to sum takes no time.

    Args:
        num_bytes: Any shape that goes with those of the next two.
        ring: Devices of each ring.
        num_devices: Of the whole unit: within a node, rings are, too.
        cluster: The nodes.
    """
    return 2 * _around_ms(num_bytes, ring, num_devices, cluster)


def gathers_ms(unit: UnitCosts, spread: Parallelism, cluster: Cluster, shard: int) -> tuple[Floats, Floats]:
    """Return how long the messages of devices that divide a copy take: parameters before a forward; before a backward
    again, and then gradients. Each [num_stages]."""
    ring = min(shard, spread.dp * spread.cp)
    gather, scatter = (
        _around_ms(np.array(num_bytes) / spread.tp, ring, ring * spread.pp * spread.tp, cluster)
        for num_bytes in (
            [layer.parameter_bytes for layer in unit.layers],
            [layer.gradient_bytes * layer.trainable for layer in unit.layers],
        )
    )
    passed = np.array([layer.has_backward for layer in unit.layers])
    return by_stage(spread, gather), by_stage(spread, gather * passed + scatter)


def _around_ms(num_bytes: Floats, ring: npt.ArrayLike, num_devices: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how long bytes, of which each device has an equal part, take until all of a ring have had all."""
    size, devices = np.asarray(ring, dtype=np.float64), np.asarray(num_devices)
    part = num_bytes / size
    # Of what leaves a node, the cards of all devices that a ring has there take equal parts.
    members = np.clip(cluster.devices_per_node * size / devices, 1.0, size)
    near = _message_ms(cluster.intra_node, part)
    far = _message_ms(cluster.inter_node, part / (members * cluster.cards_per_device))
    far = np.where(members > 1, np.maximum(near, far), far)
    return np.where(num_bytes > 0, (size - 1) * np.where(devices <= cluster.devices_per_node, near, far), 0.0)


def _message_ms(link: Link, num_bytes: Floats) -> Floats:
    return link.latency_ms + (0.0 if link.bytes_per_s is None else 1e3 / link.bytes_per_s) * num_bytes


def by_stage(spread: Parallelism, values: npt.ArrayLike) -> Floats:
    """Return the sum over each stage's layers. [num_stages]"""
    return np.add.reduceat(np.asarray(values, dtype=np.float64), firsts_of(spread))


def firsts_of(spread: Parallelism) -> Ints:
    """Return the first layer of each stage. [num_stages]"""
    return np.concatenate(([0], np.cumsum(spread.stage_layers)[:-1])).astype(np.int64)
