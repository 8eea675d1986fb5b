"""The loops of :mod:`.assignment`. Import it where it is needed: it loads numba.

The flow goes from types of nodes to kinds of nodes to kinds of places to types of places; of one type are those that
are equal in kind and group. Within a group there is a way from type to type beside it. What is left over goes from
kinds of nodes to nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.replan.assigning.network_simplex import flow_from

NO_GROUP = _NONE = -1
_MORE = 1 << 62
"""Than any amount."""


class _Types(NamedTuple):
    """Items by group and kind.

    Args:
        kind: Of each type.
        group: Of each type, negative for none; types of a group stand together.
        first: Where the items of each type begin, and where all end.
        items: The items, type by type.
    """

    kind: Ints
    group: Ints
    first: Ints
    items: Ints


class _Arcs(NamedTuple):
    """The ways of the flow: from kind to kind, from kinds of nodes to nowhere, between types and their kinds, and own.

    Args:
        tails: Where they begin. They lead between types of nodes, kinds of nodes, kinds of places, types of places and
            nowhere, which are numbered in this order.
        heads: Where they end.
        costs: The price, and whether it leaves the group. [arcs, 2]
        num_pairs: How many lead from kind to kind.
        num_of_kinds: How many lead between kinds, or nowhere.
        first_own: The first of those from type to type.
    """

    tails: Ints
    heads: Ints
    costs: Ints
    num_pairs: int
    num_of_kinds: int
    first_own: int


@compiled
def cheapest(
    prices: Ints, place_kinds: Ints, node_kinds: Ints, place_groups: Ints, node_groups: Ints, start: Ints
) -> Ints:
    """Return the node in each place, as :func:`.assign` says; nothing where no assignment is allowed.

    Args:
        prices: As there; negative where a pair must not be.
        place_kinds: Likewise.
        node_kinds: Likewise.
        place_groups: Likewise.
        node_groups: Likewise.
        start: Likewise; empty for none.
    """
    num_places, num_kinds = prices.shape
    common = _common(place_groups, node_groups)
    places = _types(place_kinds, place_groups, num_places, common)
    nodes = _types(node_kinds, node_groups, num_kinds, common)
    first_kind = len(nodes.kind)
    first_place_kind = first_kind + num_kinds
    first_place = first_place_kind + num_places
    arcs = _arcs(prices, places, nodes)
    supply = np.zeros(first_place + len(places.kind) + 1, dtype=np.int64)
    supply[:first_kind] = np.diff(nodes.first)
    supply[first_place:-1] = -np.diff(places.first)
    supply[-1] = len(place_kinds) - len(node_kinds)
    basis = _first_basis(arcs, supply, nodes, places, first_place)
    used = np.zeros(prices.shape, dtype=np.bool_)
    for place in range(len(start)):
        used[place_kinds[place], node_kinds[start[place]]] = True
    _hang_kinds(arcs, supply, basis, first_kind, first_place, used)
    flow = flow_from(arcs.tails, arcs.heads, arcs.costs, supply, basis)
    chosen = np.empty(len(place_kinds), dtype=np.int64)
    if not flow.is_whole:
        return chosen[:0]
    # Those that stay: the first ones of their type go to the first places of the types that they flow to.
    next_node, next_place = nodes.first[:-1].copy(), places.first[:-1].copy()
    for arc in range(arcs.first_own, len(arcs.tails)):
        node, place = arcs.tails[arc], arcs.heads[arc] - first_place
        for _ in range(flow.sent[arc]):
            chosen[places.items[next_place[place]]] = nodes.items[next_node[node]]
            next_node[node] += 1
            next_place[place] += 1
    # The others meet at their kinds.
    next_node, others = _left_over(nodes, next_node, node_kinds, num_kinds)
    next_place, left = _left_over(places, next_place, place_kinds, num_places)
    for arc in range(arcs.num_pairs):
        node, place = arcs.tails[arc] - first_kind, arcs.heads[arc] - first_place_kind
        for _ in range(flow.sent[arc]):
            chosen[left[next_place[place]]] = others[next_node[node]]
            next_node[node] += 1
            next_place[place] += 1
    return chosen


@compiled
def known_amounts(
    amounts: Ints, num_places: Ints, num_nodes: Ints, prices: Ints, limits: Ints, too_few: Flags
) -> tuple[int, int]:
    """Return what the node with the largest amount receives at least, and what all do (:class:`.AmountBounds`).

    Args:
        amounts: As there.
        num_places: Likewise.
        num_nodes: Likewise.
        prices: What nodes of each kind are worth in other assignments. [assignments, kinds of nodes]
        limits: Amounts of which in other assignments some node received more. [assignments]
        too_few: The kinds of nodes that were too few there. [assignments, kinds of nodes]
    """
    largest, total = np.int64(0), np.int64(0)
    for place in range(len(amounts)):
        least = _least_amount(amounts[place], num_nodes)
        largest, total = max(largest, least), total + least * num_places[place]
    for number in range(len(prices)):
        all_of_them = np.int64(0)
        for place in range(len(amounts)):
            all_of_them += _least_amount(amounts[place] + prices[number], num_nodes) * num_places[place]
        for kind in range(len(num_nodes)):
            all_of_them -= prices[number, kind] * num_nodes[kind]
        total = max(total, all_of_them)
    for number in range(len(limits)):
        limit, lacking, following = limits[number], np.int64(0), _MORE
        if limit < largest:
            continue
        for kind in range(len(num_nodes)):
            if too_few[number, kind]:
                lacking -= num_nodes[kind]
        for place in range(len(amounts)):
            has_others = False
            for kind in range(len(num_nodes)):
                if amounts[place, kind] > limit:
                    following = min(following, amounts[place, kind])
                elif num_nodes[kind] > 0 and not too_few[number, kind]:
                    has_others = True
            if not has_others:
                lacking += num_places[place]
        if lacking > 0:
            largest = following
    return int(largest), int(total)


@compiled
def _least_amount(amounts: Ints, num_nodes: Ints) -> int:
    """Return the least of the kinds of nodes that there are."""
    least = _MORE
    for kind in range(len(num_nodes)):
        if num_nodes[kind] > 0:
            least = min(least, amounts[kind])
    return least


@compiled
def _common(place_groups: Ints, node_groups: Ints) -> Flags:
    """Return which groups have places and nodes."""
    num_groups = 0
    for group in place_groups:
        num_groups = max(num_groups, group + 1)
    of_places, common = np.zeros((2, num_groups), dtype=np.bool_)
    for group in place_groups:
        if group >= 0:
            of_places[group] = True
    for group in node_groups:
        if 0 <= group < num_groups:
            common[group] = of_places[group]
    return common


@compiled
def _types(kinds: Ints, groups: Ints, num_kinds: int, common: Flags) -> _Types:
    """Return the types of some items; those of a group without places, or without nodes, are of none."""
    keys = np.empty(len(kinds), dtype=np.int64)
    for item in range(len(kinds)):
        group = groups[item]
        keys[item] = (group + 1 if 0 <= group < len(common) and common[group] else 0) * num_kinds + kinds[item]
    ends, items = _sorted(keys, (len(common) + 1) * num_kinds)
    present = np.flatnonzero(np.diff(ends))
    first = np.append(ends[present], len(keys))
    return _Types(present % num_kinds, present // num_kinds - 1, first, items)


@compiled
def _sorted(keys: Ints, num_keys: int) -> tuple[Ints, Ints]:
    """Return where the items of each key begin, and where all end; and the items in this order."""
    first = np.zeros(num_keys + 1, dtype=np.int64)
    for key in keys:
        first[key + 1] += 1
    first = first.cumsum()
    following, items = first.copy(), np.empty(len(keys), dtype=np.int64)
    for item in range(len(keys)):
        items[following[keys[item]]] = item
        following[keys[item]] += 1
    return first, items


@compiled
def _arcs(prices: Ints, places: _Types, nodes: _Types) -> _Arcs:
    """Return the arcs."""
    num_places, num_kinds = prices.shape
    first_kind, num_types = len(nodes.kind), len(nodes.kind) + len(places.kind)
    first_place_kind = first_kind + num_kinds
    first_place = first_place_kind + num_places
    nowhere = first_place + len(places.kind)
    # Of each type of nodes the first of the types of places of its group, and one past the last.
    first = np.searchsorted(places.group, nodes.group, "left")
    end = np.searchsorted(places.group, nodes.group, "right")
    most = num_places * num_kinds + num_kinds + num_types + (end - first)[nodes.group >= 0].sum()
    tails, heads = np.empty((2, most), dtype=np.int64)
    costs, number = np.zeros((most, 2), dtype=np.int64), 0
    for kind in range(num_kinds):
        for place in range(num_places):
            if prices[place, kind] >= 0:
                tails[number], heads[number] = first_kind + kind, first_place_kind + place
                costs[number, 0], costs[number, 1] = prices[place, kind], 1
                number += 1
    num_pairs = number
    for kind in range(num_kinds):
        tails[number], heads[number] = first_kind + kind, nowhere
        number += 1
    num_of_kinds = number
    for node in range(len(nodes.kind)):
        tails[number], heads[number] = node, first_kind + nodes.kind[node]
        number += 1
    for place in range(len(places.kind)):
        tails[number], heads[number] = first_place_kind + places.kind[place], first_place + place
        number += 1
    first_own = number
    for node in range(len(nodes.kind)):
        if nodes.group[node] >= 0:
            for place in range(first[node], end[node]):
                price = prices[places.kind[place], nodes.kind[node]]
                if price >= 0:
                    tails[number], heads[number], costs[number, 0] = node, first_place + place, price
                    number += 1
    return _Arcs(tails[:number], heads[:number], costs[:number], num_pairs, num_of_kinds, first_own)


@compiled
def _first_basis(arcs: _Arcs, supply: Ints, nodes: _Types, places: _Types, first_place: int) -> Ints:
    """Return where the search begins: most stay in their group, in pairs that are cheap."""
    basis = np.full(len(supply), _NONE)
    of_types = arcs.first_own - len(nodes.kind) - len(places.kind)
    basis[: len(nodes.kind)] = of_types + np.arange(len(nodes.kind))
    basis[first_place:-1] = arcs.first_own - len(places.kind) + np.arange(len(places.kind))
    taken = np.zeros(len(places.kind), dtype=np.bool_)
    arc = arcs.first_own
    while arc < len(arcs.tails):
        node, best = arcs.tails[arc], arc
        while arc < len(arcs.tails) and arcs.tails[arc] == node:
            if arcs.costs[arc, 0] < arcs.costs[best, 0]:
                best = arc
            arc += 1
        place = arcs.heads[best]
        if not taken[place - first_place]:
            taken[place - first_place] = True
            basis[node if supply[node] < -supply[place] else place] = best
    return basis


@compiled
def _hang_kinds(arcs: _Arcs, supply: Ints, basis: Ints, first_kind: int, first_place: int, used: Flags) -> None:
    """Put the cheapest flow from kind to kind, of what does not stay in its group, into the first basis.

    Little is left to do then: whenever it shows later what a kind is worth, its many types are to be hung anew.
    """
    left, nowhere, num_kinds = supply.copy(), len(supply) - 1, first_place - first_kind
    for of_group in (True, False):  # pairs first: what one of them leaves over goes to its kind
        for node in range(nowhere):
            arc = basis[node]
            if arc != _NONE and (arc >= arcs.first_own) == of_group:
                left[arcs.heads[arc] if arcs.tails[arc] == node else arcs.tails[arc]] += left[node]
    tails, heads = arcs.tails[: arcs.num_of_kinds] - first_kind, arcs.heads[: arcs.num_of_kinds] - first_kind
    of_kinds = np.append(left[first_kind:first_place], left[nowhere])
    likely = _sent_over(tails[: arcs.num_pairs], heads[: arcs.num_pairs], of_kinds, used)
    flow = flow_from(tails, np.minimum(heads, num_kinds), arcs.costs[: arcs.num_of_kinds], of_kinds, likely)
    basis[first_kind:first_place], basis[nowhere] = flow.basis[:-1], flow.basis[-1]


@compiled
def _sent_over(tails: Ints, heads: Ints, supply: Ints, used: Flags) -> Ints:
    """Return the basis of the flow that sends what it can from kind to kind over the arcs that are used.

    Args:
        tails: Where arcs begin.
        heads: Where they end.
        supply: Of each node, negative where it takes.
        used: Whether the arc between two kinds is. [kinds of places, kinds of nodes]
    """
    basis, left = np.full(len(supply), _NONE), supply.copy()
    for arc in range(len(tails)):
        tail, head = tails[arc], heads[arc]
        if used[head - used.shape[1], tail] and left[tail] > 0 and left[head] < 0:
            sent = min(left[tail], -left[head])
            # What gives all that it has left hangs on what takes it, or that on it.
            basis[tail if sent == left[tail] else head] = arc
            left[tail] -= sent
            left[head] += sent
    return basis


@compiled
def _left_over(types: _Types, following: Ints, kinds: Ints, num_kinds: int) -> tuple[Ints, Ints]:
    """Return the items of each type from one on, by kind and ascending, and where those of each kind begin."""
    there = np.zeros(len(kinds), dtype=np.bool_)
    for number in range(len(following)):
        for at in range(following[number], types.first[number + 1]):
            there[types.items[at]] = True
    left = np.flatnonzero(there)
    first, order = _sorted(kinds[left], num_kinds)
    return first, left[order]
