"""Follows what became of the failures that somebody wanted: dying processes write them down, nobody else can.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilient.observability.event_log import killed_worker
from resilient.protocol.fault_injection import record_of
from resilient.protocol.messages import Injection


class InjectionLog:
    """The failures of one run.

    Args:
        path: ``injections.jsonl`` of the run.
        wanted: Failures to cause, as far as they are known at the start.
    """

    def __init__(self, path: Path, wanted: Sequence[Injection]) -> None:
        self._path = path
        self._wanted = list(wanted)
        self._caused: list[dict[str, Any]] = []

    def want(self, injection: Injection) -> None:
        """Take in one more failure to cause."""
        self._wanted.append(injection)

    def skip(self, num_told: int) -> None:
        """Take in that the first of what processes have written was told of before."""
        with contextlib.suppress(FileNotFoundError):
            self._caused += [json.loads(line) for line in self._path.read_text().splitlines()[:num_told]]

    def read(self) -> list[dict[str, Any]]:
        """Return what processes have written before they died, since this was asked last."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        read = [json.loads(line) for line in lines[len(self._caused) :]]
        self._caused += read
        return read

    def missed(self) -> list[dict[str, Any]]:
        """Return the failures that were wanted and not caused as far as was read, as those that were are written."""
        wanted = [record_of(each, each.at_step, each.at_phase) for each in self._wanted]
        left = list(self._caused)
        took = {id(each) for each in sorted(wanted, key=lambda each: each["step"] is None) if _took(left, each)}
        return [each for each in wanted if id(each) not in took]


def _took(left: list[dict[str, Any]], wanted: dict[str, Any]) -> bool:
    """Return whether one of the failures is the one that was wanted, and take it: another of the kind is another."""
    found = next((number for number, caused in enumerate(left) if _meets(caused, wanted)), None)
    if found is not None:
        del left[found]
    return found is not None


def _meets(caused: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether a failure is the one that was wanted; one without a step may come in any."""
    told = {**caused, "worker": killed_worker(caused)}
    return all(told[name] == value for name, value in wanted.items() if (name, value) != ("step", None))
