"""Ends all communication of a generation as soon as this worker knows of a newer one.

Shared by the main thread, which communicates, and the control connection's reader thread, which hears of changes.
"""

from __future__ import annotations

import queue
import threading

from resilient.comm import Communicator
from resilient.errors import CommunicationError
from resilient.protocol.messages import Regroup


class GenerationGuard:
    """Aborts the communication of a generation as soon as a newer one is announced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._announced = 0
        self._interrupted: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._comm: Communicator | None = None
        self._pause_for = 0

    def announce(self, message: Regroup) -> None:
        """Tell of a newer generation; called in the reader thread, or at a boundary by a handler of signals."""
        if message.at_boundary:
            self._pause_for = message.generation  # without the lock, which the interrupted thread may hold
            return
        with self._lock:
            self._announced = max(self._announced, message.generation)
            self._interrupted.put("membership changed")
            if self._comm is not None:
                self._comm.abort()

    def open(self, generation: int) -> queue.SimpleQueue[object]:
        """Begin to connect; return the queue through which connecting is interrupted.

        Raises:
            CommunicationError: A newer generation is known already.
        """
        with self._lock:
            self._check(generation)
            self._interrupted = queue.SimpleQueue()
            return self._interrupted

    def attach(self, generation: int, comm: Communicator) -> None:
        """Put the generation's communicator under the guard.

        Raises:
            CommunicationError: A newer generation is known already; the communicator is aborted.
        """
        with self._lock:
            self._comm = comm
            if self._announced > generation:
                comm.abort()
            self._check(generation)

    def release(self) -> Communicator | None:
        """Take the communicator away from the guard."""
        with self._lock:
            comm, self._comm = self._comm, None
            return comm

    def pause_wanted(self, generation: int) -> bool:
        """Tell whether a newer generation waits for the next step boundary."""
        return self._pause_for > generation

    def _check(self, generation: int) -> None:
        if self._announced > generation:
            raise CommunicationError(f"the generation ended, {self._announced} is being formed", generation=generation)
