"""Steps that several planners share: spreading weights over unequal bins, cutting a chain into stages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Floats, Ints


def longest_first(weights: npt.ArrayLike, speeds: npt.ArrayLike) -> Ints:
    """Spread weights over bins: from the heaviest on, each to the bin that is done with it first.

    This is the longest-processing-time rule. Of m bins of equal speed the fullest holds at most 4/3 - 1 / (3 m) of the
    least possible; of unequal ones the last is done after at most 2 m / (m + 1) times the least possible, and
    1 + 3^(1/2) / 3 times, 1.58.

    Args:
        weights: What each item costs, ``[num_items]``, >= 0.
        speeds: Work per time of each bin, ``[num_bins]``, > 0.

    Returns:
        The bin of each item, ``[num_items]``. Equal weights and bins go by position, equally fast ones by load first.

    Raises:
        ValueError: There is no bin, a weight is negative or not finite, or a speed is not positive.

    Source: Graham (1969); for unequal speeds Gonzalez, Ibarra and Sahni (1977), and Kovacs (2010).
    """
    from resilient.planners.packing.kernels import descending

    items, bins = _checked(weights, speeds)
    return give_out(items, bins, descending(items))


def give_out(weights: npt.ArrayLike, speeds: npt.ArrayLike, order: Ints) -> Ints:
    """Spread weights over bins in an order, else like :func:`longest_first`.

    Args:
        weights: As there.
        speeds: As there.
        order: Positions of items. Those that are not in it have no bin, -1.

    Raises:
        ValueError: As there.
    """
    from resilient.planners.packing.kernels import spread

    items, bins = _checked(weights, speeds)
    return spread(items, np.ascontiguousarray(order, dtype=np.int64), *by_speed(bins))


def deal_whole(weights: npt.ArrayLike, bins: Ints, turn: Ints) -> Ints:
    """Return the bin of each item: in each turn :func:`longest_first`, fuller ones for bins that have less so far.

    Args:
        weights: What each item costs, ``[num_items]``, >= 0.
        bins: The first bin that each item may go to, and one past the last one: the same or none of another's.
            ``[num_items, 2]``
        turn: Of each item.
    """
    from resilient.planners.packing.kernels import deal

    items, _ = _checked(weights, [1.0])
    first, end = np.ascontiguousarray(bins.T)
    return deal(items, np.lexsort((-items, first, turn)), first, end, turn, int(end.max(initial=0)))


def fullest(
    weights: npt.ArrayLike, sizes: npt.ArrayLike, microbatch: Ints, num_microbatches: int, lanes: int
) -> Floats:
    """Return the size of what the fullest of several lanes gets of each microbatch that :func:`deal_whole` deals.

    Args:
        weights: By which samples are dealt. [num_samples]
        sizes: Of samples. [num_samples]
        microbatch: Of each.
        num_microbatches: How many.
        lanes: Of each microbatch.
    """
    if lanes == 1:
        return loads(sizes, microbatch, num_microbatches)
    first = microbatch * lanes
    lane = deal_whole(weights, np.stack([first, first + lanes], axis=1), np.zeros_like(first))
    return loads(sizes, lane, num_microbatches * lanes).reshape(-1, lanes).max(axis=1)


def by_speed(speeds: Floats) -> tuple[Floats, Ints, Ints]:
    """Return the different speeds, the bins of each, one speed after the other, and where these start, and the end."""
    if speeds.min() == speeds.max():
        return speeds[:1], np.arange(len(speeds)), np.array([0, len(speeds)])
    different, group = np.unique(speeds, return_inverse=True)
    members = np.argsort(group, kind="stable")
    return different, members, np.searchsorted(group[members], np.arange(len(different) + 1))


def _checked(weights: npt.ArrayLike, speeds: npt.ArrayLike) -> tuple[Floats, Floats]:
    items = np.asarray(weights, dtype=np.float64) + 0.0  # -0.0 becomes 0.0
    bins = np.ascontiguousarray(speeds, dtype=np.float64)
    if not (bins.size and bins.min() > 0 and items.min(initial=0.0) >= 0 and items.max(initial=0.0) < np.inf):
        raise ArgumentError(
            "weights",
            "be >= 0 and speeds of one bin or more > 0",
            f"weights from {items.min(initial=0.0)} to {items.max(initial=0.0)} and {bins.size} speeds "
            f"from {bins.min(initial=np.inf)}",
            "leave out bins that do no work",
        )
    return items, bins


def loads(weights: npt.ArrayLike, bins: Ints, num_bins: int) -> Floats:
    """Return the sum of the weights in each bin. [num_bins]"""
    return np.bincount(bins, weights=np.asarray(weights, dtype=np.float64), minlength=num_bins).astype(np.float64)


def largest(weights: npt.ArrayLike, bins: Ints, num_bins: int) -> Floats:
    """Return the largest of the weights in each bin, which are >= 0; 0 where there is none. [num_bins]"""
    from resilient.planners.packing.kernels import largest_of

    return largest_of(np.ascontiguousarray(weights, dtype=np.float64), np.ascontiguousarray(bins), num_bins)


def cut_chain(costs: npt.ArrayLike, num_stages: int) -> tuple[int, ...]:
    """Cut a chain into contiguous stages such that the most expensive one costs least.

    Args:
        costs: Of each layer, ``[num_layers]``, >= 0.
        num_stages: At most one per layer.

    Returns:
        The number of layers of each stage, at least one; of equally good cuts the one with most layers in front.

    Raises:
        ValueError: More stages than layers, or none.
    """
    return Cuts(costs, num_stages).layers(num_stages)


def slowest_stages(costs: npt.ArrayLike, max_stages: int) -> Floats:
    """Return what the most expensive stage costs when :func:`cut_chain` cuts into 1, 2, ... stages. [max_stages]

    Args:
        costs: As there.
        max_stages: At most one per layer.

    Raises:
        ValueError: As there.
    """
    return Cuts(costs, max_stages).slowest


class Cuts:
    """The best cuts of one chain into 1, 2, ... stages, see :func:`cut_chain`.

    Args:
        costs: As there.
        max_stages: At most one per layer.

    Attributes:
        slowest: As :func:`slowest_stages` returns it.

    Raises:
        ValueError: As there.
    """

    def __init__(self, costs: npt.ArrayLike, max_stages: int) -> None:
        layers = np.asarray(costs, dtype=np.float64)
        if not 1 <= max_stages <= len(layers):
            raise ArgumentError("num_stages", f"be 1 to {len(layers)}, the number of layers", max_stages, "use fewer")
        sums = np.concatenate(([0.0], np.cumsum(layers)))
        self._spans = sums[None, :] - sums[:, None]  # [first, end]
        self._spans[np.tril_indices(len(sums))] = np.inf
        # least[k, i]: the most expensive stage when layers i.. are cut into k stages
        self._least = np.full((max_stages + 1, len(sums)), np.inf)
        self._least[0, -1] = 0.0
        for k in range(1, max_stages + 1):
            self._least[k] = np.maximum(self._spans, self._least[k - 1][None, :]).min(axis=1)
        self.slowest = self._least[1:, 0].copy()

    def layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        bound, first, counts = self.slowest[num_stages - 1], 0, list[int]()
        for k in range(num_stages, 0, -1):
            fits = np.flatnonzero((self._spans[first] <= bound) & (self._least[k - 1] <= bound))
            counts.append(int(fits[-1]) - first)
            first = int(fits[-1])
        return tuple(counts)
