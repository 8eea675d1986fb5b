"""When a split of a step's microbatches is over. Import it where it is needed: it loads numba."""

from __future__ import annotations

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled


@compiled
def least_split_ns(
    fill: Ints, slowest: Ints, round_size: Ints, num_each: Ints, num_microbatches: int, high: int
) -> int:
    """Return the least time in which pipelines get through all microbatches, at least one each, or ``high``.

    Args:
        fill: Of the lines (:mod:`.batch_split`) of each kind of pipeline. [kinds, lines]
        slowest: Likewise.
        round_size: Likewise.
        num_each: How many pipelines of each kind there are. [kinds]
        num_microbatches: Of all of them together.
        high: A time that is enough. What they do changes only when a layout is done with one round more.
    """
    low = 0
    while low < high:
        middle, done = (low + high) // 2, 0
        for kind in range(len(fill)):
            most = ((middle - fill[kind]) // slowest[kind] * round_size[kind]).max()
            done += num_each[kind] * max(most, 1)
        if done >= num_microbatches:
            high = max(low, (fill + (middle - fill) // slowest * slowest).max())
        else:
            low = (fill + ((middle - fill) // slowest + 1) * slowest).min()
    return low
