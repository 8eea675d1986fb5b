"""Reads ``events.jsonl``, the one source of everything that is shown and measured of a run. Must not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Read ``events.jsonl``; a last line that a crash cut short is left out.

    Raises:
        ValueError: If any other line is no JSON object.
    """
    lines = Path(path).read_bytes().splitlines()
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError(line)
        except (ValueError, RecursionError):  # it may be nested too deep to read
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} must be a JSON object, got {line[:80]!r}") from None
        events.append(event)
    return events


def loss_of(step: Event) -> float:
    """Return the loss of a step; NaN where it was no finite number, for which JSON has null."""
    return float("nan") if step["loss"] is None else step["loss"]


def losses_in_words(told: Event) -> str:
    """Return those of the units, as in `` (llm 0.5, image 0.25)``, of a step or status; nothing where one has all."""
    losses = told.get("losses", {})
    of_units = (f"{unit} {'nan' if loss is None else f'{loss:.4f}'}" for unit, loss in losses.items())
    return f" ({', '.join(of_units)})" if losses else ""


def was_skipped(step: Event) -> bool:
    """Return whether a step updated nothing because its loss or gradient was not finite."""
    return step.get("skipped", False)


def steps_of(events: Sequence[Event]) -> dict[int, Event]:
    """Return the committed steps by number; of a step reported twice (redone) the last report counts."""
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    return dict(sorted(steps.items()))
