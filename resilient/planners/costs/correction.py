"""Adaptive correction: predictions learn from measured times, as long as that is worth measuring.

A layer's time is not always the smooth curve that was fitted to it: kernels change with the shape, clocks with the
heat. Each (unit, tensor-parallel degree, bucket of lengths) has a factor, the moving average of actual by predicted
time, and predictions are multiplied with it before samples are assigned.

Measuring takes time. What it brings in a step is how much nearer to the truth the largest error is that a replica's
unit was balanced with; a common factor on all predictions moves nothing and does not count. When on average that is
less than measuring takes, tracking stops and the factors stay; then a step is measured now and again, and tracking
goes on when the error has grown.

No clock: times come as arguments. All workers must be given the same observations, or they will assign differently.
Source: DFLOP, section 3.4.3. What an error is worth there is not said; the measure above is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Floats, Ints

CorrectionKey = tuple[str, int, int]
"""Unit, tensor-parallel degree, bucket."""

_NUM_BUCKETS = 126
"""Of all 64-bit numbers."""


def buckets(tokens: npt.ArrayLike) -> Ints:
    """Return the bucket of each length: two for a doubling (1, 1.41, 2, 2.83, ...)."""
    return np.floor(2 * np.log2(np.maximum(np.asarray(tokens), 1)) + 1e-9).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The measured time of a call.

    Args:
        unit: Its unit.
        tp: Its tensor-parallel degree.
        replica: Of the unit.
        tokens: The length it goes by; where several sequences are packed, the longest.
        predicted_ms: Without correction.
        actual_ms: Measured.
    """

    unit: str
    tp: int
    replica: int
    tokens: int
    predicted_ms: float
    actual_ms: float

    def __post_init__(self) -> None:
        if not min(self.predicted_ms, self.actual_ms) > 0:
            raise ValueError(
                f"times of {self.unit!r} must be > 0 ms, got {self.predicted_ms} predicted and {self.actual_ms} "
                f"measured; leave out calls on nothing"
            )


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The number that predictions for one key are multiplied with, and from how many steps it was learnt."""

    value: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The factors, and whether it is worth learning more. A value: :meth:`observe` returns the next.

    Args:
        weight: Of the newest step in moving averages; a factor's first steps count alike.
        trial_steps: Steps that are measured before tracking may stop.
        probe_every: While it is stopped, each so many steps are measured.
        growth: Tracking goes on when the error is so many times what it was when it stopped ...
        margin: ... and more by this much.
        tracking: Whether each step is to be measured.
        factors: By key.
        num_tracked: Steps measured since tracking last began.
        benefit_ms: What measuring brings a step, on average.
        cost_ms: What it takes.
        error: Of corrected predictions by the time measured, on average.
        error_when_stopped: The same at that time.
    """

    weight: float = 0.1
    trial_steps: int = 20
    probe_every: int = 50
    growth: float = 1.5
    margin: float = 0.02
    tracking: bool = True
    factors: Mapping[CorrectionKey, Factor] = field(default_factory=dict, hash=False)
    num_tracked: int = 0
    benefit_ms: float = 0.0
    cost_ms: float = 0.0
    error: float = 0.0
    error_when_stopped: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1 or min(self.trial_steps, self.probe_every) < 1 or self.growth < 1:
            raise ArgumentError(
                "weight",
                "be in (0, 1], trial_steps and probe_every >= 1 and growth >= 1",
                f"{self.weight}, {self.trial_steps}, {self.probe_every} and {self.growth}",
                "leave out what you have no reason to change",
            )

    def measures(self, step: int) -> bool:
        """Return whether to measure a step's calls and to :meth:`observe` them."""
        return self.tracking or step % self.probe_every == 0

    def factor(self, unit: str, tp: int, tokens: npt.ArrayLike) -> Floats:
        """Return what predictions for calls or samples of these lengths are to be multiplied with.

        A bucket that was never observed is taken for its nearest observed neighbour of the same unit and degree, the
        shorter one where two are as near; without any the factor is 1.
        """
        known = sorted(bucket for name, degree, bucket in self.factors if (name, degree) == (unit, tp))
        if not known:
            return np.ones(np.shape(tokens))
        nearest = np.abs(np.arange(_NUM_BUCKETS)[:, None] - np.array(known)).argmin(axis=1)
        return np.array([self.factors[unit, tp, bucket].value for bucket in known])[nearest][buckets(tokens)]

    def observe(self, observations: Sequence[Observation], *, cost_ms: float) -> Correction:
        """Learn from one measured step.

        Args:
            observations: Its calls, on all replicas.
            cost_ms: What measuring and sharing them took.

        Returns:
            The correction for the next steps.
        """
        if not observations:
            return self
        predicted = np.array([each.predicted_ms for each in observations])
        actual = np.array([each.actual_ms for each in observations])
        tokens = np.array([each.tokens for each in observations])
        corrected = predicted.copy()
        for (unit, tp), calls in _positions((each.unit, each.tp) for each in observations).items():
            corrected[calls] *= self.factor(unit, tp, tokens[calls])
        group = np.empty(len(observations), dtype=np.int64)
        for index, calls in enumerate(_positions((each.unit, each.replica) for each in observations).values()):
            group[calls] = index
        error = float(np.abs(actual - corrected).sum() / actual.sum())
        if not self.tracking:
            now = _moved(self.error, error, 1 / 3)
            if now <= self.growth * self.error_when_stopped + self.margin:
                return replace(self, error=now)
            return replace(self, error=now, tracking=True, num_tracked=0)._learnt(observations)
        num_tracked = self.num_tracked + 1
        weight = max(self.weight, 1 / num_tracked)
        benefit = _moved(
            self.benefit_ms, _largest_error(predicted, actual, group) - _largest_error(corrected, actual, group), weight
        )
        cost = _moved(self.cost_ms, cost_ms, weight)
        error = _moved(self.error, error, weight)
        stops = num_tracked >= self.trial_steps and benefit < cost
        return replace(
            self,
            num_tracked=num_tracked,
            benefit_ms=benefit,
            cost_ms=cost,
            error=error,
            tracking=not stops,
            error_when_stopped=error if stops else self.error_when_stopped,
        )._learnt(observations)

    def _learnt(self, observations: Sequence[Observation]) -> Correction:
        """Move the factors; the calls of a key in one step count as one."""
        sums: dict[CorrectionKey, tuple[float, float]] = {}
        by_length = buckets([each.tokens for each in observations]).tolist()
        for each, bucket in zip(observations, by_length, strict=True):
            key = (each.unit, each.tp, bucket)
            actual, predicted = sums.get(key, (0.0, 0.0))
            sums[key] = (actual + each.actual_ms, predicted + each.predicted_ms)
        factors = dict(self.factors)
        for key, (actual, predicted) in sums.items():
            before = factors.get(key, Factor(value=1.0, num_steps=0))
            num_steps = before.num_steps + 1
            value = _moved(before.value, actual / predicted, max(self.weight, 1 / num_steps))
            factors[key] = Factor(value=value, num_steps=num_steps)
        return replace(self, factors=factors)


UNCORRECTED = Correction()
"""What nothing was learnt for yet."""


_Label = TypeVar("_Label")


def _positions(labels: Iterable[_Label]) -> dict[_Label, list[int]]:
    """Return where each label stands."""
    found: dict[_Label, list[int]] = {}
    for position, label in enumerate(labels):
        found.setdefault(label, []).append(position)
    return found


def _moved(average: float, newest: float, weight: float) -> float:
    return average + weight * (newest - average)


def _largest_error(predicted: Floats, actual: Floats, group: Ints) -> float:
    """Return by how much the worst predicted group is off, once all predictions have the right sum. In ms."""
    off = actual - predicted * (actual.sum() / predicted.sum())
    return float(np.abs(np.bincount(group, weights=off)).max())
