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

_SEARCH = 2**18
"""Forwards and backwards that the search may time, over all orders: a few milliseconds."""


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
    from resilient.planners.packing.order_kernels import search_order

    forward, backward = _times(forward_ms, backward_ms)
    starts = [np.arange(forward.shape[1]), _ascending(forward, backward), fill_intervals(forward_ms, backward_ms)]
    best = min(starts, key=lambda order: _run(order, forward, backward)).copy()
    search_order(best, forward, backward, _SEARCH // forward.size, np.empty((2, *forward.shape), np.int64))
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
    from resilient.planners.packing.order_kernels import fill_order

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
    order = np.concatenate((order, free))
    fill_order(order, len(order) - len(free), forward, backward)
    return np.concatenate((order, last))


def pipeline_ms(order: npt.ArrayLike, forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> float:
    """Return how long 1F1B takes with the microbatches in this order, messages left out.

    Equal to :func:`resilient.templates.schedules.simulator.simulate`, in a hundredth of the time.
    """
    return _run(np.asarray(order, dtype=np.int64), *_times(forward_ms, backward_ms)) / 1e6


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


def _run(order: Ints, forward: Ints, backward: Ints) -> int:
    """Return when the last backward ends."""
    from resilient.planners.packing.order_kernels import search_order

    return search_order(order, forward, backward, 0, np.empty((2, len(forward), len(order)), np.int64))
