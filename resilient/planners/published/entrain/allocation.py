"""Devices for units in proportion to their work, and how many samples it takes to know the proportion.

Source: Entrain, section 4.4.2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Floats

ERROR = 0.05
"""Most fresh batches, as a share, that may lead to another allocation ..."""

DOUBT = 0.05
"""... and how probable it may be that more do."""


def proportional(work: Sequence[float], group_sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Divide devices in proportion to work, in whole groups, at least one for each unit.

    Each unit gets the groups its share is good for; those left go one by one to the largest remainder that they fit,
    counted in groups, the first of equals. If "at least one" gives out too many, the units with the smallest
    remainders give some back, the last of equals first.

    Args:
        work: Of each unit, >= 0.
        group_sizes: Devices of a group (tp * cp) of each unit.
        num_devices: All; fewer than the smallest group are left.

    Returns:
        The devices of each unit, multiples of its group's.

    Raises:
        ValueError: There are too few devices for a group each.
    """
    if sum(group_sizes) > num_devices:
        raise ArgumentError(
            "num_devices",
            f"be >= {sum(group_sizes)}, a group of {list(group_sizes)} each",
            num_devices,
            "use more devices or smaller groups",
        )
    total = sum(work)
    shares = [
        num_devices * (each / total if total else 1 / len(work)) / size
        for each, size in zip(work, group_sizes, strict=True)
    ]
    groups = [max(1, math.floor(share)) for share in shares]
    left = num_devices - sum(map(math.prod, zip(groups, group_sizes, strict=True)))
    units = range(len(groups))
    while left < 0:
        unit = min((unit for unit in units if groups[unit] > 1), key=lambda unit: (shares[unit] - groups[unit], -unit))
        groups[unit] -= 1
        left += group_sizes[unit]
    while fitting := [unit for unit in units if group_sizes[unit] <= left]:
        unit = max(fitting, key=lambda unit: (shares[unit] - groups[unit], -unit))
        groups[unit] += 1
        left -= group_sizes[unit]
    return tuple(count * size for count, size in zip(groups, group_sizes, strict=True))


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
    """Find the smallest batch that settles the allocation: 16, 32, ... samples.

    Batches are drawn from the samples with replacement. Where the mean lies on a rounding edge, none settles it.

    Args:
        work: Of each unit for each sample, in device time. [num_units, num_samples]
        group_sizes: As for :func:`proportional`.
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
