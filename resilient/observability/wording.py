"""Writes times and recoveries for people: in the live view, in tables and in pictures alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilient.observability.run_report import RECOVERY_PARTS
from resilient.templates.common.words import counted


def duration(value_ms: float) -> str:
    """Write a measured time with its unit: ``2.4 ms``, ``87 ms``, ``1.32 s``."""
    return f"{value_ms / 1e3:.2f} s" if value_ms >= 1000 else f"{short_ms(value_ms)} ms"


def short_ms(value_ms: float) -> str:
    """Write measured milliseconds without the unit, no more exact than they repeat: ``2.4``, ``87``."""
    return f"{value_ms:.0f}" if value_ms >= 10 else f"{value_ms:.1f}"


def exact_ms(value_ms: float) -> str:
    """Write simulated milliseconds without the unit, with four digits: ``28.5``, ``0.125``, ``39640``."""
    return f"{value_ms:.0f}" if value_ms >= 1000 else f"{value_ms:.4g}"


def recovery_parts(recovery: Mapping[str, Any]) -> str:
    """Write what the parts of a recovery took: ``detect 12 ms, agree 3.1 ms``; parts that are not known are left out.

    Args:
        recovery: One of a report's ``recoveries``.
    """
    known = ((part, recovery[f"{part}_ms"]) for part in RECOVERY_PARTS)
    return ", ".join(f"{part} {duration(value_ms)}" for part, value_ms in known if value_ms is not None)


def lost_work(recovery: Mapping[str, Any]) -> str:
    """Write how many steps a recovery had to redo.

    Args:
        recovery: One of a report's ``recoveries``.
    """
    return f"{counted(recovery['lost_steps'], 'step')} redone" if recovery["lost_steps"] else "no work lost"
