"""Arrays that planning passes around, by what they hold, and what numpy does not make of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def ranges(firsts: Ints, lengths: Ints) -> Ints:
    """Return ``firsts[0], firsts[0] + 1, ...``, as many as ``lengths[0]``, then the same for ``firsts[1]``, ..."""
    return np.repeat(firsts - lengths.cumsum() + lengths, lengths) + np.arange(lengths.sum())


def distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """Return the different ones of some numbers from 0 on, ascending, and of each number the index of its own there.

    Many times faster than sorting where the numbers are not much larger than they are many.
    """
    there = np.bincount(numbers) > 0
    return np.flatnonzero(there), (there.cumsum() - 1)[numbers]


def alike_parts(values: Sequence[float], most: int) -> list[int]:
    """Return where parts of alike numbers begin, 0 first, and where the last one ends.

    The part whose numbers differ most is cut in two, again and again, where two neighbours differ most; of equal
    numbers the longest part, in the middle.

    Args:
        values: Positive, descending. They differ by their ratio.
        most: The most parts.
    """
    cuts = [0, len(values)] if values else [0]
    while len(cuts) <= min(most, len(values)):
        first, end = max(pairwise(cuts), key=lambda part: (values[part[0]] / values[part[1] - 1], part[1] - part[0]))
        ratios = [values[at - 1] / values[at] for at in range(first + 1, end)]
        insort(cuts, max(range(first + 1, end), key=lambda at: (ratios[at - first - 1], min(at - first, end - at))))
    return cuts
