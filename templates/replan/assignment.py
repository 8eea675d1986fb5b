"""The cheapest assignment of nodes to places, of which many are alike.

Prices depend on the kinds of place and node alone, and there are few of each. So nodes flow by kind: this is a
transportation problem, with an unknown for each pair of kinds, however many nodes there are. That nodes had better stay
in their groups (pipelines) takes one more for each pair of kinds in a group.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints, ranges

FORBIDDEN = -1
"""The price of a pair that must not be."""

_NO_GROUP = -1


def assign(
    prices: Ints, place_kinds: Ints, node_kinds: Ints, place_groups: Ints | None = None, node_groups: Ints | None = None
) -> Ints | None:
    """Return the index of each place's node in the cheapest one-to-one assignment; None where none is allowed.

    Of equally cheap ones it is one in which as many nodes as can be are in places of their own group. Of nodes that are
    alike, earlier ones get a place, and the earlier place.

    Args:
        prices: Whole numbers, or :data:`FORBIDDEN`. [kinds of places, kinds of nodes]
        place_kinds: The kind of each place. [places]
        node_kinds: The kind of each node, at least as many as places. [nodes]
        place_groups: The group of each place, negative where it is in none; none at all by default. [places]
        node_groups: Likewise. [nodes]
    """
    if place_groups is None or node_groups is None:
        place_groups, node_groups = (np.full(len(kinds), _NO_GROUP) for kinds in (place_kinds, node_kinds))
    else:
        common = np.intersect1d(place_groups, node_groups)
        place_groups, node_groups = (
            np.where(np.isin(groups, common), groups, _NO_GROUP) for groups in (place_groups, node_groups)
        )
    places = _Types.of(place_kinds, place_groups, len(prices))
    nodes = _Types.of(node_kinds, node_groups, prices.shape[1])
    found = _flows(prices, places, nodes)
    if found is None:
        return None
    chosen = np.empty(len(place_kinds), dtype=np.int64)
    # Those that stay: the first ones of their type go to the first places of the types that they flow to.
    own_nodes, own_places = nodes.first(found.leaves), places.first(found.comes)
    chosen[own_places] = own_nodes[np.argsort(found.stays, kind="stable")]
    # The others meet at their kinds.
    others, left = nodes.rest(own_nodes), places.rest(own_places)
    others = others[np.argsort(node_kinds[others], kind="stable")]
    left = left[np.argsort(place_kinds[left], kind="stable")]
    chosen[left] = others[np.argsort(found.goes, kind="stable")][: len(left)]
    return chosen


def least_bottleneck(amounts: Ints, num_places: Ints, num_nodes: Ints, most: int) -> int | None:
    """Return the least that the largest amount of an assignment can be; None where that is more than ``most``.

    Args:
        amounts: Of a node of each kind in a place of each. [kinds of places, kinds of nodes]
        num_places: Places of each kind.
        num_nodes: Nodes of each kind, at least as many.
        most: What is too much already.
    """

    def is_possible(limit: int) -> bool:
        return _least_amount(amounts, num_places, num_nodes, limit) is not None

    if most < amounts.max() and not is_possible(most):
        return None
    limits = np.unique(amounts[amounts <= most]).tolist()
    first = bisect_left(limits, _asked_by_each(amounts, num_places, num_nodes).max(initial=0))
    return limits[bisect_left(limits, 1, first, key=is_possible)]


def bounds_of_amounts(amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
    """Return what neither of :func:`least_amounts`, with its arguments, is below: what places ask for by themselves."""
    each = _asked_by_each(amounts, num_places, num_nodes)
    return int(each.max(initial=0)), int(each @ num_places)


def _asked_by_each(amounts: Ints, num_places: Ints, num_nodes: Ints) -> Ints:
    """Return the least amount of a place of each kind."""
    each = amounts[:, num_nodes > 0].min(axis=1, initial=amounts.max(initial=0))
    return np.where(num_places > 0, each, 0)


def least_amounts(amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
    """Return the least that the largest amount of an assignment can be, and the least that all can be in sum.

    Args:
        amounts: Of a node of each kind in a place of each. [kinds of places, kinds of nodes]
        num_places: Places of each kind.
        num_nodes: Nodes of each kind, at least as many.
    """
    most = int(amounts.max())
    bottleneck = least_bottleneck(amounts, num_places, num_nodes, most)
    total = _least_amount(amounts, num_places, num_nodes, most, amounts)
    assert bottleneck is not None
    assert total is not None
    return bottleneck, total


def _least_amount(
    amounts: Ints, num_places: Ints, num_nodes: Ints, most: int, prices: Ints | None = None
) -> int | None:
    """Return the least price of an assignment without amounts above ``most``; None where there is none."""
    # Imported late: it loads numba, and most processes that import the planner never assign.
    from resilient.templates.replan.network_simplex import cheapest_flow

    places, nodes = np.arange(len(num_places)), np.arange(len(num_nodes))
    nowhere = len(nodes) + len(places)
    node, place = np.nonzero(most >= amounts.T)
    tails = np.concatenate((node, nodes))
    heads = np.concatenate((len(nodes) + place, np.full(len(nodes), nowhere)))
    costs = np.zeros((len(tails), 2), dtype=np.int64)
    if prices is not None:
        costs[: len(node), 0] = prices[place, node]
    supply = np.concatenate((num_nodes, -num_places, [num_places.sum() - num_nodes.sum()]))
    flow = cheapest_flow(tails, heads, costs, supply)
    return None if flow is None else int(flow @ costs[:, 0])


class _Types(NamedTuple):
    """Items by group and kind: those that are equal in both are of one type.

    Args:
        kind: Of each type.
        group: Of each type, negative for none.
        num_items: Items of each type.
        ordered: The items, type by type.
    """

    kind: Ints
    group: Ints
    num_items: Ints
    ordered: Ints

    @classmethod
    def of(cls, kinds: Ints, groups: Ints, num_kinds: int) -> _Types:
        """Return the types of some items."""
        keys = (groups + 1) * num_kinds + kinds
        ordered = np.argsort(keys, kind="stable")
        keys = keys[ordered]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        group, kind = np.divmod(keys[first], num_kinds)
        return cls(kind, group - 1, np.diff(first, append=len(keys)), ordered)

    def first(self, counts: Ints) -> Ints:
        """Return the first so many items of each type, type by type."""
        return self.ordered[ranges(self.num_items.cumsum() - self.num_items, counts)]

    def rest(self, but: Ints) -> Ints:
        """Return the items but some, ascending."""
        left = np.ones(len(self.ordered), dtype=np.bool_)
        left[but] = False
        return np.flatnonzero(left)


class _Found(NamedTuple):
    """The cheapest flow.

    Args:
        leaves: How many nodes of each type flow to places of their own group.
        comes: How many such nodes places of each type get.
        stays: The types of these places, in the order of the types of these nodes.
        goes: Of all other nodes, in the order of their kinds: the kind of place, or one more than there are for none.
    """

    leaves: Ints
    comes: Ints
    stays: Ints
    goes: Ints


def _flows(prices: Ints, places: _Types, nodes: _Types) -> _Found | None:
    """Return the cheapest flow: from types of nodes to kinds of nodes to kinds of places to types of places.

    Within a group there is a way from type to type beside it. What is left over goes from kinds of nodes to nowhere.
    """
    # Imported late: it loads numba, and most processes that import the planner never assign.
    from resilient.templates.replan.network_simplex import cheapest_flow

    first, end = (np.searchsorted(places.group, nodes.group, side=side) for side in ("left", "right"))
    length = np.where(nodes.group == _NO_GROUP, 0, end - first)
    own_node, own_place = np.repeat(np.arange(len(length)), length), ranges(first, length)
    own_price = prices[places.kind[own_place], nodes.kind[own_node]]
    allowed = own_price != FORBIDDEN
    own_node, own_place, own_price = own_node[allowed], own_place[allowed], own_price[allowed]
    node_kind, place_kind = np.nonzero(prices.T != FORBIDDEN)

    num_places, num_kinds = prices.shape[0], prices.shape[1]
    node_kinds = len(nodes.kind)
    place_kinds = node_kinds + num_kinds
    place_types = place_kinds + num_places
    nowhere = place_types + len(places.kind)
    arcs = (
        (own_node, place_types + own_place, own_price),
        (node_kinds + node_kind, place_kinds + place_kind, prices[place_kind, node_kind]),
        (node_kinds + np.arange(num_kinds), np.full(num_kinds, nowhere), np.zeros(num_kinds, dtype=np.int64)),
        (np.arange(node_kinds), node_kinds + nodes.kind, np.zeros(node_kinds, dtype=np.int64)),
        (place_kinds + places.kind, place_types + np.arange(len(places.kind)), np.zeros_like(places.kind)),
    )
    tails, heads, price = (np.concatenate(parts) for parts in zip(*arcs, strict=True))
    num_own, num_pairs = len(own_node), len(node_kind)
    leaving = np.zeros(len(tails), dtype=np.int64)
    leaving[num_own : num_own + num_pairs] = 1
    num_left_over = int(nodes.num_items.sum() - places.num_items.sum())
    between = np.zeros(num_kinds + num_places, dtype=np.int64)
    supply = np.concatenate((nodes.num_items, between, -places.num_items, [-num_left_over]))
    flow = cheapest_flow(tails, heads, np.stack((price, leaving), axis=1), supply)
    if flow is None:
        return None
    own, pairs, none, *_ = np.split(flow, np.cumsum([num_own, num_pairs, num_kinds]))
    kinds = np.concatenate((node_kind, np.arange(num_kinds)))
    goes = np.repeat(np.concatenate((place_kind, np.full(num_kinds, num_places))), np.concatenate((pairs, none)))
    order = np.argsort(np.repeat(kinds, np.concatenate((pairs, none))), kind="stable")
    return _Found(
        leaves=np.bincount(own_node, own, len(nodes.kind)).astype(np.int64),
        comes=np.bincount(own_place, own, len(places.kind)).astype(np.int64),
        stays=np.repeat(own_place, own),
        goes=goes[order],
    )
