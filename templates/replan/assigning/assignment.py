"""The cheapest assignment of nodes to places, of which many are alike.

Prices depend on the kinds of place and node alone, and there are few of each. So nodes flow by kind: this is a
transportation problem, with an unknown for each pair of kinds, however many nodes there are. That nodes had better stay
in their groups (pipelines) takes one more for each pair of kinds in a group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from resilient.templates.common.arrays import Flags, Ints

if TYPE_CHECKING:  # it loads numba, and most processes that import the planner never assign
    from resilient.templates.replan.assigning.network_simplex import NetworkFlow

FORBIDDEN = -1
"""The price of a pair that must not be."""

_NOTHING = np.empty(0, dtype=np.int64)
_MOST_LEARNT = 4
"""So many of the last bounds that were learnt are looked at."""


def assign(
    prices: Ints,
    place_kinds: Ints,
    node_kinds: Ints,
    place_groups: Ints | None = None,
    node_groups: Ints | None = None,
    *,
    start: Ints = _NOTHING,
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
        start: The index of each place's node in an assignment that is cheap already, where there is one: from there it
            is not far. [places]
    """
    # Imported late: it loads numba, and most processes that import the planner never assign.
    from resilient.templates.replan.assigning.assignment_loops import NO_GROUP, cheapest

    if place_groups is None or node_groups is None:
        place_groups, node_groups = (np.full(len(kinds), NO_GROUP) for kinds in (place_kinds, node_kinds))
    chosen = cheapest(np.ascontiguousarray(prices), place_kinds, node_kinds, place_groups, node_groups, start)
    return chosen if len(chosen) == len(place_kinds) else None


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
        self._largest: dict[tuple[bytes, ...], int] = {}

    def asked(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        """Return what places ask for by themselves."""
        return _known(amounts, num_places, num_nodes, [], [])

    def learnt(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        """Return what is known from others; of the first one, which others learn from, what is least."""
        return (self._known if self._prices else self.least)(amounts, num_places, num_nodes)

    def _known(self, amounts: Ints, num_places: Ints, num_nodes: Ints) -> tuple[int, int]:
        return _known(amounts, num_places, num_nodes, self._prices[-_MOST_LEARNT:], self._too_few[-_MOST_LEARNT:])

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
        asked = amounts.tobytes(), num_places.tobytes(), num_nodes.tobytes()
        if asked not in self._largest:
            largest = self._found_bottleneck(amounts, num_places, num_nodes, most)
            if largest is None:
                return None
            self._largest[asked] = largest
        return self._largest[asked] if self._largest[asked] <= most else None

    def _found_bottleneck(self, amounts: Ints, num_places: Ints, num_nodes: Ints, most: int) -> int | None:
        """Return :meth:`bottleneck` of what has not been asked."""

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


def _known(
    amounts: Ints, num_places: Ints, num_nodes: Ints, prices: Sequence[Ints], too_few: Sequence[tuple[int, Flags]]
) -> tuple[int, int]:
    from resilient.templates.replan.assigning.assignment_loops import known_amounts

    no_kinds = np.empty((0, len(num_nodes)), dtype=np.int64)
    limits = np.array([limit for limit, _ in too_few], dtype=np.int64)
    kinds = np.array([kinds for _, kinds in too_few], dtype=np.bool_) if too_few else no_kinds.astype(np.bool_)
    learnt = np.array(prices) if prices else no_kinds
    return known_amounts(np.ascontiguousarray(amounts), num_places, num_nodes, learnt, limits, kinds)


def _cheapest(
    amounts: Ints, num_places: Ints, num_nodes: Ints, most: int, prices: Ints | None = None
) -> tuple[NetworkFlow, int]:
    """Return the cheapest assignment without amounts above ``most``, and its price.

    It is a flow from kinds of nodes to kinds of places and, at the end of both, nowhere.
    """
    # Imported late: it loads numba, and most processes that import the planner never assign.
    from resilient.templates.replan.assigning.network_simplex import cheapest_flow

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
