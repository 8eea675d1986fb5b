"""How far a step and a worker have come, as messages tell it. Must not import torch."""

from __future__ import annotations

import math

import msgspec

from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.byte_intervals import ByteIntervals


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's prepare barrier gave all; ``skipped`` counts it, too; ``saves``: a checkpoint is to follow it."""

    step: int
    loss: float
    grad_norm: float
    skipped: SkippedSteps = NONE_SKIPPED
    losses: dict[str, float] = {}
    saves: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether the step updates the states: its loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class WorkerProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands when its generation ends.

    Args:
        version: Steps committed by this worker; -1 for a worker that has no state yet.
        complete: It holds every reduced gradient of step ``version + 1`` of the states in ``current``.
        begun: It has begun step ``version + 1``: work that is lost when the job goes on from ``version``.
        passed: Outcome of the newest barrier it passed; the step is ``version`` (committed).
        current: States at ``version`` that took part in the last step.
        retained: Further states at ``version`` that did not (kept from an earlier plan): sources for copies,
            but they cannot be rolled forward.
        current_parts: Of those that are not here whole, which bytes are.
        retained_parts: Likewise.
        stage_ms: What its stages compute for one mean microbatch of the plan, median of its steps; 0 after too few.
    """

    version: int
    complete: bool
    begun: bool = False
    passed: StepOutcome | None = None
    current: tuple[str, ...] = ()
    retained: tuple[str, ...] = ()
    current_parts: dict[str, ByteIntervals] = {}
    retained_parts: dict[str, ByteIntervals] = {}
    stage_ms: float = 0.0
