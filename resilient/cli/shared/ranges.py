"""Checks numbers that options are given, in the words of all other errors."""

from __future__ import annotations

from collections.abc import Callable

import typer

from resilient.cli.shared.errors import usage_error
from resilient.errors import ArgumentError


def within(
    least: int, most: int | None = None
) -> Callable[[typer.Context, typer.CallbackParam, int | None], int | None]:
    """Return the callback of an option whose number must be in a range; it ends the command with 2 where it is not.

    Args:
        least: That it can be.
        most: That it can be; no limit by default.
    """

    def checked(ctx: typer.Context, param: typer.CallbackParam, value: int | None) -> int | None:
        if value is None or (least <= value and (most is None or value <= most)):
            return value
        constraint = f"be >= {least}" if most is None else f"be {least} to {most}"
        fix = "give more" if value < least else "give less"
        raise usage_error(str(ArgumentError(param.opts[0], constraint, value, fix)))

    return checked
