"""Reads ``events.jsonl``, the one source of everything that is shown and measured of a run. Must not import torch.

A line holds an event. One that tells of many nodes has its long lists in further lines, so that none grows with their
number: the first says how many follow (``num_more``), each of these continues a field (``kind`` is ``more``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

Event = Mapping[str, Any]

_MORE = "more"
_MAY_BE_LONG = (list, tuple, dict)
_LONGEST_BYTES = 4096
"""Of a list in one line, but for a single item."""


def lines_of(event: Event) -> list[bytes]:
    """Return the lines that an event is written as, without their ends."""
    encode = msgspec.json.encode
    long = {
        field: value
        for field, value in event.items()
        if isinstance(value, _MAY_BE_LONG) and len(encode(value)) > _LONGEST_BYTES
    }
    more = [
        encode({"kind": _MORE, "field": field, "items": items})
        for field, value in long.items()
        for items in _pieces(value)
    ]
    if not more:
        return [encode(event)]
    first = {field: type(value)() if field in long else value for field, value in event.items()}
    return [encode({**first, "num_more": len(more)}), *more]


def _pieces(value: Sequence[Any] | dict[str, Any]) -> Iterable[list[Any] | dict[str, Any]]:
    """Cut a list, or what a dict holds, into pieces that are not too long."""
    items = list(value.items()) if isinstance(value, dict) else value
    piece: list[Any] = []
    size = 0
    for item in items:
        added = len(msgspec.json.encode(item))
        if piece and size + added > _LONGEST_BYTES:
            yield dict(piece) if isinstance(value, dict) else piece
            piece, size = [], 0
        piece.append(item)
        size += added
    yield dict(piece) if isinstance(value, dict) else piece


class EventJoiner:
    """Puts the events together that were written in several lines; one of which lines are missing is left out."""

    def __init__(self) -> None:
        self._event: dict[str, Any] | None = None
        self._num_left = 0

    def take(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Take in a line; return the event that is whole with it, if one is."""
        if line.get("kind") != _MORE:
            self._num_left = line.pop("num_more", 0)
            self._event = line if self._num_left else None
            return None if self._num_left else line
        if self._event is None:
            return None
        field, items = self._event[line["field"]], line["items"]
        field.update(items) if isinstance(field, dict) else field.extend(items)
        self._num_left -= 1
        if self._num_left:
            return None
        event, self._event = self._event, None
        return event


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Read ``events.jsonl``; a last event that a crash cut short is left out.

    Raises:
        ValueError: If any other line is no JSON object.
    """
    lines, joiner = Path(path).read_bytes().splitlines(), EventJoiner()
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError(line)
        except (ValueError, RecursionError):  # it may be nested too deep to read
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} must be a JSON object, got {line[:80]!r}") from None
        if (whole := joiner.take(event)) is not None:
            events.append(whole)
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


def killed_worker(injected: Event) -> int | None:
    """Return the local rank of the worker that was to be killed; None where its node was.

    Records of versions that killed no other than the first do not name it.
    """
    return injected.get("worker", 0) if injected["worker_only"] else None


def steps_of(events: Sequence[Event]) -> dict[int, Event]:
    """Return the committed steps by number; of a step reported twice (redone) the last report counts."""
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    return dict(sorted(steps.items()))
