"""Writes the event log of a run, and tells whoever follows it: what the machine decided, and what was seen besides.

Must not import torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilient.agent.journal.injection_log import InjectionLog
from resilient.agent.journal.replay import NOT_DECIDED
from resilient.agent.journal.stimulus_log import append_whole
from resilient.agent.membership.parts.context import Settings
from resilient.agent.membership.parts.events import Record
from resilient.observability.event_log import lines_of, read_events
from resilient.observability.metrics import JobMetrics
from resilient.protocol.messages import Injection

logger = logging.getLogger(__name__)


class EventWriter:
    """Writes one run's: what happens at once, such as what a thousand nodes say, in one go.

    Args:
        settings: Of the job: the folder of its run, the failures to cause that are known at the start.
        on_event: Called with each event.
        generation: Returns the one in force.
        on_pending: Called when there is something to :meth:`flush`.
    """

    def __init__(
        self,
        settings: Settings,
        on_event: Callable[[dict[str, Any]], None],
        generation: Callable[[], int],
        on_pending: Callable[[], object],
    ) -> None:
        self._path = Path(settings.run_directory) / "events.jsonl"
        self._on_event = on_event
        self._generation = generation
        self._on_pending = on_pending
        self._pending: list[bytes] = []
        self._injections = InjectionLog(self._path.with_name("injections.jsonl"), settings.injections)
        self._metrics = JobMetrics()

    def metrics_text(self) -> bytes:
        """Return the metrics of the run, as Prometheus reads them."""
        return self._metrics.text()

    def want(self, injection: Injection) -> None:
        """Take in one more failure to cause."""
        self._injections.want(injection)

    def inherit(self, records: Sequence[Record]) -> None:
        """Go on with the log that is there; write what the machine had decided before its coordinator died.

        Args:
            records: All of the machine's, from the beginning.
        """
        written = read_events(self._path) if self._path.exists() else []
        for event in written:
            self._tell(event)
        self._injections.skip(sum(event["kind"] == "injected" for event in written))
        for record in records[sum(event["kind"] not in NOT_DECIDED for event in written) :]:
            self.record(record)

    def record(self, record: Record) -> None:
        """Write what the machine decided; before a loss, the injections that may be why."""
        if record.kind in ("detected", "node_lost"):
            self._write_injections("injected", self._injections.read())
        self._write({"kind": record.kind, "generation": record.generation, **record.fields})

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Write what was seen besides, in the generation in force."""
        self._write({"kind": kind, "generation": self._generation(), **fields})

    def _write(self, told: dict[str, Any]) -> None:
        """Take in an event that happens now, unless it tells another time."""
        event = {"time": time.time(), **told}
        if not self._pending:
            self._on_pending()
        self._pending += [line + b"\n" for line in lines_of(event)]
        self._tell(event)

    def flush(self) -> None:
        """Write what was taken in; what it follows from is in the log of stimuli."""
        data, self._pending = b"".join(self._pending), []
        try:
            append_whole(self._path, data)
        except OSError as error:  # a full disk ends no job that it does not keep from training
            logger.error("cannot write %s: %s", self._path, error)

    def conclude(self) -> None:
        """Write which injections there were at the end, and which were not."""
        self._write_injections("injected", self._injections.read())
        self._write_injections("not_injected", self._injections.missed())
        self.flush()

    def _write_injections(self, kind: str, told: Sequence[dict[str, Any]]) -> None:
        for each in told:
            self.note(kind, each)

    def _tell(self, event: dict[str, Any]) -> None:
        self._metrics.apply(event)
        self._on_event(event)
