"""What the commands that run a script have in common: options come before the script, the script's own after it."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console

CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Of such a command: what follows the script is the script's."""

ARGUMENTS_HELP = "The script's own arguments: all that follows it."


def hint(context: typer.Context, arguments: Sequence[str]) -> None:
    """Say so if the script's arguments look like options of the command."""
    shown = [parameter for parameter in context.command.params if not getattr(parameter, "hidden", False)]
    own = {name for parameter in shown for name in parameter.opts if name.startswith("--")}
    found = list(dict.fromkeys(name for argument in arguments if (name := argument.partition("=")[0]) in own))
    if found:
        text = (
            f"note: {', '.join(found)} after the script is the script's; put options of `{context.command_path}` first"
        )
        Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, style="yellow", soft_wrap=True)
