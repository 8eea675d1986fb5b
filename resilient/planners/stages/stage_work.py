"""What the stages of a unit take: state, what a token keeps, sums of gradients and other messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.stages.virtual_stages import by_row
from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.halves import Halves
from resilient.templates.inputs.cluster import Cluster, Link


def dealt_by(unit: UnitCosts, spread: Parallelism) -> Curve:
    """Return the work by which a unit's samples are dealt over its lanes: that of the fewest devices that share one."""
    return unit.work(spread.tp, min((cp for tp, cp in unit.degrees if tp == spread.tp), default=1))


def state_bytes(
    setting: Setting,
    unit: UnitCosts,
    spread: Parallelism,
    *,
    shard: int = 1,
    devices: float = 1.0,
    least_part: npt.ArrayLike = 0.0,
) -> Floats:
    """Return what parameters, gradients and the optimizer take on a device of each row of a replica. [pp]

    Those that divide a copy have equal parts of all of it; else the optimizer alone is spread, over all replicas, but
    not over pipelines as the runtime runs them, whose devices have all of it. Of state that is spread there are copies
    as the job's redundancy asks for; gradients are none. Of devices in the direction of context parallelism each has
    all parameters: of these, those that are left have no more.

    Args:
        setting: The job.
        unit: The unit.
        spread: How it is spread.
        shard: Devices that divide a copy.
        devices: Part of a replica's devices that is left.
        least_part: What the fullest device has at least of the state that is spread, of each stage.
    """
    copies = spread.dp * spread.cp * devices
    part, whole = np.maximum(setting.sharded_part(copies), least_part), 1 / min(spread.cp * devices, 1.0)
    of_gradients = of_parameters = whole
    if setting.num_pipelines:
        part = whole
    if shard > 1:
        of_gradients = whole / min(shard, spread.dp * spread.cp)
        of_parameters = part = of_gradients if setting.num_pipelines else np.maximum(of_gradients, part)
    parameters = by_stage(spread, [layer.parameter_bytes for layer in unit.layers]) * of_parameters
    gradients = by_stage(spread, unit.gradient_bytes) * of_gradients
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
    found: list[float] = []
    for first, number in zip(spread.first_layers.tolist(), spread.stage_layers, strict=True):
        passed = [layer.curves[index] for layer in unit.layers[first : first + number] if layer.has_backward]
        tables = [(each.activation_bytes, each.entered_bytes, each.given_bytes) for each in passed]
        found.append(token_bytes(unit, spread, spread.cp, kept_by_layers(tables)))
    return np.array(found)


def kept_by_layers(layers: Sequence[tuple[float, float, float]]) -> Floats:
    """Return what each of a stage's layers that have a backward keeps, per token. [num_layers]

    The first one holds what enters the stage, an inner one as far as it or the one before keeps that.

    Args:
        layers: Of each what :class:`~resilient.planners.costs.curves.LayerCurves` says of activations, what enters,
            and what is given on.
    """
    kept, entered, given = np.array(layers, np.float64).reshape(-1, 3).T
    return kept + np.append(entered[:1], np.minimum(entered[1:], given[:-1]))


def stage_halves(unit: UnitCosts, spread: Parallelism, shard: int = 1) -> list[Halves]:
    """Return which halves each stage's backward has, where they run apart.

    Args:
        unit: The unit.
        spread: How it is spread.
        shard: Devices that divide a copy.
    """
    trained = by_stage(spread, [layer.trainable for layer in unit.layers]) > 0
    again, sharded = spread.recompute > 0, shard > 1
    return [
        Halves.of(trains=trains, wanted=unit.layers[first].input_gradient, again=again, sharded=sharded)
        for trains, first in zip(trained.tolist(), spread.first_layers.tolist(), strict=True)
    ]


def halved(unit: UnitCosts, spread: Parallelism, shard: int = 1) -> Flags:
    """Return which stages run their backward in halves, where schedules do; others do it at once. [num_stages]

    Args:
        unit: The unit.
        spread: How it is spread.
        shard: Devices that divide a copy.
    """
    return np.array([each.both for each in stage_halves(unit, spread, shard)])


