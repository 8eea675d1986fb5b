"""Arrays that planning passes around, by what they hold, and what numpy does not make of them."""

from __future__ import annotations

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
