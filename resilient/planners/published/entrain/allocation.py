"""How many samples it takes to know in what proportion to divide devices.

Source: Entrain, section 4.4.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.packing.proportion import proportional
from resilient.templates.common.arrays import Floats

ERROR = 0.05
"""Most fresh batches, as a share, that may lead to another allocation ..."""

DOUBT = 0.05
"""... and how probable it may be that more do."""


def num_checks(error: float, doubt: float) -> int:
    """Return how many fresh batches must agree, so that more than ``error`` of all disagree with probability ``doubt``.

    Both are in (0, 1).
    """
    return math.ceil(math.log(doubt) / math.log(1 - error))


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Allocations that batches of some size ask for.

    Args:
        num_samples: Of a batch.
        devices: What the first batch leads to.
        others: What fresh batches lead to that is something else, with how often, most often first.
        num_checks: Fresh batches.
    """

    num_samples: int
    devices: tuple[int, ...]
    others: tuple[tuple[tuple[int, ...], int], ...]
    num_checks: int

    @property
    def settled(self) -> bool:
        """Return whether all agree: then this many samples are enough."""
        return not self.others

    def __str__(self) -> str:
        if self.settled:
            return f"batches of {self.num_samples} samples agree on {self.devices} devices"
        others = ", ".join(f"{devices} by {count}" for devices, count in self.others[:3])
        return (
            f"batches of {self.num_samples} samples do not agree on {self.devices} devices: of {self.num_checks}, some "
            f"come to {others}"
        )


def settle(work: Floats, group_sizes: Sequence[int], num_devices: int, most: int, *, seed: int = 0) -> Settled:
    """Find the smallest batch that settles how devices are divided: 16, 32, ... samples.

    Batches are drawn from the samples with replacement. Where the mean lies on a rounding edge, none settles it.

    Args:
        work: Of each unit for each sample, in device time. [num_units, num_samples]
        group_sizes: As for :func:`~resilient.planners.packing.proportion.proportional`.
        num_devices: As there.
        most: Samples of a batch at most.
        seed: Of the draw.

    Raises:
        ValueError: As there, or there are no samples.
    """
    if not work.shape[1]:
        raise ArgumentError("samples", "be one or more", "none", "draw some from the data set")
    draw = np.random.default_rng(seed)
    checks = num_checks(ERROR, DOUBT)
    num_samples = min(16, most)
    while True:
        chosen = draw.integers(work.shape[1], size=(checks + 1, num_samples))
        means = work[:, chosen].mean(axis=2).T
        first, *fresh = (proportional(mean.tolist(), group_sizes, num_devices) for mean in means)
        others = Counter(each for each in fresh if each != first)
        found = Settled(num_samples=num_samples, devices=first, others=tuple(others.most_common()), num_checks=checks)
        if found.settled or num_samples >= most:
            return found
        num_samples = min(2 * num_samples, most)