def first_differentiated(unit: UnitCosts, spread: Parallelism) -> int:
    """Return the first stage that has a backward, after frozen ones that have none; 0 where no stage has any."""
    return int((by_stage(spread, [layer.has_backward for layer in unit.layers]) > 0).argmax())


def deferred_bytes(unit: UnitCosts, spread: Parallelism) -> Floats:
    """Return what each token keeps besides on a device of each stage between halves of a backward. [num_stages]"""
    index = unit.index(spread.tp, spread.cp)
    each = by_stage(spread, [layer.curves[index].deferred_bytes * layer.trainable for layer in unit.layers])
    return each * halved(unit, spread)


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
    num_bytes = by_stage(spread, unit.gradient_bytes) / spread.tp / shard
    return ring_ms(num_bytes, spread.dp * spread.cp / shard, spread.num_devices, cluster)


def exposed_sum_ms(
    units: Sequence[UnitCosts],
    spreads: Mapping[str, Parallelism],
    cluster: Cluster,
    backward_ms: Mapping[str, Floats],
    shard: int = 1,
) -> float:
    """Return how much longer a step takes because gradients are summed: what of the sums no backward hides.

    Beyond the papers, whose predictions end with the last backward; without this, they choose many small replicas whose
    sums take as long as the step. A layer's sum starts when its last backward ends, and those of a stage follow each
    other. While a stage sums, the stages before it still run their last backward, and after the language model's first
    stage so do encoders. Where these share its devices and run all their backwards after its own, it is
    :func:`shared_sum_ms`.

    Args:
        units: Those that are summed.
        spreads: How each is spread.
        cluster: The nodes.
        backward_ms: By unit, what a microbatch's backward takes on each stage; 0 where there is none.
        shard: Devices that divide a copy.
    """
    names = [unit.name for unit in units]
    encoders = names[: names.index(LLM)] if LLM in names else []
    encoders_ms = max((float(backward_ms[name].sum()) for name in encoders), default=0.0)
    exposed = 0.0
    for unit in units:
        spread = spreads[unit.name]
        sums = gradient_sum_ms(unit, spread, cluster, shard)
        left = float(unhidden_ms(sums, backward_ms[unit.name], sums * last_part(unit, spread)))
        exposed = max(exposed, left - encoders_ms if unit.name == LLM else left)
    return exposed


def shared_sum_ms(
    units: Sequence[UnitCosts],
    spreads: Mapping[str, Parallelism],
    cluster: Cluster,
    backward_ms: Mapping[str, Floats],
    encoding_ms: float,
    shard: int = 1,
) -> float:
    """Return the same where all units share devices, whose sums follow each other, and encoders' backwards come last.

    Args:
        units: Those that are summed.
        spreads: How each is spread.
        cluster: The nodes.
        backward_ms: As there.
        encoding_ms: What the encoders' backwards take, after the language model's.
        shard: Devices that divide a copy.
    """
    left = 0.0
    for unit in sorted(units, key=lambda unit: unit.name != LLM):
        own = exposed_sum_ms([unit], spreads, cluster, backward_ms, shard)
        if unit.name == LLM:
            left = own - encoding_ms
        else:
            left = max(own, left + float(gradient_sum_ms(unit, spreads[unit.name], cluster, shard).max()))
    return max(left, 0.0)


def last_part(unit: UnitCosts, spread: Parallelism) -> Floats:
    """Return the part of each stage's gradients that is final last: that of its first layer that has one.

    An embedding has many times what the layers after it do. [num_stages]
    """
    total = by_stage(spread, unit.gradient_bytes)
    return np.divide(
        final_last(unit.gradient_bytes, spread.first_layers), total, out=np.zeros_like(total), where=total > 0
    )


def final_last(gradient_bytes: Floats, firsts: Ints) -> Floats:
    """Return the gradient that is final last in each stage: of its first layer that has one. [num_stages]

    Args:
        gradient_bytes: Of each layer.
        firsts: The first layer of each stage.
    """
    none = len(gradient_bytes)
    own = np.minimum.reduceat(np.where(gradient_bytes > 0, np.arange(none), none), firsts)
    return np.append(np.asarray(gradient_bytes, np.float64), 0.0)[own]


