"""The order in which a pipeline runs microbatches of unequal length under 1F1B.

Source: DistTrain (SIGCOMM'25), inter-microbatch reordering. The first stage idles between the end of what it did last
and the gradient from the second stage; the microbatch whose forward it runs there should be as long as that interval.
The paper's choice is a heuristic: the best of thirty random orders is often better. So it is where a search begins that
exchanges two microbatches at a time, as long as that helps and a fixed amount of work is not used up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled

_SEARCH = 2**20
"""Forwards and backwards that the search may time, over all orders: some ten milliseconds."""


def reorder(forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> Ints:
    """Return an order of the microbatches under which 1F1B ends early.

    It is never worse than the order they came in, than ascending order and than :func:`fill_intervals`.

    Args:
        forward_ms: Of each microbatch on each stage, ``[num_stages, num_microbatches]``.
        backward_ms: Likewise.

    Returns:
        The microbatches in the order of their execution, ``[num_microbatches]``.

    Raises:
        ValueError: The shapes differ, a time is negative, or there is nothing to order.
    """
    forward, backward = _times(forward_ms, backward_ms)
    starts = [np.arange(forward.shape[1]), _ascending(forward, backward), fill_intervals(forward_ms, backward_ms)]
    best = min(starts, key=lambda order: _run(order, forward, backward)[0]).copy()
    compiled(_search)(best, forward, backward, _SEARCH // forward.size, np.empty((2, *forward.shape), np.int64))
    return best


def fill_intervals(forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> Ints:
    """Return the paper's order: forwards on the first stage fill the intervals before its backwards.

    Of l microbatches on p stages, the smallest comes first and the next p - 1 come last. Then p - 1 are chosen whose
    forwards together come nearest to the first interval, and one for each further interval. With l < 2p - 1 (not
    enough to fill anything) or one stage the order is ascending.

    Args:
        forward_ms: As for :func:`reorder`.
        backward_ms: Likewise.

    Returns:
        Likewise.

    Raises:
        ValueError: Likewise.

    Source: DistTrain (SIGCOMM'25), algorithm 2.
    """
    forward, backward = _times(forward_ms, backward_ms)
    ascending = _ascending(forward, backward)
    num_stages, num_microbatches = forward.shape
    if num_stages == 1 or num_microbatches < 2 * num_stages - 1:
        return ascending
    first, last = ascending[:1], ascending[1:num_stages][::-1]
    free = ascending[num_stages:]
    free = free[np.argsort(forward[0, free], kind="stable")]
    # The gradient of the first microbatch comes back when it has been through all other stages.
    interval = (forward[1:, first] + backward[1:, first]).sum()
    sums = np.lib.stride_tricks.sliding_window_view(forward[0, free], num_stages - 1).sum(axis=1)
    start = int(np.abs(sums - interval).argmin())
    order = np.concatenate((first, free[start : start + num_stages - 1]))
    free = np.delete(free, np.s_[start : start + num_stages - 1])
    while len(free):
        # The first stages' backwards so far depend on no later microbatch than those already placed.
        number = len(order) - num_stages
        ends = _run(order, forward, backward)[1]
        interval = ends[1, number + 1] - ends[0, number]
        fits = int(np.abs(forward[0, free] - interval).argmin())
        order = np.append(order, free[fits])
        free = np.delete(free, fits)
    return np.concatenate((order, last))


def pipeline_ms(order: npt.ArrayLike, forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> float:
    """Return how long 1F1B takes with the microbatches in this order, messages left out.

    Equal to :func:`resilient.templates.schedules.simulator.simulate`, in a hundredth of the time.
    """
    return _run(np.asarray(order, dtype=np.int64), *_times(forward_ms, backward_ms))[0] / 1e6


def _times(forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> tuple[Ints, Ints]:
    """Return whole nanoseconds."""
    forward, backward = np.asarray(forward_ms, dtype=np.float64), np.asarray(backward_ms, dtype=np.float64)
    least = min(forward.min(initial=0.0), backward.min(initial=0.0))
    if forward.shape != backward.shape or forward.ndim != 2 or not forward.size or least < 0:
        raise ValueError(
            f"forward_ms and backward_ms must be [num_stages, num_microbatches] with times >= 0, got shapes "
            f"{forward.shape} and {backward.shape}, times down to {least}; give one time per stage and microbatch"
        )
    return np.rint(forward * 1e6).astype(np.int64), np.rint(backward * 1e6).astype(np.int64)


def _ascending(forward: Ints, backward: Ints) -> Ints:
    return np.argsort((forward + backward).sum(axis=0), kind="stable")


def _run(order: Ints, forward: Ints, backward: Ints) -> tuple[int, Ints]:
    """Return when the last backward ends, and when each does. [num_stages, num_microbatches]"""
    ends = np.empty((2, len(forward), len(order)), np.int64)
    return int(compiled(_search)(order, forward, backward, 0, ends)), ends[1]


def _search(order: Ints, forward: Ints, backward: Ints, tries: int, ends: Ints) -> int:
    """Time 1F1B, then exchange two microbatches of ``order`` as long as it gets faster, at most ``tries`` times.

    ``ends`` receives the ends of the forwards and backwards timed last.
    """
    num_stages, count = len(forward), len(order)
    done = np.empty(num_stages, np.int64)
    clock = np.empty(num_stages, np.int64)
    best, first, second, since = -1, 0, 0, 0
    while True:
        done[:] = 0
        clock[:] = 0
        for number in range(count):
            for stage in range(num_stages):
                while done[stage] < min(count, number + num_stages - stage):
                    k = done[stage]
                    if stage and ends[0, stage - 1, k] > clock[stage]:
                        clock[stage] = ends[0, stage - 1, k]
                    clock[stage] += forward[stage, order[k]]
                    ends[0, stage, k] = clock[stage]
                    done[stage] += 1
            for stage in range(num_stages - 1, -1, -1):
                if stage + 1 < num_stages and ends[1, stage + 1, number] > clock[stage]:
                    clock[stage] = ends[1, stage + 1, number]
                clock[stage] += backward[stage, order[number]]
                ends[1, stage, number] = clock[stage]
        if best < 0 or clock[0] < best:
            best, since = clock[0], 0
        else:
            order[first], order[second] = order[second], order[first]
            since += 1
        if tries == 0 or since == count * (count - 1) // 2:
            return best
        tries -= 1
        second += 1
        if second == count:
            first = first + 1 if first + 2 < count else 0
            second = first + 1
        order[first], order[second] = order[second], order[first]
