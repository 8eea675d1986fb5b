"""How commands say what went wrong."""

from __future__ import annotations

import typer
from rich.console import Console

console = Console(stderr=True, highlight=False)


def usage_error(message: str) -> typer.Exit:
    """Print what is wrong with the command's own arguments; raise what it returns, exit code 2."""
    console.print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    return typer.Exit(2)
