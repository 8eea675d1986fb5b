"""Words errors for the command line, and ends commands with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer
from rich.console import Console

from resilient.common.printable import printable
from resilient.errors import ArgumentError

console = Console(stderr=True, highlight=False, emoji=False)


def option_names(ctx: typer.Context, others: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return what tells a command's option from the name of the argument that has its value.

    Args:
        ctx: Of the command.
        others: Options by arguments that are not called as those of the command are.
    """
    own = {each.name: each.opts[0] for each in ctx.command.params if each.name and each.opts[0].startswith("--")}
    options = dict(others or {}) | own
    return lambda name: options.get(name, name)


def told(error: Exception, ctx: typer.Context, others: Mapping[str, str] | None = None) -> str:
    """Return an error's message, with a command's options where it names arguments that have their values.

    Args:
        error: What was raised.
        ctx: Of the command.
        others: Options by arguments that are not called as those of the command are.
    """
    return error.told(option_names(ctx, others)) if isinstance(error, ArgumentError) else str(error)


def usage_error(message: str) -> typer.Exit:
    """Print what is wrong with the command's own arguments; raise what it returns, exit code 2."""
    console.print(f"error: {printable(message)}", markup=False, style="red", soft_wrap=True)
    return typer.Exit(2)
