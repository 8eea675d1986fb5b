"""Durations: whole nanoseconds, as planning compares them."""

from __future__ import annotations


def nanoseconds(time_ms: float) -> int:
    """Round to whole nanoseconds: planners compare times as integers, so that ties are ties on every machine."""
    return round(time_ms * 1e6)
