"""The cheapest flow through a network, by the network simplex. Import it where it is needed: it loads numba.

A basis is a tree of arcs: all others are empty. From one basis to the next an arc comes in that makes the flow cheaper,
as much as can be is sent around the circle that it closes, and an arc goes out that is empty by that. Trees stay
strongly feasible (empty arcs point to the root), so no basis comes again.

Source: Ahuja, Magnanti and Orlin, "Network Flows" (1993), chapter 11.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled

_NONE = -1
_PARTS = 3
"""Of a cost, the first counts most: what could not be sent, and the two of the arcs."""


class _Tree(NamedTuple):
    """The basis. Each [nodes + 1]: the last one is the root, whose arcs stand for what cannot be sent.

    Args:
        parent: The next node on the way to the root.
        arc: The arc between them.
        points_up: Whether it leads to the parent.
        depth: Arcs up to the root.
        child: Any child; the others follow as siblings.
        following: The next sibling.
        previous: The sibling before.
        potential: Costs of arcs of the tree are the differences of their ends'. [nodes + 1, parts]
    """

    parent: Ints
    arc: Ints
    points_up: Flags
    depth: Ints
    child: Ints
    following: Ints
    previous: Ints
    potential: Ints


class NetworkFlow(NamedTuple):
    """A cheapest flow.

    Args:
        sent: What goes over each arc. [arcs]
        is_whole: Whether all is sent; if not, as much as can be.
        prices: Of a unit at each node: what could not be sent counts in the first column, and the parts of costs in the
            others. No arc leads to a node whose prices are higher than those where it begins with its costs. [nodes, 3]
        basis: The last one, as :func:`cheapest_flow` takes it. [nodes]
    """

    sent: Ints
    is_whole: bool
    prices: Ints
    basis: Ints


def cheapest_flow(tails: Ints, heads: Ints, costs: Ints, supply: Ints, basis: Ints | None = None) -> NetworkFlow:
    """Return the cheapest of the flows that send most.

    Args:
        tails: Where the arcs begin; none has a limit. [arcs]
        heads: Where they end. [arcs]
        costs: Of a unit, two parts that are at least 0; the second counts where the first is equal. [arcs, 2]
        supply: Of each node, negative where it takes; the sum is 0. [nodes]
        basis: The arcs of the first basis, none by default: of each node the arc between it and the node that it hangs
            on, -1 where it hangs on none. What it and all that hangs on it give must go along the arc, and if the arc
            leads to it, that must not be nothing. [nodes]
    """
    return flow_from(tails, heads, costs, supply, np.full(len(supply), _NONE) if basis is None else basis)


@compiled
def flow_from(tails: Ints, heads: Ints, costs: Ints, supply: Ints, basis: Ints) -> NetworkFlow:
    """Return :func:`cheapest_flow`, with its arguments."""
    num_nodes, num_arcs = len(supply), len(tails)
    flow = np.zeros(num_arcs + num_nodes, dtype=np.int64)
    links = np.full((6, num_nodes + 1), _NONE)
    points_up, potential = np.zeros(num_nodes + 1, dtype=np.bool_), np.zeros((num_nodes + 1, _PARTS), dtype=np.int64)
    tree = _Tree(links[0], links[1], points_up, links[2], links[3], links[4], links[5], potential)
    _plant(tails, heads, costs, supply, basis, flow, tree)
    _solve(tails, heads, costs, flow, tree)
    basis = np.where(tree.arc[:-1] < num_arcs, tree.arc[:-1], _NONE)
    return NetworkFlow(flow[:num_arcs], not flow[num_arcs:].any(), potential[:-1], basis)


@compiled
def _plant(tails: Ints, heads: Ints, costs: Ints, supply: Ints, basis: Ints, flow: Ints, tree: _Tree) -> None:
    """Make the first tree, and the flow in it."""
    root, num_arcs = len(supply), len(tails)
    num_below = np.zeros(root + 1, dtype=np.int64)
    for node in range(root):
        arc = basis[node]
        if arc == _NONE:
            tree.parent[node] = root
        else:
            tree.parent[node] = heads[arc] if tails[arc] == node else tails[arc]
        num_below[tree.parent[node]] += 1
    # Those that nothing hangs on come first, and all others behind what hangs on them.
    order, num_known = np.empty(root, dtype=np.int64), 0
    for node in range(root):
        if num_below[node] == 0:
            order[num_known] = node
            num_known += 1
    left = np.append(supply, 0)
    for at in range(root):
        node = order[at]
        parent, arc = tree.parent[node], basis[node]
        tree.arc[node] = arc if arc != _NONE else num_arcs + node
        tree.points_up[node] = left[node] >= 0 if arc == _NONE else tails[arc] == node
        flow[tree.arc[node]] = left[node] if tree.points_up[node] else -left[node]
        left[parent] += left[node]
        sibling = tree.child[parent]
        tree.child[parent], tree.following[node] = node, sibling
        if sibling != _NONE:
            tree.previous[sibling] = node
        num_below[parent] -= 1
        if num_below[parent] == 0 and parent != root:
            order[num_known] = parent
            num_known += 1
    tree.depth[root] = 0
    for at in range(root - 1, -1, -1):
        node = order[at]
        parent, sign = tree.parent[node], -1 if tree.points_up[node] else 1
        tree.depth[node] = tree.depth[parent] + 1
        for part in range(_PARTS):
            tree.potential[node, part] = tree.potential[parent, part]
        if basis[node] == _NONE:
            tree.potential[node, 0] += sign
        else:
            for part in range(2):
                tree.potential[node, part + 1] += sign * costs[basis[node], part]


@compiled
def _solve(tails: Ints, heads: Ints, costs: Ints, flow: Ints, tree: _Tree) -> None:
    """Exchange arcs until no flow is cheaper."""
    arc = _NONE
    while True:
        arc = _entering(tails, heads, costs, tree.potential, arc + 1)
        if arc == _NONE:
            return
        _exchange(tails[arc], heads[arc], arc, _reduced(tails, heads, costs, tree.potential, arc), flow, tree)


@compiled
def _reduced(tails: Ints, heads: Ints, costs: Ints, potential: Ints, arc: int) -> tuple[int, int, int]:
    """Return how much more expensive it is to send a unit over an arc than over the tree."""
    tail, head = tails[arc], heads[arc]
    return (
        potential[tail, 0] - potential[head, 0],
        costs[arc, 0] + potential[tail, 1] - potential[head, 1],
        costs[arc, 1] + potential[tail, 2] - potential[head, 2],
    )


@compiled
def _entering(tails: Ints, heads: Ints, costs: Ints, potential: Ints, first: int) -> int:
    """Return the arc that saves most of the first block, from ``first`` on, with one that saves; -1 if none does."""
    num_arcs = len(tails)
    left = block = max(16, int(np.sqrt(num_arcs)))
    best, least, arc = _NONE, (0, 0, 0), first - 1
    for _ in range(num_arcs):
        arc = arc + 1 if arc + 1 < num_arcs else 0
        reduced = _reduced(tails, heads, costs, potential, arc)
        if reduced < least:
            best, least = arc, reduced
        left -= 1
        if left == 0:
            if best != _NONE:
                return best
            left = block
    return best


@compiled
def _exchange(tail: int, head: int, arc: int, saved: tuple[int, int, int], flow: Ints, tree: _Tree) -> None:
    """Send what can be sent around the circle that an arc closes; put it into the tree for one that is empty then."""
    parent, depth = tree.parent, tree.depth
    join, other = tail, head
    while join != other:
        if depth[join] >= depth[other]:
            join = parent[join]
        else:
            other = parent[other]
    # Of several arcs that are empty then the last one on the way from the join goes out: trees stay strongly feasible.
    amount, last, of_tail = np.int64(2**62), _NONE, True
    node = tail
    while node != join:
        if tree.points_up[node] and flow[tree.arc[node]] < amount:
            amount, last, of_tail = flow[tree.arc[node]], node, True
        node = parent[node]
    node = head
    while node != join:
        if not tree.points_up[node] and flow[tree.arc[node]] <= amount:
            amount, last, of_tail = flow[tree.arc[node]], node, False
        node = parent[node]
    flow[arc] += amount
    node = tail
    while node != join:
        flow[tree.arc[node]] -= amount if tree.points_up[node] else -amount
        node = parent[node]
    node = head
    while node != join:
        flow[tree.arc[node]] += amount if tree.points_up[node] else -amount
        node = parent[node]
    if of_tail:
        _hang(tail, head, arc, True, last, tree)
        _shift(tail, (-saved[0], -saved[1], -saved[2]), tree)
    else:
        _hang(head, tail, arc, False, last, tree)
        _shift(head, saved, tree)


@compiled
def _hang(node: int, below: int, arc: int, points_up: bool, last: int, tree: _Tree) -> None:
    """Turn the way from a node up to ``last``, and hang it below another node by an arc."""
    while True:
        parent, old_arc, pointed_up = tree.parent[node], tree.arc[node], tree.points_up[node]
        before, after = tree.previous[node], tree.following[node]
        if before == _NONE:
            tree.child[parent] = after
        else:
            tree.following[before] = after
        if after != _NONE:
            tree.previous[after] = before
        sibling = tree.child[below]
        tree.child[below], tree.following[node], tree.previous[node] = node, sibling, _NONE
        if sibling != _NONE:
            tree.previous[sibling] = node
        tree.parent[node], tree.arc[node], tree.points_up[node] = below, arc, points_up
        if node == last:
            return
        below, arc, points_up, node = node, old_arc, not pointed_up, parent


@compiled
def _shift(top: int, by: tuple[int, int, int], tree: _Tree) -> None:
    """Change the potential of a node and all below it, and count how deep they are now."""
    node = top
    while True:
        tree.depth[node] = tree.depth[tree.parent[node]] + 1
        for part in range(_PARTS):
            tree.potential[node, part] += by[part]
        if tree.child[node] != _NONE:
            node = tree.child[node]
            continue
        while node != top and tree.following[node] == _NONE:
            node = tree.parent[node]
        if node == top:
            return
        node = tree.following[node]
