"""Orders of microbatches that memory holds: what lies next to each other in a pipeline is kept at the same time.

Not of a paper. Where the order that is wanted has heavy microbatches in a row, it is changed only as far as it must be:
the next one is the first of the order that fits, beside those before it and the lightest that may follow. So an order
that fits stays as it is, and one that does not still fills the room: microbatches that are kept apart from each other
instead are all waited for in turn, which can take several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from resilient.planners.packing.microbatch_order import pipeline_ms
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled

_WHOLE = 1 << 40
"""Parts that a stage's room is counted in: sums of these are exact."""


def fit_order(order: Ints, needs: Floats, windows: Ints) -> Ints | None:
    """Return an order like this one that fits, itself if it does; None where none is found.

    Args:
        order: The microbatches as they should be run. [num_microbatches]
        needs: Part of each stage's room that each microbatch takes. [num_stages, num_microbatches]
        windows: How many in a row each stage holds. [num_stages]
    """
    parts = np.ceil(np.minimum(needs, 2.0) * _WHOLE).astype(np.int64)
    found = np.empty_like(order)
    placed = compiled(_fit)(order, parts, np.minimum(windows, len(order)), np.argsort(parts, axis=1), found)
    return found if placed == len(order) else None


def fastest_fitting(
    orders: Iterable[Ints], needs: Floats, windows: Ints, forward_ms: Floats, backward_ms: Floats
) -> Ints | None:
    """Return the order under which 1F1B ends first, of what :func:`fit_order` makes of these; None where it is nothing.

    Args:
        orders: Those that are tried; of equally fast ones the first is taken.
        needs: As for :func:`fit_order`.
        windows: Likewise.
        forward_ms: Of each microbatch on each stage. [num_stages, num_microbatches]
        backward_ms: Likewise.
    """
    fitting = [found for found in (fit_order(each, needs, windows) for each in orders) if found is not None]
    return min(fitting, key=lambda found: pipeline_ms(found, forward_ms, backward_ms), default=None)


def spaced(order: Ints, needs: Floats, windows: Ints) -> Ints:
    """Return the position of each microbatch, with none where no other one fits beside those before it.

    Args:
        order: The microbatches as they should be run. [num_microbatches]
        needs: As for :func:`fit_order`, each <= 1.
        windows: Likewise.
    """
    parts = np.ceil(needs * _WHOLE).astype(np.int64)
    position = np.empty_like(order)
    compiled(_space)(order, parts, windows, position)
    return position


def order_fits(order: Ints, needs: Floats, windows: Ints) -> bool:
    """Return whether memory holds an order; arguments are those of :func:`fit_order`."""
    found = fit_order(order, needs, windows)
    return found is not None and bool((found == order).all())


def _fit(order: Ints, needs: Ints, windows: Ints, ascending: Ints, found: Ints) -> int:
    """Fill in the order; return how many microbatches it has when no other one fits."""
    num_stages, count = needs.shape
    sums = np.zeros((num_stages, count + 1), np.int64)
    room = np.empty(num_stages, np.int64)
    waits = np.ones(count, np.bool_)
    for position in range(count):
        for stage in range(num_stages):
            held = sums[stage, position]
            room[stage] = _WHOLE - held + sums[stage, max(position + 1 - windows[stage], 0)]
            # As many as stay beside it may be the lightest.
            lightest, following = 0, 0
            for each in ascending[stage]:
                if not waits[each]:
                    continue
                following += 1
                end = position + following + 1
                if following == windows[stage] or end > count:
                    break
                lightest += needs[stage, each]
                room[stage] = min(room[stage], _WHOLE - held + sums[stage, max(end - windows[stage], 0)] - lightest)
        chosen = -1
        for each in order:
            if waits[each]:
                order_fits = True
                for stage in range(num_stages):
                    order_fits = order_fits and needs[stage, each] <= room[stage]
                if order_fits:
                    chosen = each
                    break
        if chosen < 0:
            return position
        waits[chosen] = False
        found[position] = chosen
        for stage in range(num_stages):
            sums[stage, position + 1] = sums[stage, position] + needs[stage, chosen]
    return count


def _space(order: Ints, needs: Ints, windows: Ints, position: Ints) -> None:
    """Fill in the positions."""
    num_stages, count = needs.shape
    longest = windows.max()
    # Of the last positions, what each stage needs; and what it has left.
    recent = np.zeros((longest, num_stages), np.int64)
    room = np.full(num_stages, _WHOLE)
    waits = np.ones(count, np.bool_)
    done, place = 0, 0
    while done < count:
        for stage in range(num_stages):
            room[stage] += recent[(place - windows[stage]) % longest, stage]
        recent[place % longest] = 0
        for each in order:
            if waits[each] and (needs[:, each] <= room).all():
                waits[each] = False
                position[each] = place
                recent[place % longest] = needs[:, each]
                room -= needs[:, each]
                done += 1
                break
        place += 1
