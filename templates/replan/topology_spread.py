"""Spreading the holders of each state over failure domains (zones, racks), so that losing one loses no state.

The loss of a domain counts as one failure: a state should be held in f + 1 domains, or in all where there are fewer.
Nodes exchange places, two at a time, as long as that brings states into more of the domains they lack. Then nodes are
placed as cheaply as can be such that no state is in fewer domains than it should, or was.

Places and nodes of one kind and domain are as good as each other, so only one of each is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.replan.assigning.assignment import FORBIDDEN, assign

_FEW_NODES = 64
_NOTHING: Ints = np.empty(0, dtype=np.int64)


class Kinds(NamedTuple):
    """Places and nodes, of which many are alike.

    Args:
        needs: Which states places of each kind need; one that needs none keeps a node that is left over. [kinds of
            places, states]
        prices: What the copies cost that bring a node into a place. [kinds of places, kinds of nodes]
        places: The kind of each place. [places]
        nodes: The kind of each node; as many as places. [nodes]
    """

    needs: Flags
    prices: Ints
    places: Ints
    nodes: Ints


def lacking_domains(needs: Flags, places: Ints, domains: Ints, wanted: int) -> int:
    """Return in how many more domains states should be held, summed over the states.

    Args:
        needs: Which states places of each kind need. [kinds of places, states]
        places: The kind of each place. [places]
        domains: Number of the domain that the node in each place belongs to. [places]
        wanted: How many domains should hold each state.
    """
    held_in = (_counts(needs, places, domains) > 0).sum(axis=0)
    return int(np.maximum(wanted - held_in, 0).sum())


def spread_domains(kinds: Kinds, chosen: Ints, domains: Ints, wanted: int, settled: Ints = _NOTHING) -> Ints:
    """Make states held in enough domains, where exchanges of nodes can, and copying cheap after that.

    A placement that lacks nothing is returned as it is. Otherwise exchanges start from it; where they leave more
    lacking than may have to be, or the nodes are few, also from the nodes in order of their domains, forwards and
    backwards. The best of the results is returned.

    Args:
        kinds: The places and the nodes.
        chosen: Index of the node in each place. [places]
        domains: Number of the domain of each node. [nodes]
        wanted: How many domains should hold each state.
        settled: Places that keep their nodes, unless more is lacking then; those get them back that others of their
            domain have.

    Returns:
        The index of the node in each place.
    """
    if not lacking_domains(kinds.needs, kinds.places, domains[chosen], wanted):
        return chosen
    every = np.arange(len(chosen))
    if not 0 < len(settled) < len(chosen):
        return _spread(kinds, chosen, domains, wanted, every)
    found = _spread(kinds, chosen, domains, wanted, np.delete(every, settled))
    lacking = lacking_domains(kinds.needs, kinds.places, domains[found], wanted)
    if not lacking:
        return found
    other = _spread(kinds, chosen, domains, wanted, every)
    if lacking_domains(kinds.needs, kinds.places, domains[other], wanted) >= lacking:
        return found
    place_of = np.argsort(other)
    for place, node in zip(settled.tolist(), chosen[settled].tolist(), strict=True):
        instead = other[place]
        if domains[instead] == domains[node]:  # as good for the domains
            other[place], other[place_of[node]] = node, instead
            place_of[instead], place_of[node] = place_of[node], place
    return other


def _spread(kinds: Kinds, chosen: Ints, domains: Ints, wanted: int, movable: Ints) -> Ints:
    """Return :func:`spread_domains`; only some places exchange their nodes."""
    of_others = _counts(kinds.needs, kinds.places, domains[chosen])
    nodes = np.sort(chosen[movable])
    theirs = kinds._replace(places=kinds.places[movable], nodes=kinds.nodes[nodes])
    of_others -= _counts(kinds.needs, theirs.places, domains[chosen[movable]], len(of_others))
    search = _Search(theirs, domains[nodes], wanted, of_others)
    found = [search.improve(np.searchsorted(nodes, chosen[movable]))]
    if search.worth(found[0])[0] > search.least_lacking() or len(chosen) <= _FEW_NODES:
        starts = np.argsort(domains[nodes], kind="stable"), np.argsort(-domains[nodes], kind="stable")
        found.extend(map(search.improve, starts))
    spread = chosen.copy()
    spread[movable] = nodes[min(found, key=search.worth)]
    return spread


class FailureDomains:
    """The failure domains of some nodes.

    Args:
        nodes: The nodes.
        labels: Label of the domain (zone, rack) of nodes; a node without one shares its fate with no other. None is
            asked for where there are none.
        wanted: How many domains should hold each state, where there are so many.
        settled: Those of the nodes that had better be where nothing but domains would have them.

    Attributes:
        wanted: How many domains should hold each state, 0 where none is asked for.
    """

    def __init__(
        self, nodes: Sequence[int], labels: Mapping[int, str], wanted: int, settled: Collection[int] = ()
    ) -> None:
        of_nodes: list[str | int] = [labels.get(node, node) for node in nodes] if labels else []
        numbers = {label: number for number, label in enumerate(dict.fromkeys(of_nodes))}
        self._numbers = np.array([numbers[label] for label in of_nodes], dtype=np.int64)
        # Nodes of one pipeline never hold the same, so that domains of one node each lack nothing.
        self.wanted = min(wanted, len(numbers))
        are_settled = frozenset(settled)
        self._is_settled = np.array([node in are_settled for node in nodes], dtype=np.bool_)

    def lacking(self, needs: Flags, places: Ints, chosen: Ints) -> int:
        """Return :func:`lacking_domains`, with its arguments, where a node is in each place. [places]"""
        return lacking_domains(needs, places, self._numbers[chosen], self.wanted)

    def spread(self, kinds: Kinds, chosen: Ints) -> Ints:
        """Return :func:`spread_domains`, with its arguments."""
        return spread_domains(kinds, chosen, self._numbers, self.wanted, np.flatnonzero(self._is_settled[chosen]))


class _Search:
    """Placements of some nodes.

    Args:
        kinds: Their places, and they.
        domains: The domain of each. [nodes]
        wanted: How many domains should hold each state.
        of_others: How many other places of each domain need each state. [domains, states]
    """

    def __init__(self, kinds: Kinds, domains: Ints, wanted: int, of_others: Ints) -> None:
        self._needs, self._of_others = kinds.needs, of_others
        self._prices, self._places, self._nodes = kinds.prices, kinds.places, kinds.nodes
        self._domains, self._wanted = domains, wanted
        # Nodes of one type are as good as each other.
        num_domains = len(of_others)
        types, self._node_types = np.unique(kinds.nodes * num_domains + domains, return_inverse=True)
        node_kinds, self._type_domains = np.divmod(types, num_domains)
        self._type_prices = kinds.prices[:, node_kinds]

    def worth(self, chosen: Ints) -> tuple[int, int]:
        """Return what is lacking and what copies cost."""
        held_in = (self._counts(chosen) > 0).sum(axis=0)
        return int(self._lacking(held_in).sum()), int(self._paid(chosen).sum())

    def least_lacking(self) -> int:
        """Return what is lacking at least: nodes of a domain can hold no more than the places that need most."""
        num_states, num_nodes = self._needs.shape[1], np.bincount(self._domains, minlength=len(self._of_others))
        most_first = np.sort(self._needs.sum(axis=1)[self._places])[::-1]
        by_others = (self._of_others > 0).sum(axis=1)
        held = np.minimum(np.append(0, most_first.cumsum())[num_nodes] + by_others, num_states)
        return max(0, self._wanted * num_states - int(held.sum()))

    def improve(self, start: Ints) -> Ints:
        """Return a placement that no exchange makes better."""
        chosen = start.copy()
        self._exchange(chosen)
        chosen = self._cheapest(chosen)
        while self._exchange(chosen):
            chosen = self._cheapest(chosen)
        return chosen

    def _exchange(self, chosen: Ints) -> bool:
        from resilient.templates.replan.exchanges import exchange_nodes

        kinds = self._places, self._nodes, self._node_types
        return exchange_nodes(
            self._needs, self._wanted, self._prices, *kinds, self._domains, self._counts(chosen), chosen
        )

    def _paid(self, chosen: Ints) -> Ints:
        """Return what copies cost. [places]"""
        return self._prices[self._places, self._nodes[chosen]]

    def _counts(self, chosen: Ints) -> Ints:
        return self._of_others + _counts(self._needs, self._places, self._domains[chosen], len(self._of_others))

    def _lacking(self, held_in: Ints) -> Ints:
        return np.maximum(self._wanted - held_in, 0)

    def _cheapest(self, chosen: Ints) -> Ints:
        """Return the cheapest placement of those in which no state is in fewer of the domains that it is to be in."""
        prices, kept = self._type_prices, self._kept(chosen)
        own = self._domains[chosen[kept]][:, None] == self._type_domains
        theirs = np.where(own, prices[self._places[kept]], FORBIDDEN)
        place_kinds = self._places.copy()
        place_kinds[kept] = len(prices) + np.arange(len(kept))
        found = assign(np.concatenate((prices, theirs)), place_kinds, self._node_types, start=chosen)
        assert found is not None
        return found

    def _kept(self, chosen: Ints) -> Ints:
        """Return places whose domains suffice for all states, or are all there are; those first that cost least."""
        from resilient.templates.replan.exchanges import different_places, sufficing

        different = different_places(self._places, self._node_types[chosen])
        different = different[np.argsort(self._paid(chosen)[different], kind="stable")]
        domains = self._domains[chosen[different]]
        return different[sufficing(self._needs, self._places[different], domains, self._wanted, self._of_others > 0)]


def _counts(needs: Flags, places: Ints, domains: Ints, num_domains: int = 0) -> Ints:
    """Return how many places of each domain need each state; of all that there are by default. [domains, states]"""
    num_domains, num_kinds = num_domains or int(domains.max()) + 1, len(needs)
    kinds = np.bincount(domains * num_kinds + places, minlength=num_domains * num_kinds)
    # As floats, whole numbers too: those are multiplied many times faster.
    return (kinds.reshape(num_domains, num_kinds).astype(np.float64) @ needs).astype(np.int64)
