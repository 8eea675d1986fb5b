"""Refuses options by their old names, with the new ones."""

from __future__ import annotations

from typing import Any

import typer

from resilient.cli.shared.errors import usage_error


def renamed(old: str, new: str) -> Any:
    """Return a hidden option that ends the command with 2 and one line where it is given.

    Args:
        old: The option as it was called: ``--trace``.
        new: What it is called now.
    """

    def refuse(value: str | None) -> None:
        if value is not None:
            raise usage_error(f"{old} is called {new} now, got {old} {value}; write {new} {value}")

    return typer.Option(old, hidden=True, is_eager=True, callback=refuse)
