"""Checks arguments of users that are of the wrong kind, and says what they are in a few words."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from resilient.errors import ArgumentError


def described(value: object) -> str:
    """Return what a value is, as messages say what they got: itself where it is short, else its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return kind_of(value)


def kind_of(value: object) -> str:
    """Return a value's kind with an article: ``a list``, ``an ndarray``, ``the class Linear``; ``None`` for None."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' or name == 'ndarray' else 'a'} {name}"


def whole_number(field: str, value: Any, least: int, fix: str) -> int:
    """Return an argument as an ``int``.

    Args:
        field: The argument's name.
        value: What was given; numpy's integers are integers, True and 2.0 are not.
        least: The least it may be.
        fix: What to do if it is less.

    Raises:
        ArgumentError: It is none, or less.
    """
    number = _index(value)
    if number is None:
        meant = _meant(value)
        fix = f"write {int(meant)}" if meant is not None and meant.is_integer() and meant >= least else fix
        raise ArgumentError(field, f"be a whole number >= {least}", described(value), fix)
    if number < least:
        raise ArgumentError(field, f"be >= {least}", number, fix)
    return number


def check_number(field: str, value: Any, fix: str, *, or_zero: bool = False) -> None:
    """Check that an argument is a finite number above 0.

    Args:
        field: The argument's name.
        value: What was given.
        fix: What to do if it is out of range.
        or_zero: It may be 0 as well.

    Raises:
        ArgumentError: It is none, or out of range.
    """
    limit = ">= 0" if or_zero else "> 0"
    if isinstance(value, bool) or not isinstance(value, Real):
        fix = f"write {value}" if _meant(value) is not None else fix
        raise ArgumentError(field, f"be a number {limit}", described(value), fix)
    number = float(value)
    if not (0 < number < math.inf or (or_zero and number == 0)):
        raise ArgumentError(field, f"be {limit}", value, fix)


def _index(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a tensor has the method, whatever it holds
        return None


def _meant(value: object) -> float | None:
    """Return the number that text probably means; None if nobody knows."""
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None