def unhidden_ms(sums_ms: Floats, backward_ms: Floats, last_ms: Floats) -> Floats:
    """Return how long after the last backward of its first stage a unit has summed its gradients; negative if before.

    Args:
        sums_ms: Of each stage, ``[..., num_stages]``.
        backward_ms: A microbatch's, ``[num_stages]``.
        last_ms: Of the sums, what can only begin after a stage's last backward; of the shape of the first.
    """
    before = np.cumsum(backward_ms) - backward_ms
    return (np.maximum(sums_ms - backward_ms, last_ms) - before).max(axis=-1)


def ring_ms(num_bytes: Floats, ring: npt.ArrayLike, num_devices: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how long rings take to sum so many bytes on each of their devices; nothing to sum takes no time.

    Args:
        num_bytes: Any shape that goes with those of the next two.
        ring: Devices of each ring.
        num_devices: Of the whole unit: within a node, rings are, too.
        cluster: The nodes.
    """
    return placed_ring_ms(num_bytes, ring, _members(ring, num_devices, cluster), cluster)


def placed_ring_ms(num_bytes: Floats, ring: npt.ArrayLike, members: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how long rings take to sum so many bytes on each of their devices; nothing to sum takes no time.

    Args:
        num_bytes: Any shape that goes with those of the next two.
        ring: Devices of each ring.
        members: Of them, those on the node that has fewest: all where the ring is within one.
        cluster: The nodes.
    """
    return 2 * _around_ms(num_bytes, ring, members, cluster)


def gathers_ms(
    unit: UnitCosts, spread: Parallelism, cluster: Cluster, shard: int, members: npt.ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """Return how long the messages of devices that divide a copy take: parameters before a forward; before a backward
    again, and then gradients. Each [num_stages].

    Args:
        unit: The unit.
        spread: How it is spread.
        cluster: The nodes.
        shard: Devices that divide a copy.
        members: Of them, those on the node that has fewest, of each stage; None where stages lie as if alone.
    """
    ring = min(shard, spread.dp * spread.cp)
    if members is None:
        members = _members(ring, ring * spread.pp * spread.tp, cluster)
    of_layers = np.repeat(np.broadcast_to(members, spread.num_stages), spread.stage_layers)
    gather, scatter = (
        _around_ms(np.array(num_bytes) / spread.tp, ring, of_layers, cluster)
        for num_bytes in (
            [layer.parameter_bytes for layer in unit.layers],
            [layer.gradient_bytes * layer.trainable for layer in unit.layers],
        )
    )
    passed = np.array([layer.has_backward for layer in unit.layers])
    return by_stage(spread, gather), by_stage(spread, gather * passed + scatter)


def _members(ring: npt.ArrayLike, num_devices: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how many devices of a ring are on each node, if the rings of a unit fill one after the other."""
    size = np.asarray(ring, dtype=np.float64)
    return np.clip(cluster.devices_per_node * size / np.asarray(num_devices), 1.0, size)


def _around_ms(num_bytes: Floats, ring: npt.ArrayLike, members: npt.ArrayLike, cluster: Cluster) -> Floats:
    """Return how long bytes, of which each device has an equal part, take until all of a ring have had all."""
    size, own = np.asarray(ring, dtype=np.float64), np.asarray(members, dtype=np.float64)
    part = num_bytes / size
    # Of what leaves a node, the cards of all devices that a ring has there take equal parts.
    near = _message_ms(cluster.intra_node, part)
    far = _message_ms(cluster.inter_node, part / (own * cluster.cards_per_device))
    far = np.where(own > 1, np.maximum(near, far), far)
    return np.where(num_bytes > 0, (size - 1) * np.where(own < size, far, near), 0.0)


def _message_ms(link: Link, num_bytes: Floats) -> Floats:
    return link.latency_ms + (0.0 if link.bytes_per_s is None else 1e3 / link.bytes_per_s) * num_bytes


def by_stage(spread: Parallelism, values: npt.ArrayLike) -> Floats:
    """Return the sums over each stage's layers, which are the last axis. [..., num_stages]"""
    return np.add.reduceat(np.asarray(values, dtype=np.float64), spread.first_layers, axis=-1)
