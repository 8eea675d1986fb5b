"""A simulated job that leaves the two logs of a run: what the machine was told, and what it decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resilient.agent.journal.stimulus_log import StimulusLog
from resilient.agent.membership.parts.events import Instruction, Stimulus
from resilient.protocol.messages import Note
from tests.agent.membership.simulated import Job


class LoggedJob(Job):
    """A simulated job that leaves the two logs of a run."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(**changes)
        self.folder = folder
        self.log = StimulusLog(folder / "stimuli.jsonl", self.machine.settings)

    def feed(self, event: Stimulus) -> list[Instruction]:
        self.log.write(event, self.now)
        return super().feed(event)

    def leave(self) -> list[dict[str, Any]]:
        """Write both logs; return the lines of the event log."""
        self.log.flush()
        written = [
            {"time": 1e9 + number, "kind": record.kind, "generation": record.generation, **record.fields}
            for number, record in enumerate(self.records)
        ]
        write_events(self.folder, written)
        return written


def write_events(folder: Path, written: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in written))


def eventful(folder: Path) -> LoggedJob:
    """Return a job that lost a node, took one in, and was done."""
    job = LoggedJob(folder)
    job.start()
    job.step(1)
    job.now = 5.0
    job.lose(2)
    job.answer()
    job.step(2)
    job.ready(job.connect())
    job.answer()
    job.say((0, 0), Note(name="accuracy", value=0.5))
    job.step(10)
    job.finish()
    job.answer()
    assert job.stop is not None
    return job
