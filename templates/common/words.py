"""Words: things looked up by the names people type, and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from resilient.errors import ArgumentError, literal

_T = TypeVar("_T")


def look_up(what: str, name: str, known: Mapping[str, _T]) -> _T:
    """Return ``known[name]``.

    Args:
        what: What the names are of, for the message: an argument (``model``), or in words.
        name: The name that was given.
        known: What there is, in the order to list it.

    Raises:
        ArgumentError: There is no such name; the message lists those there are, and the closest where one is close.
    """
    if name in known:
        return known[name]
    typed = name.lower()
    close = [each for each in known if typed and each.startswith(typed)] or get_close_matches(typed, known, n=1)
    fix = f"did you mean {' or '.join(map(repr, close))}?" if close else "choose one of these"
    raise ArgumentError(what, literal(f"be one of {', '.join(known)}"), repr(name), literal(fix))


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``1 step``, ``3 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(things: Sequence[object], most: int = 16) -> str:
    """Write things, numbers mostly: ``0, 1, 2``; of more than ``most`` the first, and how many others there are."""
    if len(things) <= most:
        return ", ".join(map(str, things))
    return f"{', '.join(map(str, things[:most]))} and {len(things) - most} more"
