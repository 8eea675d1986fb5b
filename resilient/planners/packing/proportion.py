"""Devices for units in proportion to their work.

Source: Entrain, section 4.4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from resilient.errors import ArgumentError


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
