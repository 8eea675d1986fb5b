"""Which replicas are left of a configuration when nodes are lost: the unequal pipelines planners balance for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Configuration, Parallelism, Replica, Setting
from resilient.planners.stages.device_layout import DeviceLayout, lane_part, used_devices
from resilient.planners.stages.node_places import nodes_of_state, part_of_each
from resilient.planners.stages.stage_work import state_bytes
from resilient.templates.common.arrays import Floats


def degraded_replicas(setting: Setting, configuration: Configuration, lost_nodes: int) -> tuple[Replica, ...]:
    """Return the language model's replicas after nodes were lost.

    A replica with its share of all encoders has equally many consecutive devices. Nodes without any take the place of
    lost ones. The others that are lost lie as far apart as they can. A replica that lost some of its devices goes on
    with those left, slower by as much; one that lost all is gone. Those whose devices have no memory for the state of a
    replica put them together: to whole replicas, and one of what is left over, if it has. The step's
    microbatches are given out by speed, one at least to each.

    Args:
        setting: The job.
        configuration: How it used its devices.
        lost_nodes: How many of its nodes are lost, 0 or more.

    Raises:
        ValueError: No node is left, or the devices that are left have no memory for the state of any replica.
    """
    if not 0 <= lost_nodes < setting.num_nodes:
        raise ArgumentError("lost_nodes", f"be 0 to {setting.num_nodes - 1}", lost_nodes, "leave a node")
    dp = configuration.units[LLM].dp
    used = used_devices(configuration)
    num_nodes = -(-used // setting.cluster.devices_per_node)
    missed = max(0, num_nodes - (setting.num_nodes - lost_nodes))
    lost = np.arange(missed) * num_nodes // max(missed, 1)
    alive = ~np.isin(np.arange(used) // setting.cluster.devices_per_node, lost)
    # In dp-ths of devices: where replicas share those of encoders, a device may be of two.
    parts = np.repeat(alive, dp).reshape(dp, used).mean(axis=1)
    speeds = _with_memory(setting, configuration, parts, lost_nodes)
    total = dp * configuration.num_microbatches
    exact = total * speeds / speeds.sum()
    if configuration.shard > 1:
        # Those of replicas that divide a copy are in step, so all have as many.
        exact = np.full(len(speeds), np.ceil(exact.max() - 1e-9))
        total = int(exact.sum())
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() > total:
        counts[counts.argmax()] -= 1
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return tuple(
        Replica(num_microbatches=int(count), speed=float(speed), devices=float(speed))
        for count, speed in zip(counts, speeds, strict=True)
    )


def left_bytes(
    setting: Setting, unit: UnitCosts, spread: Parallelism, configuration: Configuration, replicas: Sequence[Replica]
) -> Floats:
    """Return the state of a unit on a device of each replica's rows. [num_replicas, pp]

    Devices that are left of a replica hold all of it, and fewer replicas have more of the optimizer each. Of nothing
    that is spread there are more copies than nodes.

    Args:
        setting: The job.
        unit: The unit.
        spread: How it is spread, as configured.
        configuration: Of all units.
        replicas: Of the language model, as they are now.
    """
    setting = _with_possible_copies(setting, configuration, replicas)
    left = min(max(spread.dp * len(replicas) // configuration.units[LLM].dp, 1), spread.dp)
    there = lane_part(spread, configuration.units[LLM], len(replicas))
    fullest = _fullest_part(setting, unit, configuration, len(replicas))
    of_part: dict[float, Floats] = {}
    for part in {each.devices for each in replicas}:
        devices = part * there
        of_part[part] = state_bytes(
            setting,
            unit,
            replace(spread, dp=left),
            shard=configuration.shard,
            devices=devices,
            least_part=np.minimum(fullest / devices, 1.0),
        )
    return np.stack([of_part[each.devices] for each in replicas])


def _with_possible_copies(setting: Setting, configuration: Configuration, replicas: Sequence[Replica]) -> Setting:
    """Return the job with as much redundancy as the nodes that replicas are on can hold."""
    if setting.num_pipelines or not setting.max_failures:  # others have the copies; there is but one
        return setting
    devices = sum(each.devices for each in replicas) * used_devices(configuration) / configuration.units[LLM].dp
    nodes = max(1, math.ceil(devices / setting.cluster.devices_per_node - 1e-9))
    return replace(setting, max_failures=min(setting.max_failures, nodes - 1))


def _fullest_part(setting: Setting, unit: UnitCosts, configuration: Configuration, num_replicas: int) -> Floats:
    """Return the part of a stage's optimizer on the device that has most, as nodes divide its copies. [num_stages]"""
    if not setting.max_failures:
        return np.zeros(1)  # every device has as much
    layout = DeviceLayout(configuration, num_replicas)
    spread = configuration.units[unit.name]
    nodes = nodes_of_state(layout, spread, unit.name, setting.cluster.devices_per_node)
    return part_of_each(nodes, setting.max_failures + 1).max(axis=1)


def ranks_left(spread: Parallelism, devices: float) -> int:
    """Return how many whole ranks of context parallelism the devices that are left of a replica are, one at least.

    Args:
        spread: Of the unit, as configured.
        devices: Part of the replica's devices that is left.
    """
    return max(1, int(spread.cp * devices + 1e-9))


def tokens_held(spread: Parallelism, devices: float) -> float:
    """Return how many times the tokens of before a device holds of a microbatch when others of its replica are lost.

    Of those that share sequences, the ones that are left have larger parts, the last one all. Stages and ranks of
    tensor parallelism are cut anew instead: the first of fewer stages keeps more layers of fewer microbatches.

    Args:
        spread: Of the unit, as configured.
        devices: Part of the replica's devices that is left.
    """
    return min(1 / devices, spread.cp)


def _with_memory(setting: Setting, configuration: Configuration, parts: Floats, lost_nodes: int) -> Floats:
    """Return which parts of their devices replicas have, those that lack memory for a replica's state put together."""
    memory, found = setting.cluster.memory_bytes, parts[parts > 0]
    if memory is None or (parts == 1).all():
        return found
    together = found
    while len(found):
        lacking = _state_bytes(setting, configuration, found) >= memory
        if not lacking.any():
            return found
        few = found[lacking]
        found = np.concatenate((found[~lacking], _put_together(few) if len(few) > 1 and few.max() < 1 else []))
    # What was too small for itself may be what others need.
    together = _put_together(together)
    together = together[: max(1, int(together.sum()))]
    needed = float(_state_bytes(setting, configuration, together).min())
    if needed >= memory:
        raise ArgumentError(
            "lost_nodes",
            "leave devices with memory for the state of a replica",
            f"{lost_nodes}, after which it takes {needed:.0f} bytes or more of each one's {memory}",
            "lose fewer, or use larger devices",
        )
    return together


def _put_together(parts: Floats) -> Floats:
    """Return the whole replicas that parts make, and what is left over."""
    total = round(float(parts.sum()), 9)
    return np.concatenate((np.ones(int(total)), [total % 1] if total % 1 else []))


def _state_bytes(setting: Setting, configuration: Configuration, parts: Floats) -> Floats:
    """Return the state on a device of replicas with these parts of their devices. [num_parts]"""
    replicas = [Replica(num_microbatches=1, devices=float(part)) for part in parts]
    units = [
        left_bytes(setting, setting.costs.by_name[name], spread, configuration, replicas).max(axis=1)
        for name, spread in configuration.units.items()
    ]
    return np.sum(units, axis=0) if configuration.colocated else np.max(units, axis=0)
