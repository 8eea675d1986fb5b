"""Which node gets which balanced batch, such that little crosses between nodes.

Source: OrchMLLM, node-wise rearrangement. Balanced batches are alike, so any instance may take any of them. With
x[i, k] = 1 where batch i goes to node k, one node for each batch and as many batches on a node as it has instances, the
largest volume that a node sends to or receives from others is to be least. HiGHS solves small cases. Larger ones
start from the pairs that keep most on their node, and exchange two batches at a time, one of them on the worst node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from resilient.templates.common.arrays import Floats, Ints

SOLVED = 64
"""Batches times nodes up to which HiGHS takes some tens of milliseconds."""

_SOLVER_NODES = 2000
"""Of its search tree. A limit of time would make the answer depend on the machine."""

_EXCHANGES = 2**25
"""Considered at most: some tenths of a second."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rearrangement:
    """An instance for each batch, and how good that is.

    Args:
        instance: Of each batch. [num_batches]
        volume: The most that a node sends or receives.
        identity_volume: The same when batch i stays on instance i.
        lower_bound: No rearrangement has less.
    """

    instance: Ints
    volume: float
    identity_volume: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """By what part of the lower bound the volume may be above the least possible."""
        return self.volume / self.lower_bound - 1 if self.lower_bound else float(self.volume > 0)


def rearrange(volumes: Floats, nodes: Ints, kinds: Ints) -> Rearrangement:
    """Choose an instance for each batch; never worse than batch i on instance i. Deterministic.

    Args:
        volumes: What of each batch lies on each node beforehand, >= 0. [num_instances, num_nodes]
        nodes: Of each instance. [num_instances]
        kinds: Of each instance; batch i is balanced for the speed of instance i, and goes to one of the same kind.
    """
    volumes, kind, free = _numbered(volumes, nodes, kinds)
    identity = largest_volume(volumes, nodes)
    least = _lower_bound(volumes, free.sum(axis=0))
    found = [np.asarray(nodes, dtype=np.int64), *_searched(volumes, kind, free, nodes)]
    values = [largest_volume(volumes, each) for each in found]
    if volumes.size <= SOLVED and min(values) > least:
        solved, bound = _solve(volumes, kind, free)
        if solved is not None:
            found.append(solved)
            values.append(largest_volume(volumes, solved))
        least = max(least, bound)
    best = int(np.argmin(values))
    return Rearrangement(
        instance=_instances(found[best], nodes, kind),
        volume=values[best],
        identity_volume=identity,
        lower_bound=min(least, values[best]),
    )


def rearrange_quickly(volumes: Floats, nodes: Ints, kinds: Ints) -> Ints:
    """Return an instance for each batch as :func:`rearrange` does, without HiGHS and without knowing how good it is.

    Args:
        volumes: As there; likewise the others.
    """
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


def _numbered(volumes: Floats, nodes: Ints, kinds: Ints) -> tuple[Floats, Ints, Ints]:
    """Return volumes, kinds numbered from 0, and the instances of each kind on each node. [num_kinds, num_nodes]"""
    kind = np.unique(kinds, return_inverse=True)[1].astype(np.int64)
    free = np.zeros((int(kind.max(initial=-1)) + 1, volumes.shape[1]), dtype=np.int64)
    np.add.at(free, (kind, nodes), 1)
    return np.ascontiguousarray(volumes, dtype=np.float64), kind, free


def _lower_bound(volumes: Floats, capacity: Ints) -> float:
    """At best every batch goes where most of it lies, and every node keeps the batches of which it has most."""
    if not volumes.size:
        return 0.0
    crossing = volumes.sum() - volumes.max(axis=1).sum()
    rest = len(volumes) - int(capacity.max())
    most = np.sort(np.partition(volumes, min(rest, len(volumes) - 1), axis=0)[rest:], axis=0)[::-1].cumsum(axis=0)
    kept = np.where(capacity > 0, most[np.maximum(capacity, 1) - 1, np.arange(len(capacity))], 0.0)
    return float(max(crossing / int((capacity > 0).sum()), (volumes.sum(axis=0) - kept).max(), 0.0))


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


def _solve(volumes: Floats, kind: Ints, free: Ints) -> tuple[Ints | None, float]:
    """Return the best nodes that HiGHS finds, if any, and its lower bound."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    num_batches, num_nodes = volumes.shape
    size = volumes.size
    unit = float(volumes.max(initial=0.0)) or 1.0
    scaled = volumes / unit
    one_node = np.zeros((num_batches, size + 1))
    for batch in range(num_batches):
        one_node[batch, batch * num_nodes : (batch + 1) * num_nodes] = 1
    filled = np.zeros((free.size, size + 1))
    for batch in range(num_batches):
        for node in range(num_nodes):
            filled[kind[batch] * num_nodes + node, batch * num_nodes + node] = 1
    # sent = all - kept <= z;  received = sum(x * total) - kept <= z
    sent, received = np.zeros((num_nodes, size + 1)), np.zeros((num_nodes, size + 1))
    for node in range(num_nodes):
        sent[node, node:size:num_nodes] = -scaled[:, node]
        received[node, node:size:num_nodes] = scaled.sum(axis=1) - scaled[:, node]
    sent[:, size] = received[:, size] = -1
    highest: Any = np.append(np.ones(size), np.inf)
    capacity: Any = free.ravel()
    answer: Any = milp(
        np.eye(1, size + 1, size)[0],
        integrality=np.append(np.ones(size), 0),
        bounds=Bounds(0, highest),
        constraints=[
            LinearConstraint(one_node, 1, 1),
            LinearConstraint(filled, capacity, capacity),
            LinearConstraint(sent, -np.inf, -scaled.sum(axis=0)),
            LinearConstraint(received, -np.inf, 0),
        ],
        options={"node_limit": _SOLVER_NODES, "mip_rel_gap": 0.0},
    )
    bound = 0.0 if answer.mip_dual_bound is None else max(float(answer.mip_dual_bound) * unit, 0.0)
    if answer.x is None:
        return None, bound
    chosen = cast("Floats", answer.x)[:size].reshape(num_batches, num_nodes).argmax(axis=1)
    return chosen.astype(np.int64), bound * (1 - 1e-9)


def _instances(node_of: Ints, nodes: Ints, kind: Ints) -> Ints:
    """Return an instance of its node for each batch; one that stays on its node stays where it is."""
    instance = np.where(node_of == nodes, np.arange(len(nodes)), -1).astype(np.int64)
    moved = np.flatnonzero(instance < 0)  # their instances are free
    by_target = moved[np.lexsort((moved, node_of[moved], kind[moved]))]
    instance[by_target] = moved[np.lexsort((moved, nodes[moved], kind[moved]))]
    return instance
