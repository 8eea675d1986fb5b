"""Reads and checks numbers that options are given, in the words of all other errors."""

from __future__ import annotations

from collections.abc import Callable

import typer

from resilient.cli.shared.errors import usage_error
from resilient.errors import ArgumentError


def within(
    least: int, most: int | None = None, why: str = ""
) -> Callable[[typer.Context, typer.CallbackParam, int | None], int | None]:
    """Return the callback of an option whose number must be in a range; it ends the command with 2 where it is not.

    Args:
        least: That it can be.
        most: That it can be; no limit by default.
        why: Why it can be no more, where that is asked.
    """

    def checked(ctx: typer.Context, param: typer.CallbackParam, value: int | None) -> int | None:
        if value is None or (least <= value and (most is None or value <= most)):
            return value
        constraint = f"be >= {least}" if most is None else f"be {least} to {most}"
        fix = "give more" if value < least else f"give less: {why}" if why else "give less"
        raise usage_error(str(ArgumentError(param.opts[0], constraint, value, fix)))

    return checked


def nodes_of(text: str) -> tuple[int, int | None]:
    """Return the nodes to begin with, and those that train at most, of ``N`` or ``MIN:MAX``.

    Raises:
        ArgumentError: It is neither.
    """
    least, colon, most = text.partition(":")
    numbers = [int(each) for each in (least, most or least) if each.isascii() and each.isdigit()]
    if len(numbers) < 2 or (colon and not most) or not 1 <= numbers[0] <= numbers[1]:
        raise ArgumentError("num_nodes", "be N or MIN:MAX, with 1 <= MIN <= MAX", repr(text), "give 4, or 4:16")
    return numbers[0], numbers[1] if colon else None


def least_to_most(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Check ``--nodes``; the command ends with 2 where it cannot be read."""
    try:
        nodes_of(value)
    except ArgumentError as error:
        raise usage_error(error.told(lambda name: param.opts[0])) from None
    return value
