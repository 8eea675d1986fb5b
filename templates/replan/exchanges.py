"""The exchange of two nodes that spreads states most, or saves most. Import it where it is needed: it loads numba.

Only one place of each kind with a node of each kind of each domain is looked at.
"""

from __future__ import annotations

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled

NONE = -1
"""In place of a place: there is no such exchange."""


@compiled
def to_spread(
    needs: Flags,
    excess: Ints,
    worths: Ints,
    prices: Ints,
    kinds: Ints,
    nodes: Ints,
    domains: Ints,
    counts: Ints,
    tries: Ints,
    places: Ints,
) -> tuple[int, int]:
    """Return the two places after whose exchange least is lacking, of these the cheapest; :data:`NONE` where none is.

    Args:
        needs: Which states places of each kind need. [kinds of places, states]
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
    least, cheapest, first, second = 0, 0, NONE, NONE
    for one in tries:
        for other in places:
            lacking = _more_lacking(needs, excess, worths, kinds, domains, counts, one, other)
            if lacking < least or (lacking == least and lacking < 0):
                price = _more_expensive(prices, kinds, nodes, one, other)
                if lacking < least or price < cheapest or (price == cheapest and one < first):
                    least, cheapest, first, second = lacking, price, one, other
    return first, second


@compiled
def to_save(
    needs: Flags,
    excess: Ints,
    worths: Ints,
    prices: Ints,
    kinds: Ints,
    nodes: Ints,
    domains: Ints,
    counts: Ints,
    tries: Ints,
    places: Ints,
) -> tuple[int, int]:
    """Return the two places whose exchange saves most and lets no more be lacking, with :func:`to_spread`'s arguments.

    Of equally good ones it is the first.
    """
    cheapest, first, second = 0, NONE, NONE
    for one in tries:
        for other in places:
            price = _more_expensive(prices, kinds, nodes, one, other)
            if price < cheapest and _more_lacking(needs, excess, worths, kinds, domains, counts, one, other) <= 0:
                cheapest, first, second = price, one, other
    return first, second


@compiled
def _more_lacking(
    needs: Flags, excess: Ints, worths: Ints, kinds: Ints, domains: Ints, counts: Ints, one: int, other: int
) -> int:
    """Return how much more is lacking after an exchange."""
    here, there = domains[one], domains[other]
    more = 0
    if here == there or kinds[one] == kinds[other]:
        return more
    for state in range(len(excess)):
        need = needs[kinds[one], state]
        if need == needs[kinds[other], state]:
            continue
        # A state that just one of both needs comes to the other's domain; its own loses it with the last holder there.
        source, target = (here, there) if need else (there, here)
        change = int(counts[target, state] == 0) - int(counts[source, state] == 1)
        if change:
            before = excess[state]
            more += (max(-before - change, 0) - max(-before, 0)) * worths[state]
    return more


@compiled
def _more_expensive(prices: Ints, kinds: Ints, nodes: Ints, one: int, other: int) -> int:
    """Return how much more copies cost after an exchange."""
    taken = int(prices[kinds[one], nodes[other]] + prices[kinds[other], nodes[one]])
    return taken - int(prices[kinds[one], nodes[one]] + prices[kinds[other], nodes[other]])
