"""The exchange of two nodes that spreads states most, or saves most. Import it where it is needed: it loads numba.

Only one place of each kind with a node of each kind of each domain is looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled

NONE = -1
"""In place of a place: there is no such exchange."""


class PlaceExchanges(NamedTuple):
    """A placement, and the exchanges of nodes between two of its places.

    Args:
        needs: Which states places of each kind need; those alone that may lack domains afterwards. [kinds of places,
            states]
        excess: How many domains more hold each state than should. [states]
        worths: What a domain more is worth where one lacks, by state. [states]
        prices: What the copies cost that bring a node into a place. [kinds of places, kinds of nodes]
        kinds: The kind of each place.
        nodes: The kind of the node in it.
        domains: The domain of that.
        counts: How many places of each domain need each state. [domains, states]
        tries: The places of which one takes part.
        places: The places with which it may.
    """

    needs: Flags
    excess: Ints
    worths: Ints
    prices: Ints
    kinds: Ints
    nodes: Ints
    domains: Ints
    counts: Ints
    tries: Ints
    places: Ints


@compiled
def to_spread(of: PlaceExchanges) -> tuple[int, int]:
    """Return the two places whose exchange leaves least lacking, of these the cheapest; or :data:`NONE` twice."""
    least, cheapest, first, second = 0, 0, NONE, NONE
    for one in of.tries:
        for other in of.places:
            lacking = _more_lacking(of, one, other)
            if lacking < least or (lacking == least and lacking < 0):
                price = _more_expensive(of, one, other)
                if lacking < least or price < cheapest or (price == cheapest and one < first):
                    least, cheapest, first, second = lacking, price, one, other
    return first, second


@compiled
def to_save(of: PlaceExchanges) -> tuple[int, int]:
    """Return the two places whose exchange saves most and lets no more be lacking; the first of equally good ones."""
    cheapest, first, second = 0, NONE, NONE
    for one in of.tries:
        for other in of.places:
            price = _more_expensive(of, one, other)
            if price < cheapest and _more_lacking(of, one, other) <= 0:
                cheapest, first, second = price, one, other
    return first, second


@compiled
def sufficing(needs: Flags, kinds: Ints, domains: Ints, wanted: int) -> Ints:
    """Return the first places that bring each state into enough domains, or into all that it can be in.

    Args:
        needs: Which states places of each kind need. [kinds of places, states]
        kinds: The kind of each place.
        domains: The domain of the node in it.
        wanted: How many domains should hold each state.
    """
    num_states = needs.shape[1]
    held = np.zeros((domains.max() + 1, num_states), dtype=np.bool_)
    held_in = np.zeros(num_states, dtype=np.int64)
    found, number = np.empty(len(kinds), dtype=np.int64), 0
    for place in range(len(kinds)):
        kind, domain, suffices = kinds[place], domains[place], True
        for state in range(num_states):
            if needs[kind, state] and held_in[state] < wanted and not held[domain, state]:
                suffices = False
                break
        if suffices:
            continue
        for state in range(num_states):
            if needs[kind, state] and not held[domain, state]:
                held[domain, state] = True
                held_in[state] += 1
        found[number], number = place, number + 1
    return found[:number]


@compiled
def _more_lacking(of: PlaceExchanges, one: int, other: int) -> int:
    """Return how much more is lacking after an exchange."""
    here, there, kind, other_kind = of.domains[one], of.domains[other], of.kinds[one], of.kinds[other]
    more = 0
    if here == there or kind == other_kind:
        return more
    for state in range(len(of.excess)):
        need = of.needs[kind, state]
        if need == of.needs[other_kind, state]:
            continue
        # A state that just one of both needs comes to the other's domain; its own loses it with the last holder there.
        source, target = (here, there) if need else (there, here)
        change = int(of.counts[target, state] == 0) - int(of.counts[source, state] == 1)
        if change:
            before = of.excess[state]
            more += (max(-before - change, 0) - max(-before, 0)) * of.worths[state]
    return more


@compiled
def _more_expensive(of: PlaceExchanges, one: int, other: int) -> int:
    """Return how much more copies cost after an exchange."""
    prices, kind, other_kind, node, other_node = (
        of.prices,
        of.kinds[one],
        of.kinds[other],
        of.nodes[one],
        of.nodes[other],
    )
    return int(prices[kind, other_node] + prices[other_kind, node]) - int(
        prices[kind, node] + prices[other_kind, other_node]
    )
