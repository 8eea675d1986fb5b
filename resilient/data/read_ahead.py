"""Reads what a worker will train on next while it computes: which microbatches, in how many processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from resilient.data.processes import MOST_ASKED, DataProcesses, Load
from resilient.data.reader import Microbatch, Reads

logger = logging.getLogger(__name__)

DEFAULT_PROCESSES = 2
_SLOW_MS = 1.0
"""A sample that takes longer is read ahead of time, unless the job says otherwise: handing it over takes a tenth."""


@contextmanager
def data_processes(load: Load, wanted: int | None) -> Iterator[DataProcesses | None]:
    """Start the processes that read samples; call this before the worker is connected to anything: they inherit it.

    Args:
        load: Reads a microbatch.
        wanted: How many; 0 for none, None to have the time decide that a first microbatch takes in one, if a fork is
            sure to have all that a data set needs.
    """
    # a data set may live on the device, or have threads of its own read: neither is there after a fork
    if wanted == 0 or (wanted is None and (torch.cuda.is_initialized() or threading.active_count() > 1)):
        yield None
        return
    processes = DataProcesses(load, wanted or 1)
    try:
        yield processes if wanted or _are_worth_it(processes) else None
    finally:
        processes.close()


def _are_worth_it(processes: DataProcesses) -> bool:
    sample_ms = processes.take(processes.ask(1, 0, None)).reading.sample_ms
    if sample_ms < _SLOW_MS:
        processes.close()
        logger.info("samples are read when they are needed (%.2f ms each); num_workers says otherwise", sample_ms)
        return False
    processes.add(DEFAULT_PROCESSES - 1)
    text = "samples are read ahead of time in %d processes (%.1f ms each); num_workers says otherwise"
    logger.info(text, DEFAULT_PROCESSES, sample_ms)
    return True


class ReadAhead:
    """Keeps data processes busy with the microbatches that come next.

    At least a whole step is asked for ahead of time, unless that is more than the processes can be asked at once.

    Args:
        processes: What reads.
        num_steps: Steps of the job.
    """

    def __init__(self, processes: DataProcesses, num_steps: int) -> None:
        self._processes = processes
        self._num_steps = num_steps
        self._positions: tuple[int, ...] = ()
        self._reads: Reads = None
        self._tickets: dict[tuple[int, int], int] = {}

    def enter(self, positions: tuple[int, ...], reads: Reads) -> None:
        """Begin to read other microbatches of each step, or other entries; what was asked for before is dropped."""
        if (positions, reads) != (self._positions, self._reads):
            self._forget()
        self._positions, self._reads = positions, reads

    def take(self, step: int, position: int) -> Microbatch:
        """Return a microbatch, and have the next ones read."""
        if self._tickets and (step, position) not in self._tickets:
            self._forget()  # a step is read once more; with what was asked for it would be more than fits
        num_processes = len(self._processes)
        most = min(max(len(self._positions), 2 * num_processes), MOST_ASKED * num_processes)
        for key in islice(self._keys_from(step, position), most + 1):
            if key not in self._tickets:
                self._tickets[key] = self._processes.ask(*key, self._reads)
        return self._processes.take(self._tickets.pop((step, position)))

    def _forget(self) -> None:
        self._processes.forget()
        self._tickets.clear()

    def _keys_from(self, step: int, position: int) -> Iterator[tuple[int, int]]:
        yield from ((step, each) for each in self._positions[self._positions.index(position) :])
        for later in range(step + 1, self._num_steps + 1):
            yield from ((later, each) for each in self._positions)
