"""Balancing after sampling: which data-parallel instance gets which sample, for each way a unit processes a batch.

Source: OrchMLLM, post-balancing algorithms 2 to 4; 1 (no padding) is
:func:`~resilient.planners.packing.balance.longest_first`. Instances here may be of unequal speed: what one holds is
divided by its speed. Where this differs from the paper:

- *Padding* (2). The bisection needs bounds between which there is an answer: the least is that of the longest sample
  alone, the largest that of batches of equally many samples all as long as the longest one. The printed ones are too
  small: under them d batches seldom hold the samples. Which of unequal instances get the shortest samples is tried both
  ways, as either may be several times better.
- *Quadratic attention* (3). Loads go by how many tolerances their sum is, then by their sum of squares. The printed
  comparison is not transitive, as none is that calls sums equal when they are within a tolerance of each other: who
  comes first then depends on who is asked first. Among unequal instances it counts what each has with the sample.
- *Convolutions with padding* (4). A batch of b samples padded to m costs b * m + lambda * b * m^2: that of samples of
  length m + lambda * m^2. So algorithm 2 minimises it, which an order of batches by it only keeps small.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.planners.packing.balance import by_speed
from resilient.templates.common.arrays import Floats, Ints


def balance_padded(lengths: npt.ArrayLike, speeds: npt.ArrayLike, *, squared: float = 0.0) -> Ints:
    """Algorithms 2 and 4, padding: bisect what a batch may cost; batches are filled in ascending order.

    With equal speeds no assignment has a cheaper most expensive batch. With unequal ones none has that fills ascending
    batches of instances in the order of their speeds, from the slowest on or from the fastest on.

    Args:
        lengths: Of the samples, >= 0. [num_samples]
        speeds: Work per time of each instance, > 0. [num_instances]
        squared: Cost of a padded sample's squared length, of its length being 1 (the paper's lambda).

    Returns:
        The instance of each sample; the last ones may get none.

    Raises:
        ValueError: There is no instance, a length is negative or a speed is not positive.
    """
    from resilient.planners.packing.kernels import descending
    from resilient.planners.published.orchmllm.post_balance_kernels import fill_ascending

    items, rates = _checked(lengths, speeds)
    order = descending(items)[::-1]
    costs = items[order]
    costs = np.ascontiguousarray(costs + squared * costs**2)
    low, high = cost_bounds(costs, rates)
    instances = np.argsort(rates, kind="stable")
    filled, time = fill_ascending(costs, rates[instances], low, high)
    if rates[instances[0]] != rates[instances[-1]]:
        other, other_time = fill_ascending(costs, np.ascontiguousarray(rates[instances[::-1]]), low, high)
        if other_time < time:
            filled, instances = other, instances[::-1]
    chosen = np.empty(len(items), dtype=np.int64)
    chosen[order] = instances[filled]
    return chosen


def cost_bounds(costs: npt.ArrayLike, speeds: npt.ArrayLike) -> tuple[float, float]:
    """Return between which times the slowest instance's is: the second is enough whatever the lengths.

    Args:
        costs: Of each sample, were no other longer. [num_samples]
        speeds: Work per time of each instance. [num_instances]
    """
    items, rates = np.asarray(costs, dtype=np.float64), np.asarray(speeds, dtype=np.float64)
    longest = float(items.max(initial=0.0))
    return longest / float(rates.max()), longest * -(-len(items) // len(rates)) / float(rates.min())


def balance_quadratic(lengths: npt.ArrayLike, speeds: npt.ArrayLike, tolerance: float) -> Ints:
    """Algorithm 3, quadratic attention: longest first, each to the instance that comes first.

    Instances are ordered by how many tolerances the sum of their lengths by their speed is, then by the sum of squares
    by their speed, of which the first 28 bits or so count.

    Of instances with different speeds, one that comes first in its speed, that is the one that does with the sample;
    without it, it would be a slow one that gets the longest. With n instances of speeds that are V together, none takes
    longer for its lengths than

        (sum of lengths + (n - 1) * longest) / V + 2 * tolerance,

    as no other would have taken less, a tolerance for the rounding of each of both.

    Args:
        lengths: Of the samples, >= 0. [num_samples]
        speeds: Work per time of each instance, > 0. [num_instances]
        tolerance: Sums by speed within a multiple of it are taken to be equal; > 0.

    Returns:
        The instance of each sample; equal instances go by position.

    Raises:
        ValueError: There is no instance, a length is negative, a speed is not positive, or the tolerance is not or is
            so small that some millions of them are to be told apart.
    """
    from resilient.planners.packing.kernels import descending
    from resilient.planners.published.orchmllm.post_balance_kernels import STEP_BITS, fill_by_key

    items, rates = _checked(lengths, speeds)
    longest = float(items.max(initial=0.0)) / float(rates.min())
    least = (float(items.sum() / rates.sum()) + longest * len(rates)) / ((1 << STEP_BITS) - 3)
    if not tolerance > least:
        raise ArgumentError("tolerance", f"be > {least:.3g}", tolerance, "a mean length is a good one")
    return fill_by_key(items, descending(items), *by_speed(rates), float(tolerance))


def _checked(lengths: npt.ArrayLike, speeds: npt.ArrayLike) -> tuple[Floats, Floats]:
    items = np.ascontiguousarray(lengths, dtype=np.float64) + 0.0  # a negative zero has other bits
    rates = np.ascontiguousarray(speeds, dtype=np.float64)
    if not rates.size or rates.min() <= 0 or items.min(initial=0.0) < 0:
        raise ArgumentError(
            "lengths",
            "be >= 0 and speeds of one instance or more > 0",
            f"lengths down to {items.min(initial=0.0)} and {rates.size} speeds down to {rates.min(initial=np.inf)}",
            "leave out instances that do no work",
        )
    return items, rates
