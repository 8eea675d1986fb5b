"""The cheapest one-to-one assignment."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt


def assign(prices: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return each row's column in the cheapest one-to-one assignment; there may be more columns than rows."""
    # Imported late: it takes 0.4 s, and most processes that import the planner never assign.
    from scipy.optimize import linear_sum_assignment  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return cast("npt.NDArray[np.int64]", linear_sum_assignment(prices)[1])
