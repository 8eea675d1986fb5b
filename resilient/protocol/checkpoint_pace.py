"""How often a job with ``checkpoint_every="auto"`` writes a checkpoint, from what one costs and how often it is needed.

Global rank 0 decides and brings it into the prepare barrier of the step, so that all write the same one. What a
checkpoint costs is measured where all wait for the slowest writer: between the barriers before and after it. Must not
import torch: the coordinator reads this, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec

from resilient.templates.common.checkpoint_interval import checkpoint_interval_s

AUTO_CHECKPOINTS: Final = "auto"
"""As ``checkpoint_every``: by what a checkpoint was measured to cost, and by how often one is needed."""

_KEPT_STEPS = 32


class CheckpointPace(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of it when a generation begins; rank 0 goes on from there.

    Args:
        risk_s: Expected time between two losses that go back to a checkpoint.
        cost_s: How long one was last measured to hold up the training; None before that.
        since_s: How long ago the newest one was written, or training began.
    """

    risk_s: float
    cost_s: float | None = None
    since_s: float = 0.0


class CheckpointClock:
    """Tells rank 0 of a generation when a checkpoint is due, from what the last one cost.

    Args:
        now: The time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._pace: CheckpointPace | None = None
        self._step_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._passed_at: float | None = None
        self._last_at = 0.0
        self._is_writing = False
        self.cost_s: float | None = None

    def enter(self, pace: CheckpointPace | None) -> None:
        """Begin a generation; without a pace, or on other ranks, nothing is ever due here."""
        self._pace, self._passed_at, self._is_writing = pace, None, False
        self._step_s.clear()
        if pace is not None:
            self.cost_s, self._last_at = pace.cost_s, self._now() - pace.since_s

    @property
    def interval_s(self) -> float | None:
        """The time of training between two checkpoints; None before one was measured."""
        if self._pace is None or self.cost_s is None:
            return None
        return checkpoint_interval_s(self.cost_s, self._pace.risk_s)

    def is_due(self) -> bool:
        """Return whether there is to be a checkpoint after the step that is about to be committed.

        The first one is due as soon as the time of a step is known, to see what one costs.
        """
        if self._pace is None or self._is_writing or not self._step_s:
            return False
        return self.interval_s is None or self._now() - self._last_at >= self.interval_s

    def note_step(self, *, is_saved: bool) -> None:
        """Take in that a step's barrier was passed.

        Args:
            is_saved: A checkpoint is written after this step.
        """
        now = self._now()
        if self._passed_at is not None:
            taken_s = now - self._passed_at
            if self._is_writing:
                step_s = median(self._step_s)
                self.cost_s = max(0.0, taken_s - step_s)
                self._last_at = now - step_s
            else:
                self._step_s.append(taken_s)
        self._passed_at, self._is_writing = now, is_saved
