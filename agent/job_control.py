"""A job as the process that runs its coordinator sees it: wishes from other threads, signals, events.

Shared by those who start a job (:mod:`resilient.agent.launch`) and those who take one over
(:mod:`resilient.agent.attach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from resilient.agent.coordinator import Coordinator
from resilient.agent.membership.parts import events as ev
from resilient.common.network.ports import PortsTakenError
from resilient.errors import ArgumentError
from resilient.protocol.messages import Injection

logger = logging.getLogger(__name__)


class JobControl(ABC):
    """Runs a coordinator until its job is over.

    Args:
        run_directory: Folder of the run.
    """

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._callbacks: list[Callable[[dict[str, Any]], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coordinator: Coordinator | None = None
        self._is_signalled = False

    def subscribe(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Have every event of the log given to ``callback``, in the launcher's thread; it must not block."""
        self._callbacks.append(callback)

    def remove_node(self, node: int) -> None:
        """Have a node leave at the next step boundary; any thread may call this while the job runs."""
        self._feed(ev.NodeLeaving(node=node, reason="asked to leave"))

    def inject(self, injection: Injection) -> None:
        """Cause a failure; any thread may call this while the job runs."""
        self._feed(ev.FailureWanted(injection=injection))

    def interrupt(self, reason: str) -> None:
        """End the job after the running step, with a checkpoint; the second time at once. Any thread may call this."""
        self._feed(ev.Interrupted(reason=reason))

    @contextmanager
    def signals(self, *, for_good: bool = False) -> Iterator[None]:
        """Have SIGINT, SIGTERM and SIGHUP interrupt the job while it runs, and do nothing once it has ended.

        :meth:`run` does so by itself; around it and what follows, none comes between.

        Args:
            for_good: This process ends with the job: after a signal, later ones do nothing to its very end.
        """
        if threading.current_thread() is not threading.main_thread():  # signals are not its own
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # with nohup the job is to outlive its terminal
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if for_good and self._is_signalled else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._coordinator is None:
            raise KeyboardInterrupt
        self._is_signalled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
            self.interrupt(signal.Signals(number).name)

    def stop(self, exit_code: int, reason: str) -> None:
        """End the job at once; any thread may call this."""
        self._feed(ev.StopWanted(exit_code=exit_code, reason=reason))

    def run(self) -> int:
        """Run the job; return 0 (done), 1 (failed), 3 (stopped, can be resumed), 4 (state lost) or 130 (interrupted).

        Raises:
            ResilientError: The checkpoint to resume from cannot be read, or another coordinator has taken the job over.
            ValueError: There is no such checkpoint or job, the address cannot be listened on, or the folder of the run
                cannot be written.
        """
        with self.signals():
            return asyncio.run(self._run())

    @abstractmethod
    async def _run(self) -> int:
        """Set ``_loop`` and ``_coordinator``; return the job's exit code."""

    async def _listen(self, coordinator: Coordinator, host: str, port: int) -> None:
        try:
            await coordinator.start(host, port)
        except PortsTakenError as error:
            fix = "give a wider one, or end who listens there"
            raise ArgumentError("port_range", "have a port that is free", error.strerror, fix) from error
        except OSError as error:
            got = f"{host}:{port} ({error.strerror})"
            fix = "give an address of this machine, and {port} 0 for any that is free"
            raise ArgumentError("host", "be an address to listen on, together with {port}", got, fix) from error

    def _on_event(self, event: dict[str, Any]) -> None:
        for callback in list(self._callbacks):
            try:
                callback(event)
            except (OSError, SystemExit) as error:  # of a terminal that is gone, or of rich when nobody reads any more
                why = error if isinstance(error, OSError) else "nobody reads them any more"
                logger.warning("events are no longer shown, only in %s/events.jsonl: %s", self._run_directory, why)
                self._callbacks.remove(callback)

    def _feed(self, event: ev.Stimulus) -> None:
        if self._coordinator is not None:
            self._call(self._coordinator.feed, event)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is None:
            raise RuntimeError("the job must run, got a call before it began; call this from an event's callback")
        self._loop.call_soon_threadsafe(function, *arguments)
