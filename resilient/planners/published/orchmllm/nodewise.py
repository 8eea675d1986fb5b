"""Which node gets which balanced batch, such that little crosses between nodes.

Source: OrchMLLM, node-wise rearrangement. Balanced batches are alike, so any instance may take any of them. With
x[i, k] = 1 where batch i goes to node k, one node for each batch and as many batches on a node as it has instances, the
largest volume that a node sends to or receives from others is to be least. The paper solves that as an integer program,
which for all turns of a step would take longer than the step. Here it is solved exactly where each node has one
instance, as in the planner, whose nodes are replicas, and there are not too many: what a node sends and receives then
depends on its own batch alone, so it is a bottleneck assignment. Else the answer need not be the best: batches start
from the pairs that keep most on their node, and are exchanged two at a time, one of them on the worst node.
"""

from __future__ import annotations

import numpy as np

from resilient.planners.packing.matching import match_all
from resilient.templates.common.arrays import Floats, Ints

_EXACT = 128
"""Instances up to which an assignment takes some milliseconds."""

_EXCHANGES = 2**25
"""Considered at most: some tenths of a second."""


def rearrange(volumes: Floats, nodes: Ints, kinds: Ints) -> Ints:
    """Return an instance for each batch; never worse than batch i on instance i. Deterministic.

    Up to 128 instances, one on each node, none is better, nor as good with less volume of all nodes together.

    Args:
        volumes: What of each batch lies on each node beforehand, >= 0. [num_instances, num_nodes]
        nodes: Of each instance. [num_instances]
        kinds: Of each instance; batch i is balanced for the speed of instance i, and goes to one of the same kind.
    """
    if len(nodes) <= _EXACT and len(np.unique(nodes)) == len(nodes):
        return _matched(volumes, nodes, kinds)
    volumes, kind, free = _numbered(volumes, nodes, kinds)
    found = [np.asarray(nodes, dtype=np.int64), *_searched(volumes, kind, free, nodes)]
    return _instances(min(found, key=lambda each: largest_volume(volumes, each)), nodes, kind)


def largest_volume(volumes: Floats, node_of: Ints) -> float:
    """Return the most that a node sends or receives when each batch goes to a node.

    Args:
        volumes: As for :func:`rearrange`.
        node_of: Of each batch. [num_instances]
    """
    if not volumes.size:
        return 0.0
    num_nodes = volumes.shape[1]
    kept = np.bincount(node_of, weights=volumes[np.arange(len(volumes)), node_of], minlength=num_nodes)
    sent = volumes.sum(axis=0) - kept
    received = np.bincount(node_of, weights=volumes.sum(axis=1), minlength=num_nodes) - kept
    return float(max(sent.max(), received.max(), 0.0))


def _matched(volumes: Floats, nodes: Ints, kinds: Ints) -> Ints:
    """Match batches with instances, each of which is alone on its node."""
    kept = volumes[:, nodes]
    crossing = np.maximum(volumes.sum(axis=0)[nodes] - kept, volumes.sum(axis=1)[:, None] - kept)
    return match_all(np.where(kinds[:, None] == kinds, crossing, np.inf))


def _numbered(volumes: Floats, nodes: Ints, kinds: Ints) -> tuple[Floats, Ints, Ints]:
    """Return volumes, kinds numbered from 0, and the instances of each kind on each node. [num_kinds, num_nodes]"""
    kind = np.unique(kinds, return_inverse=True)[1].astype(np.int64)
    free = np.zeros((int(kind.max(initial=-1)) + 1, volumes.shape[1]), dtype=np.int64)
    np.add.at(free, (kind, nodes), 1)
    return np.ascontiguousarray(volumes, dtype=np.float64), kind, free


def _searched(volumes: Floats, kind: Ints, free: Ints, nodes: Ints) -> list[Ints]:
    """Exchange batches, from where most is kept and from where they are."""
    from resilient.planners.packing.kernels import descending
    from resilient.planners.published.orchmllm.nodewise_kernels import exchange, keep_most

    batch, node = np.nonzero(volumes)
    order = descending(np.ascontiguousarray(volumes[batch, node]))
    start = keep_most(batch[order].astype(np.int64), node[order].astype(np.int64), kind, free.copy())
    stay = np.array(nodes, dtype=np.int64)
    for each in (start, stay):
        exchange(volumes, kind, each, _EXCHANGES // 2)
    return [start, stay]


def _instances(node_of: Ints, nodes: Ints, kind: Ints) -> Ints:
    """Return an instance of its node for each batch; one that stays on its node stays where it is."""
    instance = np.where(node_of == nodes, np.arange(len(nodes)), -1).astype(np.int64)
    moved = np.flatnonzero(instance < 0)  # their instances are free
    by_target = moved[np.lexsort((moved, node_of[moved], kind[moved]))]
    instance[by_target] = moved[np.lexsort((moved, nodes[moved], kind[moved]))]
    return instance
