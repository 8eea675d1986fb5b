"""Compiled loops of the nodewise module beside it. Import it where it is needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled


@compiled
def keep_most(batches: Ints, nodes: Ints, kind: Ints, free: Ints) -> Ints:
    """Place batches on nodes pair by pair, where there is a free instance; those left over by position.

    Args:
        batches: Of the pairs, in order. [num_pairs]
        nodes: Likewise. [num_pairs]
        kind: Of each batch. [num_batches]
        free: Instances of each kind on each node; used up. [num_kinds, num_nodes]
    """
    node_of = np.full(len(kind), -1)
    for pair in range(len(batches)):
        batch, node = batches[pair], nodes[pair]
        if node_of[batch] < 0 and free[kind[batch], node]:
            node_of[batch] = node
            free[kind[batch], node] -= 1
    cursor = np.zeros(len(free), dtype=np.int64)
    for batch in range(len(kind)):
        if node_of[batch] < 0:
            node = cursor[kind[batch]]
            while not free[kind[batch], node]:
                node += 1
            cursor[kind[batch]] = node
            node_of[batch] = node
            free[kind[batch], node] -= 1
    return node_of


@compiled
def exchange(volumes: Floats, kind: Ints, node_of: Ints, budget: int) -> None:
    """Exchange two batches, one of them on the worst node, as long as the worse of both nodes gets better than it was.

    Args:
        volumes: What of each batch lies on each node. [num_batches, num_nodes]
        kind: Of each batch; others are not exchanged. [num_batches]
        node_of: Of each batch; changed. [num_batches]
        budget: Exchanges to consider.
    """
    num_batches, num_nodes = volumes.shape
    total = volumes.sum(axis=1)
    sent, received = volumes.sum(axis=0), np.zeros(num_nodes)
    for batch in range(num_batches):
        sent[node_of[batch]] -= volumes[batch, node_of[batch]]
        received[node_of[batch]] += total[batch] - volumes[batch, node_of[batch]]
    while budget > 0:
        worst, value = 0, -1.0
        for node in range(num_nodes):
            if max(sent[node], received[node]) > value:
                worst, value = node, max(sent[node], received[node])
        best, one, other = value * (1 - 1e-12), -1, -1
        for i in range(num_batches):
            if node_of[i] != worst:
                continue
            budget -= num_batches
            left, gone = volumes[i, worst], total[i] - volumes[i, worst]
            for j in range(num_batches):
                node = node_of[j]
                if node == worst or kind[i] != kind[j]:
                    continue
                here, there = volumes[j, worst], volumes[j, node]
                after = max(sent[worst] + left - here, received[worst] - gone + total[j] - here)
                if after >= best:
                    continue
                after = max(after, sent[node] + there - volumes[i, node])
                after = max(after, received[node] - total[j] + there + total[i] - volumes[i, node])
                if after < best:
                    best, one, other = after, i, j
        if one < 0:
            return
        node = node_of[other]
        sent[worst] += volumes[one, worst] - volumes[other, worst]
        received[worst] += total[other] - volumes[other, worst] - total[one] + volumes[one, worst]
        sent[node] += volumes[other, node] - volumes[one, node]
        received[node] += total[one] - volumes[one, node] - total[other] + volumes[other, node]
        node_of[one], node_of[other] = node, worst
