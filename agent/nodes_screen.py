"""What is shown of the workers of the nodes that a launcher has started, by whoever shows the job's events."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient.observability.worker_logs import Screen, WorkerLogs
from resilient.protocol.shown_streams import STDOUT, ShownStreams

_NOTHING = (False, False)


class NodesScreen:
    """Tells what workers print, as events of the kind ``printed``, which are in no log of events.

    Args:
        run_directory: Folder of the run.
        shown: What is told.
        tell: Called with each event.
    """

    def __init__(self, run_directory: Path, shown: ShownStreams, tell: Callable[[dict[str, Any]], None]) -> None:
        self._shown = shown
        self._tell = tell
        self._started: set[int] = set()
        self._processes: dict[int, tuple[str, int]] = {}
        self._screen = Screen(WorkerLogs(run_directory, self._logs, None), self._show) if shown.has_any else None

    def take_in(self, pid: int) -> None:
        """Take in that the launcher has started this agent."""
        self._started.add(pid)

    def shows(self, event: dict[str, Any]) -> bool:
        """Take in an event; return whether the line that it tells is shown, as its worker has printed it."""
        if event["kind"] == "node_connected":
            self._processes[event["node"]] = event["host"], event["pid"]
        elif event["kind"] == "output" and (worker := event.get("worker")):
            node, _, local_rank = worker.partition("/")
            return self._is_own(int(node)) and bool(self._shown.of(int(local_rank)) & STDOUT)
        return False

    async def close(self) -> None:
        """Tell the last words of workers that have ended."""
        if self._screen is not None:
            await self._screen.close()

    def _is_own(self, node: int) -> bool:
        host, pid = self._processes.get(node, ("", 0))
        return host == socket.gethostname() and pid in self._started

    def _logs(self, node: int, local_rank: int) -> tuple[bool, bool]:
        return self._shown.logs(local_rank) if self._is_own(node) else _NOTHING

    def _show(self, node: int, local_rank: int, line: str) -> None:
        told = {"time": time.time(), "kind": "printed", "node": node, "local_rank": local_rank, "text": line}
        self._tell(told)
