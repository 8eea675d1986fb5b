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
