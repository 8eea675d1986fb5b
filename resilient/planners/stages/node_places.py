"""On which nodes devices are: what crosses from one to another, and what the one with fewest has to hold.

Pipelines have consecutive devices, one pipeline after the other, as :mod:`resilient.planners.stages.degraded_replicas`
takes them away; within a pipeline, lanes and their stages follow each other. They need not end where nodes do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Parallelism
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.templates.common.arrays import Flags, Floats, Ints


def in_one_node(layout: DeviceLayout, rows: Ints, others: Ints, devices_per_node: int) -> Flags:
    """Return whether all devices of two rows are in the same node.

    Args:
        layout: Where rows are.
        rows: Some of them; any shape.
        others: As many.
        devices_per_node: As it says.
    """
    lowest = np.minimum(layout.firsts[rows], layout.firsts[others])
    highest = np.maximum(*(layout.firsts[each] + layout.sizes[each] - 1 for each in (rows, others)))
    return lowest // devices_per_node == highest // devices_per_node


def nodes_of_state(layout: DeviceLayout, spread: Parallelism, name: str, devices_per_node: int) -> Ints:
    """Return the node of each device that has what a tensor-parallel rank of a stage of a unit holds.

    Args:
        layout: Where rows are.
        spread: Of the unit, as configured.
        name: Of the unit.
        devices_per_node: As it says.

    Returns:
        By stage and rank, of all lanes and context-parallel ranks. [num_stages, tp, num_devices]
    """
    rows = layout.rows[layout.host(name)]
    if layout.replicated and name != LLM:
        rows = rows.reshape(-1, 1)  # every stage has all of it
    ranks = np.arange(spread.tp)[:, None] + spread.tp * np.arange(spread.cp)
    devices = layout.firsts[rows][:, :, None, None] + ranks  # [num_lanes, num_stages, tp, cp]
    nodes = np.moveaxis(devices // devices_per_node, 0, -2)
    return nodes.reshape(rows.shape[1], spread.tp, -1)


def least_members(nodes: Ints) -> Ints:
    """Return how many members a ring has on the node where it has fewest; all of them where it is inside one.

    Args:
        nodes: Of its members. [..., num_members]
    """
    return _on_node(nodes).min(axis=-1)


def rings_of(nodes: Ints, shard: int) -> Ints:
    """Return the nodes of the devices that divide each copy, which are consecutive.

    Those that have the same part of all copies are a ring, too.

    Args:
        nodes: Of all devices that hold something. [num_stages, tp, num_devices]
        shard: Devices that divide a copy, at most all of them.

    Returns:
        By stage, rank, copy, and part. [num_stages, tp, num_copies, shard]
    """
    shard = min(shard, nodes.shape[-1])
    copies = nodes.shape[-1] // shard
    return nodes[..., : copies * shard].reshape(*nodes.shape[:-1], copies, shard)


def part_of_each(nodes: Ints, copies: npt.ArrayLike) -> Floats:
    """Return the part that each device has of what all share, if each piece of it is on so many nodes.

    Where nodes have unequally many devices, those on a node with few have more: no node has a piece twice.

    Args:
        nodes: Of the devices. [..., num_devices]
        copies: Of each piece; at most as many as there are nodes.
    """
    most = np.sort(1 / _on_node(nodes), axis=-1)  # that a device can have while its node has all
    before = np.cumsum(most, axis=-1) - most
    wanted = np.minimum(np.asarray(copies, dtype=np.float64), most.sum(axis=-1))[..., None]
    left = nodes.shape[-1] - np.arange(nodes.shape[-1])
    return ((wanted - before) / left).max(axis=-1)


def _on_node(nodes: Ints) -> Ints:
    """Return how many are on the node of each, in the order of the nodes. [..., num_members]"""
    number = nodes.shape[-1]
    another = np.diff(np.sort(nodes, axis=-1), axis=-1) != 0
    edge = np.ones((*nodes.shape[:-1], 1), np.bool_)
    first = np.where(np.concatenate([edge, another], axis=-1), np.arange(number), 0)
    last = np.where(np.concatenate([another, edge], axis=-1), np.arange(number), number)
    ends = np.minimum.accumulate(last[..., ::-1], axis=-1)[..., ::-1]
    return ends - np.maximum.accumulate(first, axis=-1) + 1
