"""Measures how long a worker's stages compute, for each cell of a step, and for one microbatch of many steps.

The coordinator finds slow nodes by the latter. What a planner of units gives a worker differs from step to step, and
from one worker to another: so each step counts as the mean microbatches that it was worth.

Owns the measurement. Waiting for peers and for data is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIN_MEASURED_STEPS = 10
"""Fewer steps say nothing: the first ones are slow on every machine."""

_KEPT_STEPS = 64

StageCell = tuple[int, int]
"""Number of a stage of the pipeline, and of a cell of its lane."""


class StageTimer:
    """Times stages: a context around every forward and backward.

    On a GPU it reads the times of the work itself, which the host runs ahead of.

    Args:
        device: Where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._cells_ms: dict[StageCell, float] = {}
        self._spans: list[tuple[StageCell, torch.cuda.Event, torch.cuda.Event]] = []
        self._microbatch_ms: deque[float] = deque(maxlen=_KEPT_STEPS)

    @contextmanager
    def during(self, stage: int, cell: int) -> Iterator[None]:
        """Count what is computed inside to a cell of a stage, unless it raises."""
        place = (stage, cell)
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._spans.append((place, start, end))
        else:
            started_at = time.perf_counter()
            yield
            self._add(place, 1e3 * (time.perf_counter() - started_at))

    def end_step(self, num_microbatches: float) -> dict[StageCell, float]:
        """Take down the step; call this when it is committed, where waiting for the device costs nothing.

        Args:
            num_microbatches: How many of the plan's microbatches it was worth here; one worth none is not counted.

        Returns:
            What each cell took on each stage, forward and backward, in ms.
        """
        for place, start, end in self._spans:
            end.synchronize()
            self._add(place, start.elapsed_time(end))
        found = self._cells_ms
        if num_microbatches > 0:
            self._microbatch_ms.append(sum(found.values()) / num_microbatches)
        self._spans.clear()
        self._cells_ms = {}
        return found

    def _add(self, place: StageCell, took_ms: float) -> None:
        self._cells_ms[place] = self._cells_ms.get(place, 0.0) + took_ms

    @property
    def stage_ms(self) -> float:
        """The median over the newest steps, of one microbatch; 0 before ``MIN_MEASURED_STEPS`` steps."""
        enough = len(self._microbatch_ms) >= MIN_MEASURED_STEPS
        return statistics.median(self._microbatch_ms) if enough else 0.0
