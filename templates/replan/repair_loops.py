"""The loops of repairs and of who goes on, one pipeline after the other. Import it where needed: it loads numba."""

from __future__ import annotations

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled


@compiled
def make_viable(
    index: Ints, size: Ints, spare: int, n0: int, largest: int, min_pipelines: int, giving_up: bool
) -> tuple[bool, Ints, Ints, int, bool, bool]:
    """Borrow and merge until every pipeline has n0 nodes.

    Args:
        index: Of each pipeline, ascending.
        size: Its nodes.
        spare: Nodes without a place.
        n0: The smallest size.
        largest: The largest size.
        min_pipelines: f + 1.
        giving_up: Whether pipelines with too few nodes are given up while there are enough pipelines.

    Returns:
        Whether that is possible; the pipelines, their nodes, and those without a place then; whether any was borrowed,
        and whether any pipeline with nodes was given up.
    """
    index, size = index.copy(), size.copy()
    borrowed = merged = False
    while size.min() < n0:
        lender = size.argmax()
        has_lender = size[lender] > n0
        if len(size) > min_pipelines and (giving_up or size.min() == 0 or not has_lender):
            position = len(size) - 1 - size[::-1].argmin()
            freed = size[position]
            index = np.concatenate((index[:position], index[position + 1 :]))
            size = np.concatenate((size[:position], size[position + 1 :]))
            merged = merged or freed > 0
            spare += _hand_out(size, freed, n0, largest)
        elif has_lender:
            size[lender] -= 1
            size[_least_needy(size, n0)] += 1
            borrowed = True
        else:
            return False, index, size, spare, borrowed, merged
    return True, index, size, spare, borrowed, merged


@compiled
def _least_needy(size: Ints, n0: int) -> int:
    """Return which of the pipelines below n0 is the largest, -1 where there is none."""
    found = -1
    for position in range(len(size)):
        if size[position] < n0 and (found < 0 or size[position] > size[found]):
            found = position
    return found


@compiled
def _hand_out(size: Ints, freed: int, n0: int, largest: int) -> int:
    """Give nodes to pipelines below n0, or all to the smallest, or wherever there is room; return what is left."""
    while freed:
        needy = _least_needy(size, n0)  # it is the largest below n0 until it has that many
        to = needy if needy >= 0 else size.argmin()
        taken = min(freed, (n0 if needy >= 0 else largest) - size[to])
        if not taken:
            return freed
        size[to] += taken
        freed -= taken
    return 0


@compiled
def use_spare(
    index: Ints, size: Ints, spare: int, n0: int, largest: int, max_pipelines: int, next_index: int, adding: bool
) -> tuple[Ints, Ints, int]:
    """Make new pipelines as large as the smallest, or extend the smallest, of equal ones the first.

    Args:
        index: Of each pipeline, ascending.
        size: Its nodes, n0 or more.
        spare: Nodes without a place.
        n0: The smallest size.
        largest: The largest size.
        max_pipelines: The most there may be.
        next_index: The first new pipeline's.
        adding: Whether to make new ones before all others have the largest size.

    Returns:
        The pipelines, their nodes, and those without a place then.
    """
    count = len(size)
    indices, sizes = np.empty((2, count + spare // n0), dtype=np.int64)
    indices[:count], sizes[:count] = index, size
    least, position = sizes[:count].min(), 0
    while spare:
        while position < count and sizes[position] > least:
            position += 1
        if position == count:
            least, position = sizes[:count].min(), 0
            continue
        if (adding or least >= largest) and spare >= n0 and count < max_pipelines:
            new = min(spare, least)
            indices[count], sizes[count] = next_index, new
            spare -= new
            if new < least:
                least, position = new, count
            count += 1
            next_index += 1
        elif least >= largest:
            break
        else:
            sizes[position] += 1
            spare -= 1
    return indices[:count].copy(), sizes[:count].copy(), spare


@compiled
def go_on(continues: Ints, same: Ints, old: Ints, same_of_old: Ints, num_same: int) -> Ints:
    """Let targets that continue nothing go on from pipelines with their layout, the first ones from the first.

    Args:
        continues: Of each target the pipeline that it goes on from, negative for none.
        same: Of each target a number that pipelines with its layout have, too; negative for none.
        old: The pipelines, in the order in which they are taken.
        same_of_old: Of each of them its number, below ``num_same``.
        num_same: One more than the largest.

    Returns:
        Of each target the pipeline that it goes on from then.
    """
    continues = continues.copy()
    is_taken = np.zeros(len(old), dtype=np.bool_)
    for target in range(len(continues)):
        if continues[target] >= 0:
            is_taken[continues[target]] = True
    looked_at = np.zeros(num_same, dtype=np.int64)
    for target in range(len(continues)):
        if continues[target] >= 0 or same[target] < 0:
            continue
        place = looked_at[same[target]]
        while place < len(old) and (same_of_old[place] != same[target] or is_taken[old[place]]):
            place += 1
        if place < len(old):
            continues[target] = old[place]
            place += 1
        looked_at[same[target]] = place
    return continues
