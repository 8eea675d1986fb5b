"""From one time to another: what spans, slices of traces and bars of charts have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of time, in nanoseconds; what it counts from is said where it is used.

    Args:
        start_ns: When it starts.
        end_ns: When it ends.
    """

    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """Time from the start to the end."""
        return self.end_ns - self.start_ns
