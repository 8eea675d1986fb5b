"""Who of those who hold missing bytes sends them, and which. Import it where it is needed: it loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled


class Wants(NamedTuple):
    """Bytes that ranks lack, each a piece of a state that the same ranks hold.

    Args:
        sizes: How many bytes. [wants]
        pieces: Which of the pieces they are of. [wants]
        firsts: Where the bounds of their intervals begin, and the last end. [wants + 1]
        bounds: Of their intervals: start, end, start, end, ...
        first_holders: Where the holders of each piece begin, and the last end. [pieces + 1]
        ranks: The holders, of each piece ascending.
    """

    sizes: Ints
    pieces: Ints
    firsts: Ints
    bounds: Ints
    first_holders: Ints
    ranks: Ints


@compiled
def choose_senders(
    wants: Wants, order: Ints, most: Ints, loads: Ints, cuts: Ints, page_bytes: int, max_whole_bytes: int
) -> int:
    """Split bytes over some least loaded holders such that their loads become as equal as can be; return how many cuts.

    Args:
        wants: What is missing.
        order: In which the wants have their turn. [wants]
        most: By how many each is sent at most. [wants]
        loads: What each rank has to send, which is added to. [ranks]
        cuts: Filled with the cuts: want, sender, first byte, end byte. [at least as many as there are, 4]
        page_bytes: At multiples of which states are cut.
        max_whole_bytes: So many come from one holder.
    """
    chosen, least = np.empty(most.max(), np.int64), np.empty(most.max(), np.int64)
    num_cuts = 0
    for want in order:
        left = wants.sizes[want]
        piece = wants.pieces[want]
        first_holder, end_holder = wants.first_holders[piece], wants.first_holders[piece + 1]
        count = min(most[want], -(-left // max_whole_bytes), end_holder - first_holder)
        num_found = 0
        for place in range(first_holder, end_holder):  # of equally loaded ones the lower rank comes first
            rank = wants.ranks[place]
            load = loads[rank]
            if num_found == count and load >= least[count - 1]:
                continue
            position = min(num_found, count - 1)
            while position and least[position - 1] > load:
                least[position], chosen[position] = least[position - 1], chosen[position - 1]
                position -= 1
            least[position], chosen[position] = load, rank
            num_found = min(num_found + 1, count)

        # The level, rounded up, that the lowest reach when all is poured in.
        poured = left
        level = np.int64(0)
        for position in range(count):
            poured += least[position]
            reached = -(-poured // (position + 1))
            if not position or reached < level:
                level = reached

        interval = wants.firsts[want]
        start = wants.bounds[interval]
        for position in range(count):
            to_send = left
            if position < count - 1:
                to_send = min(max(-((least[position] - level) // page_bytes) * page_bytes, 0), left)
            left -= to_send
            loads[chosen[position]] += to_send
            while to_send:
                if start == wants.bounds[interval + 1]:
                    interval += 2
                    start = wants.bounds[interval]
                end = min(start + to_send, wants.bounds[interval + 1])
                cuts[num_cuts, 0], cuts[num_cuts, 1] = want, chosen[position]
                cuts[num_cuts, 2], cuts[num_cuts, 3] = start, end
                num_cuts += 1
                to_send -= end - start
                start = end
    return num_cuts
