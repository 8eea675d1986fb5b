"""The cheapest one-to-one assignment."""

from __future__ import annotations

from typing import cast

import numpy as np

from resilient.templates.common.arrays import Floats, Ints


def assign(prices: Floats) -> Ints:
    """Return each row's column in the cheapest one-to-one assignment; there may be more columns than rows."""
    # Imported late: it takes 0.4 s, and most processes that import the planner never assign.
    from scipy.optimize import linear_sum_assignment  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    # The solver adds row after row. When the cheap ones come first it takes half the time.
    order = np.argsort(prices.min(axis=1), kind="stable")
    columns = np.empty(len(prices), dtype=np.int64)
    columns[order] = cast("Ints", linear_sum_assignment(prices[order])[1])
    return columns
