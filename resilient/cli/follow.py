"""``resilient events`` and ``resilient logs``: what a run has said so far, and says while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from resilient.cli.shared.coordinator import RunFolder
from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.run_folder import run_folder
from resilient.cli.shared.shown_options import LocalRanksFilter
from resilient.common.printable import printable_json
from resilient.observability.event_log import EventJoiner
from resilient.observability.live_view import make_view
from resilient.observability.worker_logs import LOOK_EVERY_S, GrowingFile, WorkerLogs, signed
from resilient.protocol.shown_streams import ShownStreams

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")]


def events(
    run_dir: RunFolder = None,
    follow: Follow = False,
    as_json: Annotated[bool, typer.Option("--json", help="The lines of events.jsonl as they are.")] = False,
) -> None:
    """Show what has happened in a run: its steps, failures, recoveries."""
    path = run_folder(run_dir) / "events.jsonl"
    view, joiner = make_view(plain=True, console=Console(highlight=False, emoji=False)), EventJoiner()
    for line in _followed(GrowingFile(path), follow=follow):
        if as_json:
            typer.echo(printable_json(line))
            continue
        try:
            if (event := joiner.take(json.loads(line))) is not None:
                view.on_event(event)
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise usage_error(f"{path} must hold events, got {line[:80]!r} ({error}); name a run with --run") from None
    view.print_ending()


def logs(
    run_dir: RunFolder = None,
    node: Annotated[list[int] | None, typer.Option(min=0, help="Only of this node; repeatable.")] = None,
    local_ranks_filter: LocalRanksFilter = "",
    tail: Annotated[int | None, typer.Option(min=0, help="Begin with so many last lines of each.")] = None,
    follow: Follow = False,
) -> None:
    """Show what workers have printed, each line with its node and local rank, as torchrun's --tee has it."""
    folder = run_folder(run_dir)
    ranks = ShownStreams(tee="3", local_ranks=local_ranks_filter)

    def is_wanted(number: int, local_rank: int) -> tuple[bool, bool]:
        is_one = (not node or number in node) and ranks.of(local_rank) > 0
        return is_one, is_one

    shown = WorkerLogs(folder, is_wanted, tail)
    if not shown.found() and not follow:
        raise usage_error(f"no worker of those asked for has a log in {folder}/logs; leave options out, or --follow")
    stopped = GrowingFile(folder / "events.jsonl")
    ends = False
    while True:
        for number, local_rank, line in shown.new_lines():
            typer.echo(signed(number, local_rank, line))
        if ends or not follow:
            return
        ends = any(_is_last(line) for line in stopped.new())
        time.sleep(LOOK_EVERY_S)


def _followed(lines: GrowingFile, *, follow: bool) -> Iterator[str]:
    while True:
        for line in lines.new():
            yield line
            if follow and _is_last(line):
                return
        if not follow:
            return
        time.sleep(LOOK_EVERY_S)


def _is_last(line: str) -> bool:
    """Return whether an event says that the job is over."""
    try:
        return json.loads(line).get("kind") == "stopped"
    except (ValueError, AttributeError):
        return False
