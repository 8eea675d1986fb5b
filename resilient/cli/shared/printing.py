"""Makes what commands print: tables without lines, and progress bars that go when they are done."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn
from rich.table import Table

_COLUMNS = 80
"""That tables need."""


def table_console() -> Console:
    """Return where tables are printed: a terminal that is too narrow wraps their lines, but no number is cut off."""
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, _COLUMNS)
    return console


def plain_table(*headers: str, left: Collection[str] = (), title: str | None = None, no_wrap: bool = False) -> Table:
    """Return a table without lines, two columns apart; its rows are to be added.

    Args:
        headers: Of the columns, in order; numbers stand below them, to the right.
        left: Those of them whose column is of words, to the left.
        title: Above it; none by default.
        no_wrap: Rather cut cells off than break them into lines.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", vertical="bottom", no_wrap=no_wrap)
    return table


def progress_bar(before: ProgressColumn, *after: ProgressColumn, console: Console) -> Progress:
    """Return a bar for what takes a while: on a terminal alone, and gone when it is done.

    Args:
        before: Left of the bar.
        after: Right of the bar.
        console: Where it is drawn.
    """
    return Progress(before, BarColumn(), *after, console=console, transient=True, disable=not console.is_terminal)
