"""Reads what a worker will train on next while it computes: which cells, in how many processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from resilient.data.processes import DataProcesses, Load
from resilient.data.reader import Cell, Microbatch, Reads

logger = logging.getLogger(__name__)

CellsOf = Callable[[int], Sequence[Cell] | None]
"""What a worker reads in a step, each cell once, in the order of need; None where that is not known yet."""

DEFAULT_PROCESSES = 2
_SLOW_MS = 1.0
"""A sample that takes longer is read ahead of time, unless the job says otherwise: handing it over takes a tenth."""


@contextmanager
def data_processes(load: Load, wanted: int | None, first: Cell) -> Iterator[DataProcesses | None]:
    """Start the processes that read samples; call this before the worker is connected to anything: they inherit it.

    Args:
        load: Reads a cell.
        wanted: How many; 0 for none, None to have the time decide that a first cell takes in one, if a fork is sure to
            have all that a data set needs.
        first: A cell of the first step.
    """
    # a data set may live on the device, or have threads of its own read: neither is there after a fork
    if wanted == 0 or (wanted is None and (torch.cuda.is_initialized() or threading.active_count() > 1)):
        yield None
        return
    processes = DataProcesses(load, wanted or 1)
    try:
        yield processes if wanted or _are_worth_it(processes, first) else None
    finally:
        processes.close()


def _are_worth_it(processes: DataProcesses, first: Cell) -> bool:
    sample_ms = processes.take(processes.ask(1, first, None)).reading.sample_ms
    if sample_ms < _SLOW_MS:
        processes.close()
        logger.info("samples are read when they are needed (%.2f ms each); num_workers says otherwise", sample_ms)
        return False
    processes.add(DEFAULT_PROCESSES - 1)
    text = "samples are read ahead of time in %d processes (%.1f ms each); num_workers says otherwise"
    logger.info(text, DEFAULT_PROCESSES, sample_ms)
    return True


class ReadAhead:
    """Keeps data processes busy with the cells that come next.

    As many as this step has, times the steps to read ahead, are asked for ahead of time, unless that is more than the
    processes can be asked at once, or than is known of the steps to come.

    Args:
        processes: What reads.
        num_steps: Steps of the job.
        steps_ahead: How many steps' cells are asked for.
    """

    def __init__(self, processes: DataProcesses, num_steps: int, steps_ahead: int = 1) -> None:
        self._processes = processes
        self._num_steps = num_steps
        self._steps_ahead = steps_ahead
        self._cells_of: CellsOf = lambda step: None
        self._reads: Reads = None
        self._steps: dict[int, tuple[Cell, ...]] = {}  # what was asked for is of these, whatever cells_of says later
        self._tickets: dict[tuple[int, int], int] = {}  # by step, and place among its cells

    def enter(self, cells_of: CellsOf, reads: Reads) -> None:
        """Begin to read other cells of each step, or other entries; what was asked for in vain is dropped."""
        known = ((cells, cells_of(step)) for step, cells in self._steps.items())
        if reads != self._reads or any(now is None or tuple(now) != before for before, now in known):
            self._forget()
        self._cells_of, self._reads = cells_of, reads

    def take(self, step: int, cell: Cell) -> Microbatch:
        """Return a cell of those that a step has, and have the next ones read."""
        self._steps = {each: cells for each, cells in self._steps.items() if each >= step}
        cells = self._cells(step)
        assert cells is not None, "a step is assigned before it begins"
        place = cells.index(cell)
        if self._tickets and (step, place) not in self._tickets:
            self._forget()  # a step is read once more; with what was asked for it would be more than fits
        most = max(self._steps_ahead * len(cells), 2 * len(self._processes))
        for number, (key, each) in enumerate(islice(self._keys_from(step, place), most + 1)):
            if key not in self._tickets:
                if number and not self._processes.has_room:
                    break
                self._tickets[key] = self._processes.ask(key[0], each, self._reads)
        return self._processes.take(self._tickets.pop((step, place)))

    def _forget(self) -> None:
        self._processes.forget()
        self._tickets.clear()
        self._steps.clear()

    def _keys_from(self, step: int, place: int) -> Iterator[tuple[tuple[int, int], Cell]]:
        """Yield the cells that are needed from one on, as far as that is known."""
        for later in range(step, self._num_steps + 1):
            cells = self._cells(later)
            if cells is None:
                return
            first = place if later == step else 0
            yield from (((later, first + i), each) for i, each in enumerate(cells[first:]) if each.samples)

    def _cells(self, step: int) -> tuple[Cell, ...] | None:
        if step not in self._steps:
            cells = self._cells_of(step)
            if cells is None:
                return None
            self._steps[step] = tuple(cells)
        return self._steps[step]
