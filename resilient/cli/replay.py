"""``resilient replay``: the decisions of a run, taken once more from what its coordinator was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from resilient.cli.shared.errors import usage_error
from resilient.common.printable import printable

if TYPE_CHECKING:
    from resilient.agent.journal.replay import Decision

REPLAY_HELP = (
    "Print the decisions of a run, taken once more from what its coordinator was told (stimuli.jsonl), and check that "
    "they are those of its events.jsonl. Exit code 1: they are not, or the machine found a fault of its own."
)

_MOST_CHARACTERS = 160


def replay_command(
    run: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN")],
) -> None:
    from resilient.agent.journal.replay import difference, replay_run

    try:
        replayed = replay_run(run)
        unlike = difference(run, replayed)
    except OSError as error:
        raise usage_error(
            f"RUN must be the folder of a run with its stimuli.jsonl and events.jsonl, got {run} ({error}); choose one "
            f"from ./runs"
        ) from None
    except ValueError as error:
        raise usage_error(str(error)) from None
    console = Console(highlight=False, emoji=False)
    for decision in replayed.decisions:
        console.print(_in_a_line(decision), markup=False, soft_wrap=True)
    console.print(f"{len(replayed.decisions)} decisions of {replayed.num_stimuli} stimuli", markup=False)
    for trouble in (replayed.broken, unlike):
        if trouble:
            Console(stderr=True, highlight=False, emoji=False).print(
                f"error: {printable(trouble)}", markup=False, style="red", soft_wrap=True
            )
    if replayed.broken or unlike:
        raise typer.Exit(1)
    console.print("equal to events.jsonl", markup=False)


def _in_a_line(decision: Decision) -> str:
    """Return a decision in one line; values too long to read are cut."""
    event = decision.event
    fields = " ".join(f"{key}={_value(event[key])}" for key in event if key not in ("kind", "generation"))
    line = f"{decision.at_s:10.3f} s  generation {event['generation']}  {event['kind']}  {fields}".rstrip()
    return printable(line)


def _value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
