"""``resilient events`` and ``resilient logs``: what a run has said so far, and says while it runs."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from resilient.cli.shared.coordinator import RunFolder
from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.run_folder import run_folder
from resilient.common.printable import printable
from resilient.observability.live_view import make_view

_LOOK_EVERY_S = 0.2

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")]


def events(
    run_dir: RunFolder = None,
    follow: Follow = False,
    as_json: Annotated[bool, typer.Option("--json", help="The lines of events.jsonl as they are.")] = False,
) -> None:
    """Show what has happened in a run: its steps, failures, recoveries."""
    path = run_folder(run_dir) / "events.jsonl"
    view = make_view(plain=True, console=Console(highlight=False, emoji=False))
    for line in _followed(_Lines(path), follow=follow):
        if as_json:
            typer.echo(line)
            continue
        try:
            view.on_event(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise usage_error(f"{path} must hold events, got {line[:80]!r} ({error}); name a run with --run") from None


def logs(
    run_dir: RunFolder = None,
    node: Annotated[list[int] | None, typer.Option(min=0, help="Only of this node; repeatable.")] = None,
    local_ranks_filter: Annotated[
        list[int] | None, typer.Option(min=0, help="Only of workers with this local rank; repeatable.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Begin with so many last lines of each.")] = None,
    follow: Follow = False,
) -> None:
    """Show what workers have printed, each line with its node and local rank, as torchrun's --tee has it."""
    folder = run_folder(run_dir)
    shown = _Workers(folder, node, local_ranks_filter, tail)
    if not shown.found() and not follow:
        raise usage_error(f"no worker of those asked for has a log in {folder}/logs; leave options out, or --follow")
    stopped = _Lines(folder / "events.jsonl")
    ends = False
    while True:
        for name, line in shown.new_lines():
            typer.echo(f"[{name}]: {printable(line)}")
        if ends or not follow:
            return
        ends = any(_is_last(line) for line in stopped.new())
        time.sleep(_LOOK_EVERY_S)


class _Lines:
    """The lines of a file that grows; one that is not whole yet is left for later.

    Args:
        path: It need not be there yet.
        tail: Lines to begin with, from its end; None for all.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path = path
        self._tail = tail
        self._at = 0

    def new(self) -> Iterator[str]:
        """Yield what was written since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        if whole:
            self._at += len(whole) + 1
            lines: Iterable[bytes] = whole.split(b"\n")
            lines, self._tail = (lines if self._tail is None else deque(lines, self._tail)), None
            yield from (line.decode(errors="replace") for line in lines)


class _Workers:
    """The logs of some of a run's workers, also of those that come later."""

    def __init__(self, folder: Path, nodes: list[int] | None, local_ranks: list[int] | None, tail: int | None) -> None:
        self._folder = folder
        self._nodes, self._local_ranks, self._tail = nodes, local_ranks, tail
        self._lines: dict[str, _Lines] = {}

    def found(self) -> list[tuple[int, int]]:
        """Return node and local rank of each, in order."""
        pairs = []
        for path in (self._folder / "logs").glob("node-*/worker-*.log"):
            node, local_rank = path.parent.name.partition("-")[2], path.stem.partition("-")[2]
            if node.isdigit() and local_rank.isdigit():
                pairs.append((int(node), int(local_rank)))
        return sorted(
            (node, local_rank)
            for node, local_rank in pairs
            if (not self._nodes or node in self._nodes) and (not self._local_ranks or local_rank in self._local_ranks)
        )

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """Yield who wrote, and what."""
        for node, local_rank in self.found():
            name = f"node {node} worker {local_rank}"
            path = self._folder / "logs" / f"node-{node}" / f"worker-{local_rank}.log"
            for line in self._lines.setdefault(name, _Lines(path, self._tail)).new():
                yield name, line


def _followed(lines: _Lines, *, follow: bool) -> Iterator[str]:
    while True:
        for line in lines.new():
            yield line
            if follow and _is_last(line):
                return
        if not follow:
            return
        time.sleep(_LOOK_EVERY_S)


def _is_last(line: str) -> bool:
    """Return whether an event says that the job is over."""
    try:
        return json.loads(line).get("kind") == "stopped"
    except (ValueError, AttributeError):
        return False
