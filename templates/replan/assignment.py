"""The cheapest assignment of nodes to places, of which many are alike.

Prices depend on the kinds of place and node alone, and there are few of each. So nodes flow by kind: this is a
transportation problem, with an unknown for each pair of kinds, however many nodes there are. That nodes had better stay
in their groups (pipelines) takes one more for each pair of kinds in a group.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints, ranges

if TYPE_CHECKING:  # it loads numba, and most processes that import the planner never assign
    from resilient.templates.replan.network_simplex import NetworkFlow

FORBIDDEN = -1
"""The price of a pair that must not be."""

_NO_GROUP = _NONE = -1

_MOST_LEARNT = 4
"""So many of the last bounds that were learnt are looked at."""


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


class AmountBounds:
    """What nodes receive at least, in many assignments of the same kinds of nodes.

    What is learnt from one that is worked out bounds all others, whatever their numbers of places and nodes (weak
    duality): prices that nodes of each kind are worth where they are short; and, if nobody receives more than some
    amount, kinds of nodes that are all that places of some kinds can have, and too few.

    All methods take amounts of a node of each kind in a place of each [kinds of places, kinds of nodes], how many
    places there are of each kind (one or more), and how many nodes of each kind (not fewer in sum). They return what
    the node with the largest amount receives at least, and what all do.
    """

    def __init__(self) -> None:
        self._prices: list[Ints] = []
        self._too_few: list[tuple[int, Flags]] = []

    def asked(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        """Return what places ask for by themselves."""
        each = amounts[:, num_nodes > 0].min(axis=1)
        return int(each.max()), int(each @ num_places)

    def learnt(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        """Return what is known from others; of the first one, which others learn from, what is least."""
        return (self._known if self._prices else self.least)(amounts, num_places, num_nodes)

    def _known(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        largest, total = self.asked(amounts, num_places, num_nodes)
        there = num_nodes > 0
        for prices in self._prices[-_MOST_LEARNT:]:
            each = (amounts + prices)[:, there].min(axis=1)
            total = max(total, int(each @ num_places - prices @ num_nodes))
        for limit, kinds in self._too_few[-_MOST_LEARNT:]:
            others = ((amounts <= limit) & there & ~kinds).any(axis=1)
            if limit >= largest and num_places[~others].sum() > num_nodes[kinds].sum():
                largest = int(amounts[amounts > limit].min())
        return largest, total

    def least(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        """Return the least that there is."""
        most = int(amounts.max())
        largest = self.bottleneck(amounts, num_places, num_nodes, most)
        assert largest is not None
        flow, total = _cheapest(amounts, num_places, num_nodes, most, amounts)
        # compared with those that take no place
        prices = flow.prices[: len(num_nodes), 1] - flow.prices[-1, 1]
        self._prices.append(np.maximum(prices, 0))
        return largest, total

    def bottleneck(self, amounts: Ints, num_places: Ints, num_nodes: Ints, most: int) -> int | None:
        """Return only the largest amount, None where that is more than ``most``."""

        def is_possible(limit: int) -> bool:
            flow, _ = _cheapest(amounts, num_places, num_nodes, limit)
            if not flow.is_whole:
                self._too_few.append((limit, flow.prices[: len(num_nodes), 0] > 0))
            return flow.is_whole

        known, _ = self._known(amounts, num_places, num_nodes)
        limits = np.unique(amounts[(amounts >= known) & (amounts <= most)]).tolist()
        if not limits:
            return None
        if is_possible(limits[0]):  # as a rule
            return limits[0]
        if most < amounts.max() and not is_possible(most):
            return None
        return limits[bisect_left(limits, 1, 1, len(limits) - 1, key=is_possible)]


def _cheapest(
    amounts: Ints, num_places: Ints, num_nodes: Ints, most: int, prices: Ints | None = None
) -> tuple[NetworkFlow, int]:
    """Return the cheapest assignment without amounts above ``most``, and its price.

    It is a flow from kinds of nodes to kinds of places and, at the end of both, nowhere.
    """
    # Imported late: it loads numba, and most processes that import the planner never assign.
    from resilient.templates.replan.network_simplex import cheapest_flow

    nodes = np.arange(len(num_nodes))
    node, place = np.nonzero(most >= amounts.T)
    tails = np.concatenate((node, nodes))
    heads = np.concatenate((len(nodes) + place, np.full(len(nodes), len(nodes) + len(num_places))))
    costs = np.zeros((len(tails), 2), dtype=np.int64)
    if prices is not None:
        costs[: len(node), 0] = prices[place, node]
    supply = np.concatenate((num_nodes, -num_places, [num_places.sum() - num_nodes.sum()]))
    flow = cheapest_flow(tails, heads, costs, supply)
    return flow, int(flow.sent @ costs[:, 0])


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
        (node_kinds + node_kind, place_kinds + place_kind, prices[place_kind, node_kind]),
        (node_kinds + np.arange(num_kinds), np.full(num_kinds, nowhere), np.zeros(num_kinds, dtype=np.int64)),
        (np.arange(node_kinds), node_kinds + nodes.kind, np.zeros(node_kinds, dtype=np.int64)),
        (place_kinds + places.kind, place_types + np.arange(len(places.kind)), np.zeros_like(places.kind)),
        (own_node, place_types + own_place, own_price),
    )
    tails, heads, price = (np.concatenate(parts) for parts in zip(*arcs, strict=True))
    num_pairs, num_types = len(node_kind), node_kinds + len(places.kind)
    num_inner = len(tails) - len(own_node)
    leaving = np.zeros(len(tails), dtype=np.int64)
    leaving[:num_pairs] = 1
    num_left_over = int(nodes.num_items.sum() - places.num_items.sum())
    between = np.zeros(num_kinds + num_places, dtype=np.int64)
    supply = np.concatenate((nodes.num_items, between, -places.num_items, [-num_left_over]))
    basis = np.full(len(supply), _NONE)
    basis[:node_kinds] = num_inner - num_types + np.arange(node_kinds)
    basis[place_types:nowhere] = num_inner - len(places.kind) + np.arange(len(places.kind))
    # Most stay in their group, so that is where the search begins: with pairs that are cheap.
    staying = np.argsort(own_price, kind="stable")
    for of in (own_node, own_place):
        staying = staying[np.unique(of[staying], return_index=True)[1]]
    node, place = own_node[staying], own_place[staying]
    basis[np.where(nodes.num_items[node] < places.num_items[place], node, place_types + place)] = num_inner + staying
    flow = cheapest_flow(tails, heads, np.stack((price, leaving), axis=1), supply, basis)
    if not flow.is_whole:
        return None
    pairs, none, _, own = np.split(flow.sent, [num_pairs, num_pairs + num_kinds, num_inner])
    kinds = np.concatenate((node_kind, np.arange(num_kinds)))
    goes = np.repeat(np.concatenate((place_kind, np.full(num_kinds, num_places))), np.concatenate((pairs, none)))
    order = np.argsort(np.repeat(kinds, np.concatenate((pairs, none))), kind="stable")
    return _Found(
        leaves=np.bincount(own_node, own, len(nodes.kind)).astype(np.int64),
        comes=np.bincount(own_place, own, len(places.kind)).astype(np.int64),
        stays=np.repeat(own_place, own),
        goes=goes[order],
    )
