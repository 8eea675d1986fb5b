"""Measures how long a worker's stage computes for one microbatch; the coordinator finds slow nodes by it.

Owns the measurement. Waiting for peers and for data is not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from types import TracebackType

import torch

MIN_MEASURED_STEPS = 10
"""Fewer steps say nothing: the first ones are slow on every machine."""

_KEPT_STEPS = 64


class StageTimer:
    """Times a stage: a context around every forward and backward.

    On a GPU it reads the times of the work itself, which the host runs ahead of.

    Args:
        device: Where the stage computes.
        num_microbatches: Of one step.
    """

    def __init__(self, device: torch.device, num_microbatches: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._num_microbatches = num_microbatches
        self._started_at = 0.0
        self._total_ms = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps_ms: deque[float] = deque(maxlen=_KEPT_STEPS)

    def __enter__(self) -> None:
        if self._on_gpu:
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            span[0].record()
            self._spans.append(span)
        else:
            self._started_at = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_gpu:
            self._spans[-1][1].record()
        else:
            self._total_ms += 1e3 * (time.perf_counter() - self._started_at)

    def end_step(self) -> None:
        """Take down the step; call this when it is committed, where waiting for the device costs nothing."""
        for start, end in self._spans:
            end.synchronize()
            self._total_ms += start.elapsed_time(end)
        self._steps_ms.append(self._total_ms)
        self._spans.clear()
        self._total_ms = 0.0

    @property
    def stage_ms(self) -> float:
        """The median over the newest steps, of one microbatch; 0 before ``MIN_MEASURED_STEPS`` steps."""
        enough = len(self._steps_ms) >= MIN_MEASURED_STEPS
        return statistics.median(self._steps_ms) / self._num_microbatches if enough else 0.0
