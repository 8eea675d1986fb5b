"""Whether steps are worth measuring: a correction is learnt as long as it brings more than that takes.

Source: DFLOP, section 3.4.3: tracking stops when its mean benefit is below its measured cost, and goes on when the
error has grown. While it is stopped the factors stay as they are, and a step is measured now and again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_WEIGHT = 0.1
"""Of the newest step in averages; the first steps count alike."""

_TRIAL_STEPS = 20
"""That are measured before tracking may stop."""

_PROBE_EVERY = 50
"""Of so many steps one is measured while tracking is stopped."""

_PROBE_WEIGHT = 1 / 3
"""Of the newest of these in the error: few are seen."""

_GROWTH, _MARGIN = 1.5, 0.02
"""The error has grown when it is so many times what it was when tracking stopped, and so much more."""


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """What measured steps brought so far. A value: :meth:`after` returns the next.

    Args:
        on: Whether every step is to be measured.
        num_steps: Measured since that was last so.
        benefit_ms: What correction brings a step, on average.
        cost_ms: What measuring takes.
        error: Of corrected predictions, as a part of the time measured, on average.
        error_when_stopped: The same when tracking last stopped.
    """

    on: bool = True
    num_steps: int = 0
    benefit_ms: float = 0.0
    cost_ms: float = 0.0
    error: float = 0.0
    error_when_stopped: float = 0.0

    def measures(self, step: int) -> bool:
        """Return whether to measure this step."""
        return self.on or step % _PROBE_EVERY == 0

    def after(self, *, benefit_ms: float, cost_ms: float, error: float) -> Tracking:
        """Return what is so after one more measured step.

        Args:
            benefit_ms: What correction brought.
            cost_ms: What it took to measure the step, and to let all know of it.
            error: Of corrected predictions, as a part of the time measured.
        """
        if not self.on:
            error = _moved(self.error, error, _PROBE_WEIGHT)
            if error > _GROWTH * self.error_when_stopped + _MARGIN:
                return Tracking(error=error)
            return replace(self, error=error)
        number = self.num_steps + 1
        weight = max(_WEIGHT, 1 / number)
        benefit, cost = _moved(self.benefit_ms, benefit_ms, weight), _moved(self.cost_ms, cost_ms, weight)
        error = _moved(self.error, error, weight)
        on = number < _TRIAL_STEPS or benefit >= cost
        return Tracking(
            on=on,
            num_steps=number,
            benefit_ms=benefit,
            cost_ms=cost,
            error=error,
            error_when_stopped=self.error_when_stopped if on else error,
        )


def _moved(average: float, newest: float, weight: float) -> float:
    return average + weight * (newest - average)
