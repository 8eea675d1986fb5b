"""Spreading the holders of each state over failure domains (zones, racks), so that losing one loses no state.

The loss of a domain counts as one failure: a state should be held in f + 1 domains, or in all where there are fewer.
Nodes exchange places, two at a time, as long as that brings states into more of the domains they lack; then, as long
as that makes copying cheaper and adds nothing to what is lacking.
"""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.replan.assignment import assign

_FEW_NODES = 64


def lacking_domains(needs: Flags, domains: Ints, wanted: int) -> int:
    """Return in how many more domains states should be held, summed over the states.

    Args:
        needs: Which states each place needs. [places, states]
        domains: Number of the domain that the node in each place belongs to. [places]
        wanted: How many domains should hold each state.
    """
    held_in = (_counts(needs, domains) > 0).sum(axis=0)
    return int(np.maximum(wanted - held_in, 0).sum())


def spread_domains(needs: Flags, prices: Floats, chosen: Ints, domains: Ints, wanted: int) -> Ints:
    """Make states held in enough domains, where exchanges of nodes can, and copying cheap after that.

    A placement that lacks nothing is returned as it is. Otherwise exchanges start from it; where they leave something
    lacking, or the nodes are few, also from the nodes in order of their domains, forwards and backwards. The best of
    the results is returned.

    Args:
        needs: Which states each place needs; places that need none keep the nodes that are left over. [places, states]
        prices: What the copies cost that bring a node into a place. [places, nodes]
        chosen: Index of the node in each place; as many places as nodes. [places]
        domains: Number of the domain of each node. [nodes]
        wanted: How many domains should hold each state.

    Returns:
        The index of the node in each place.
    """
    if not lacking_domains(needs, domains[chosen], wanted):
        return chosen
    search = _Search(needs, prices, domains, wanted)
    found = [search.improve(chosen)]
    if search.worth(found[0])[0] or len(domains) <= _FEW_NODES:
        starts = np.argsort(domains, kind="stable"), np.argsort(-domains, kind="stable")
        found.extend(map(search.improve, starts))
    return min(found, key=search.worth)


class _Search:
    def __init__(self, needs: Flags, prices: Floats, domains: Ints, wanted: int) -> None:
        self._needs, self._weights = np.unique(needs, axis=1, return_counts=True)
        self._prices, self._domains, self._wanted = prices, domains, wanted
        self._every = np.arange(len(needs))

    def worth(self, chosen: Ints) -> tuple[int, float]:
        """Return what is lacking and what copies cost."""
        return int(self._lacking(self._held_in(chosen)).sum()), float(self._prices[self._every, chosen].sum())

    def improve(self, start: Ints) -> Ints:
        """Return a placement that no exchange makes better."""
        chosen = start.copy()
        while self._exchange_to_spread(chosen):
            pass
        # Which domain each place has is settled; among the nodes of a domain the cheapest assignment is at hand.
        for domain in range(int(self._domains.max()) + 1):
            places = np.flatnonzero(self._domains[chosen] == domain)
            nodes = np.sort(chosen[places])
            chosen[places] = nodes[assign(self._prices[places[:, None], nodes])]
        while self._exchange_to_save(chosen):
            pass
        return chosen

    def _held_in(self, chosen: Ints) -> Ints:
        return (_counts(self._needs, self._domains[chosen]) > 0).sum(axis=0)

    def _lacking(self, held_in: Ints) -> Ints:
        return np.maximum(self._wanted - held_in, 0) * self._weights

    def _places_to_spread(self, chosen: Ints) -> Ints:
        """Return places one of which takes part in each exchange that helps: the fewer of both sides'."""
        counts = _counts(self._needs, self._domains[chosen])
        lacking = self._lacking((counts > 0).sum(axis=0)) > 0
        holding = np.flatnonzero(self._needs[:, lacking].any(axis=1))
        missed = np.flatnonzero((counts[:, lacking] == 0).any(axis=1)[self._domains[chosen]])
        return min(holding, missed, key=len)

    def _exchange_to_spread(self, chosen: Ints) -> bool:
        """Make the exchange after which least is lacking, of these the cheapest; return whether there was one."""
        counts = _counts(self._needs, self._domains[chosen])
        best: tuple[int, float, int, int] | None = None
        for place in map(int, self._places_to_spread(chosen)):
            lacking = self._more_lacking(chosen, counts, place, self._every)
            if lacking.min() < 0:
                prices = self._more_expensive(chosen, place)
                other = int(np.lexsort((prices, lacking))[0])
                found = int(lacking[other]), float(prices[other]), place, other
                best = found if best is None else min(best, found)
        if best is not None:
            _swap(chosen, *best[2:])
        return best is not None

    def _exchange_to_save(self, chosen: Ints) -> bool:
        """Make the exchange that saves most without adding to what is lacking; return whether there was one."""
        counts = _counts(self._needs, self._domains[chosen])
        best: tuple[float, int, int] | None = None
        for place in map(int, np.flatnonzero(self._prices[self._every, chosen])):
            prices = self._more_expensive(chosen, place)
            others = np.flatnonzero(prices < (0 if best is None else best[0]))
            others = others[self._more_lacking(chosen, counts, place, others) <= 0]
            if len(others):
                other = int(others[prices[others].argmin()])
                best = float(prices[other]), place, other
        if best is not None:
            _swap(chosen, *best[1:])
        return best is not None

    def _more_lacking(self, chosen: Ints, counts: Ints, place: int, others: Ints) -> Ints:
        """Return how much more is lacking after an exchange of ``place`` with each of ``others``."""
        held_in = (counts > 0).sum(axis=0)
        domains = self._domains[chosen[others]]
        here, there = counts[self._domains[chosen[place]]], counts[domains]
        only_here = self._needs[place] & ~self._needs[others]
        only_there = ~self._needs[place] & self._needs[others]
        # A state that just one of both needs comes to the other's domain; its own loses it with the last holder there.
        change = only_here * ((there == 0) * 1 - (here == 1)) + only_there * ((here == 0) * 1 - (there == 1))
        change[domains == self._domains[chosen[place]]] = 0
        return (self._lacking(held_in + change) - self._lacking(held_in)).sum(axis=1)

    def _more_expensive(self, chosen: Ints, place: int) -> Floats:
        """Return how much more copies cost after an exchange of ``place`` with each place. [places]"""
        now = self._prices[self._every, chosen]
        return self._prices[place, chosen] + self._prices[:, chosen[place]] - now - now[place]


def _swap(chosen: Ints, one: int, other: int) -> None:
    chosen[[one, other]] = chosen[[other, one]]


def _counts(needs: Flags, domains: Ints) -> Ints:
    """Return how many places of each domain need each state. [domains, states]"""
    counts = np.zeros((int(domains.max()) + 1, needs.shape[1]), dtype=np.int64)
    np.add.at(counts, domains, needs)
    return counts
