"""Counts steps whose update was left out because their loss or gradient was not finite. Must not import torch."""

from __future__ import annotations

import msgspec

MOST_IN_A_ROW = 100
"""So many different batches with the same parameters: what is not finite are the parameters, or all the data."""


class SkippedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How many steps were skipped, up to some step; a checkpoint remembers it, for the optimizer counts its updates.

    Args:
        total: Since the beginning of the job.
        in_a_row: The last ones.
    """

    total: int = 0
    in_a_row: int = 0

    def after(self, *, is_finite: bool) -> SkippedSteps:
        """Return the numbers after one more step."""
        if is_finite:
            return SkippedSteps(total=self.total)
        return SkippedSteps(total=self.total + 1, in_a_row=self.in_a_row + 1)


NONE_SKIPPED = SkippedSteps()
"""At the beginning."""
