"""Refuses options by their old names, with the new ones."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from resilient.cli.shared.errors import usage_error


def renamed(old: str, new: str) -> Any:
    """Return a hidden option of a :class:`CommandWithOldOptions`, which ends with 2 and one line where it is given.

    Args:
        old: The option as it was called: ``--trace``.
        new: What it is called now.
    """

    def refuse(value: str | None) -> None:
        if value is not None:
            raise usage_error(f"{old} is called {new} now, got {old} {value}; write {new} {value}")

    return typer.Option(old, hidden=True, is_eager=True, callback=refuse, help=new)


class CommandWithOldOptions(TyperCommand):
    """A command that refuses its old options also where no value comes after them, which no callback is told."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command's arguments; see click."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's, of which releases of typer have a copy of their own
            old = getattr(error, "option_name", None)
            for each in self.params:
                if getattr(each, "hidden", False) and old in each.opts:
                    new = getattr(each, "help", None)
                    raise usage_error(f"{old} is called {new} now, got {old} without a value; write {new}") from None
            raise
