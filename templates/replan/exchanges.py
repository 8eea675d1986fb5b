"""Exchanges of nodes that spread states over failure domains. Import it where it is needed: it loads numba.

States are bits of words here: of many states, few words tell which ones an exchange brings and takes away.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.common.compiled import compiled

_NONE = -1
_BITS = 64
# Numbers of a type of their own, which shifts fill with zeros: the lower bits of pairs, pairs of fours, fours of bytes.
_PAIRS, _FOURS, _BYTES = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_ONE, _TWO, _FOUR, _BYTE = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(8)
_MOST_ONES = np.uint64(127)

Words = npt.NDArray[np.uint64]


@compiled
def exchange_nodes(
    needs: Flags,
    wanted: int,
    prices: Ints,
    kinds: Ints,
    node_kinds: Ints,
    types: Ints,
    domains: Ints,
    counts: Ints,
    chosen: Ints,
) -> bool:
    """Exchange two nodes, again and again, until no exchange makes it better; return whether there was one.

    Better is what leaves less lacking, or as much and is cheaper.

    Args:
        needs: Which states places of each kind need. [kinds of places, states]
        wanted: How many domains should hold each state.
        prices: What the copies cost that bring a node into a place. [kinds of places, kinds of nodes]
        kinds: The kind of each place.
        node_kinds: The kind of each node.
        types: The type of each node: those of one type have the same kind and domain.
        domains: The domain of each node.
        counts: How many places of each domain need each state; changed. [domains, states]
        chosen: The node in each place; changed.
    """
    held_in = (counts > 0).sum(axis=0)
    is_made = False
    while True:
        places = different_places(kinds, types[chosen])
        lacking = np.flatnonzero(held_in < wanted)
        # One of the two that are exchanged holds a state that lacks domains, and the other is where it is missed.
        holds, misses, pays = np.zeros((3, len(places)), dtype=np.bool_)
        for index in range(len(places)):
            kind, node = kinds[places[index]], chosen[places[index]]
            pays[index] = prices[kind, node_kinds[node]] > 0
            for state in lacking:
                holds[index] |= needs[kind, state]
                misses[index] |= counts[domains[node], state] == 0
        tries = holds if holds.sum() <= misses.sum() else misses
        for is_tried in (tries, pays):
            order = np.concatenate((places[is_tried], places[~is_tried]))
            if _exchanged(
                needs, wanted, prices, kinds, node_kinds, domains, counts, held_in, chosen, order, is_tried.sum()
            ):
                is_made = True
                break
        else:
            return is_made


@compiled
def different_places(kinds: Ints, types: Ints) -> Ints:
    """Return the first place of each kind with a node of each type: all others are as good as one of them.

    Args:
        kinds: The kind of each place.
        types: The type of the node in it.
    """
    num_types = types.max() + 1
    first = np.full((kinds.max() + 1) * num_types, _NONE)
    for place in range(len(kinds) - 1, -1, -1):
        first[kinds[place] * num_types + types[place]] = place
    return first[first != _NONE]


@compiled
def _exchanged(
    needs: Flags,
    wanted: int,
    prices: Ints,
    kinds: Ints,
    node_kinds: Ints,
    domains: Ints,
    counts: Ints,
    held_in: Ints,
    chosen: Ints,
    places: Ints,
    num_tries: int,
) -> bool:
    """Make the best exchanges; return whether there were any.

    The best partner of each place that is tried is found. Of these exchanges those are made, the best first, that help
    at least half as much against what is lacking as the best one, and still do after those before.

    Args:
        needs: As in :func:`exchange_nodes`.
        wanted: Likewise.
        prices: Likewise.
        kinds: Likewise.
        node_kinds: Likewise.
        domains: Likewise.
        counts: Likewise; changed. [domains, states]
        held_in: In how many domains each state is; changed. [states]
        chosen: The node in each place; changed.
        places: Those that are looked at.
        num_tries: One of the first ones takes part.
    """
    kind_of, nodes = kinds[places], chosen[places]
    node_of, domain_of = node_kinds[nodes], domains[nodes]
    need, empty, lone = _words(needs)[:, kind_of], _words(counts == 0)[:, domain_of], _words(counts == 1)[:, domain_of]
    lacking, critical = _words((held_in < wanted).reshape(1, -1)), _words((held_in <= wanted).reshape(1, -1))
    mores, partners, least, cheapest, paid = np.empty((5, len(places)), dtype=np.int64)
    for place in range(len(places)):
        paid[place] = prices[kind_of[place], node_of[place]]
    for one in range(num_tries):
        mores[:] = 0
        for word in range(len(need)):
            own, is_empty, is_lone = need[word, one], empty[word, one], lone[word, one]
            short, tight = lacking[word, 0], critical[word, 0]
            for other in range(one + 1, len(places)):
                goes, comes = own & ~need[word, other], need[word, other] & ~own
                opens = (goes & empty[word, other] & ~is_lone) | (comes & is_empty & ~lone[word, other])
                closes = (goes & is_lone & ~empty[word, other]) | (comes & lone[word, other] & ~is_empty)
                mores[other] += _num_ones(closes & tight) - _num_ones(opens & short)
        partner, more, cost = _NONE, 0, 0
        for other in range(one + 1, len(places)):
            others = mores[other] if domain_of[one] != domain_of[other] else 0
            if others > more:
                continue
            price = (
                prices[kind_of[one], node_of[other]] + prices[kind_of[other], node_of[one]] - paid[one] - paid[other]
            )
            if others < more or price < cost:
                partner, more, cost = other, others, price
        partners[one], least[one], cheapest[one] = partner, more, cost
    found = np.flatnonzero(partners[:num_tries] != _NONE)
    if not len(found):
        return False
    enough = least[found].min() // 2
    found = found[least[found] <= enough]
    found = found[np.argsort(cheapest[found], kind="mergesort")]
    is_moved = np.zeros(len(places), dtype=np.bool_)
    for one in found[np.argsort(least[found], kind="mergesort")]:
        other = partners[one]
        if is_moved[one] or is_moved[other]:
            continue
        need_here, need_there = needs[kind_of[one]], needs[kind_of[other]]
        here, there = domain_of[one], domain_of[other]
        excess = held_in - wanted
        if here != there and _more_lacking(need_here, need_there, counts[here], counts[there], excess) > enough:
            continue
        for state in np.flatnonzero(need_here != need_there):
            source, target = (here, there) if need_here[state] else (there, here)
            counts[source, state] -= 1
            held_in[state] += int(counts[target, state] == 0) - int(counts[source, state] == 0)
            counts[target, state] += 1
        chosen[places[one]], chosen[places[other]] = chosen[places[other]], chosen[places[one]]
        is_moved[one] = is_moved[other] = True
    return bool(is_moved.any())


@compiled
def sufficing(needs: Flags, kinds: Ints, domains: Ints, wanted: int, held: Flags) -> Ints:
    """Return the first places that bring each state into enough domains, or into all that it can be in.

    Args:
        needs: Which states places of each kind need. [kinds of places, states]
        kinds: The kind of each place.
        domains: The domain of the node in it.
        wanted: How many domains should hold each state.
        held: Which ones each domain holds without them; changed. [domains, states]
    """
    num_states, held_in = needs.shape[1], held.sum(axis=0)
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
def _more_lacking(need: Flags, other_need: Flags, here: Ints, there: Ints, excess: Ints) -> int:
    """Return how much more is lacking after an exchange of nodes between two places, in two domains.

    Args:
        need: Which states the one place needs. [states]
        other_need: Which ones the other needs. [states]
        here: How many nodes of the one node's domain hold each state. [states]
        there: Likewise of the other's. [states]
        excess: In how many more domains than should be each state is. [states]
    """
    more = 0
    for state in range(len(excess)):
        if need[state] != other_need[state]:
            source, target = (here, there) if need[state] else (there, here)
            change = int(target[state] == 0) - int(source[state] == 1)
            more += max(-excess[state] - change, 0) - max(-excess[state], 0)
    return more


@compiled
def _num_ones(word: np.uint64) -> int:
    word = word - ((word >> _ONE) & _PAIRS)
    word = (word & _FOURS) + ((word >> _TWO) & _FOURS)
    word = (word + (word >> _FOUR)) & _BYTES
    word = word + (word >> _BYTE)
    word = word + (word >> np.uint64(16))
    return np.int64((word + (word >> np.uint64(32))) & _MOST_ONES)


@compiled
def _words(flags: Flags) -> Words:
    """Return rows of flags as columns of words. [words, rows]"""
    words = np.zeros((-(-flags.shape[1] // _BITS), len(flags)), dtype=np.uint64)
    for row in range(len(flags)):
        for number in range(flags.shape[1]):
            if flags[row, number]:
                words[number // _BITS, row] |= _ONE << np.uint64(number % _BITS)
    return words
