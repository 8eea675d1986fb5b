"""Steps that several planners share: spreading weights over unequal bins, cutting a chain into stages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.planners.samples import Ints

Floats = npt.NDArray[np.float64]


def longest_first(weights: npt.ArrayLike, speeds: npt.ArrayLike) -> Ints:
    """Spread weights over bins: from the heaviest on, each to the bin that is done with it first.

    With equal speeds this is the longest-processing-time rule: the fullest bin holds at most 4/3 of the least possible;
    with unequal ones at most twice.

    Args:
        weights: What each item costs, ``[num_items]``, >= 0.
        speeds: Work per time of each bin, ``[num_bins]``, > 0.

    Returns:
        The bin of each item, ``[num_items]``. Equal weights and bins go by position, equally fast ones by load first.

    Raises:
        ValueError: There is no bin, a weight is negative or not finite, or a speed is not positive.

    Source: Graham (1969); for unequal speeds Gonzalez, Ibarra and Sahni (1977).
    """
    from resilient.planners.kernels import descending, spread

    items = np.asarray(weights, dtype=np.float64) + 0.0  # -0.0 becomes 0.0
    bins = np.ascontiguousarray(speeds, dtype=np.float64)
    if not (bins.size and bins.min() > 0 and items.min(initial=0.0) >= 0 and items.max(initial=0.0) < np.inf):
        raise ValueError(
            f"weights must be >= 0 and speeds of one bin or more > 0, got weights from {items.min(initial=0.0)} to "
            f"{items.max(initial=0.0)} and {bins.size} speeds from {bins.min(initial=np.inf)}"
        )
    different, group = np.unique(bins, return_inverse=True)
    members = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[members], np.arange(len(different) + 1))
    return spread(items, descending(items), different, members, starts)


def loads(weights: npt.ArrayLike, bins: Ints, num_bins: int) -> Floats:
    """Return the sum of the weights in each bin. [num_bins]"""
    return np.bincount(bins, weights=np.asarray(weights, dtype=np.float64), minlength=num_bins).astype(np.float64)


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
    spans, least = _cuts(costs, num_stages)
    bound, first, counts = least[num_stages, 0], 0, list[int]()
    for k in range(num_stages, 0, -1):
        fits = np.flatnonzero((spans[first] <= bound) & (least[k - 1] <= bound))
        counts.append(int(fits[-1]) - first)
        first = int(fits[-1])
    return tuple(counts)


def slowest_stages(costs: npt.ArrayLike, max_stages: int) -> Floats:
    """Return what the most expensive stage costs when :func:`cut_chain` cuts into 1, 2, ... stages. [max_stages]

    Args:
        costs: As there.
        max_stages: At most one per layer.

    Raises:
        ValueError: As there.
    """
    return _cuts(costs, max_stages)[1][1:, 0].copy()


def _cuts(costs: npt.ArrayLike, num_stages: int) -> tuple[Floats, Floats]:
    """Return what layers ``[first, end)`` cost together, and, at ``[k, i]``, cutting layers i.. into k stages."""
    layers = np.asarray(costs, dtype=np.float64)
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"num_stages must be 1 to {len(layers)}, the number of layers, got {num_stages}; use fewer")
    sums = np.concatenate(([0.0], np.cumsum(layers)))
    spans = sums[None, :] - sums[:, None]
    spans[np.tril_indices(len(sums))] = np.inf
    least = np.full((num_stages + 1, len(sums)), np.inf)
    least[0, -1] = 0.0
    for k in range(1, num_stages + 1):
        least[k] = np.maximum(spans, least[k - 1][None, :]).min(axis=1)
    return spans, least
