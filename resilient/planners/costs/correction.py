"""Correction: predictions learn from measured times.

A layer's time is not always the smooth curve that was fitted to it: kernels change with the shape, clocks with the
heat. Each (unit, tensor-parallel degree, bucket of lengths) has a factor, the moving average of actual by predicted
time, and predictions are multiplied with it before samples are assigned.

No clock: times come as arguments. All workers must be given the same observations, or they will assign differently.
Source: DFLOP, section 3.4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.tracking import Tracking
from resilient.templates.common.arrays import Floats, Ints

CorrectionKey = tuple[str, int, int]
"""Unit, tensor-parallel degree, bucket."""

NUM_BUCKETS = 126
"""Of all 64-bit numbers."""

_WEIGHT = 0.1
"""Of the newest step in moving averages; a factor's first steps count alike."""


def buckets(tokens: npt.ArrayLike) -> Ints:
    """Return the bucket of each length: two for a doubling (1, 1.41, 2, 2.83, ...)."""
    return np.floor(2 * np.log2(np.maximum(np.asarray(tokens), 1)) + 1e-9).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The measured time of a call.

    Args:
        unit: Its unit.
        tp: Its tensor-parallel degree.
        tokens: The length it goes by; where several sequences are packed, the longest.
        predicted_ms: Without correction.
        actual_ms: Measured.
    """

    unit: str
    tp: int
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
    """What was learnt. A value: :meth:`observe` returns the next.

    Args:
        factors: By key.
        tracking: Whether more is to be learnt.
    """

    factors: Mapping[CorrectionKey, Factor] = field(default_factory=dict, hash=False)
    tracking: Tracking = field(default_factory=Tracking)

    def factor(self, unit: str, tp: int, tokens: npt.ArrayLike) -> Floats:
        """Return what predictions for calls or samples of these lengths are to be multiplied with.

        A bucket that was never observed is taken for its nearest observed neighbour of the same unit and degree, the
        shorter one where two are as near; without any the factor is 1.
        """
        known = sorted(bucket for name, degree, bucket in self.factors if (name, degree) == (unit, tp))
        if not known:
            return np.ones(np.shape(tokens))
        nearest = np.abs(np.arange(NUM_BUCKETS)[:, None] - np.array(known)).argmin(axis=1)
        return np.array([self.factors[unit, tp, bucket].value for bucket in known])[nearest][buckets(tokens)]

    def observe(self, observations: Sequence[Observation]) -> Correction:
        """Return the correction that has learnt from one more step.

        The calls of a key count as one.

        Args:
            observations: Its calls, on all replicas.
        """
        sums: dict[CorrectionKey, tuple[float, float]] = {}
        by_length = buckets([each.tokens for each in observations]).tolist()
        for each, bucket in zip(observations, by_length, strict=True):
            key = (each.unit, each.tp, bucket)
            actual, predicted = sums.get(key, (0.0, 0.0))
            sums[key] = (actual + each.actual_ms, predicted + each.predicted_ms)
        return self.after(sums)

    def after(self, sums: Mapping[CorrectionKey, tuple[float, float]]) -> Correction:
        """Return the correction that has learnt from one more step.

        Args:
            sums: Of what the calls of each key took, and of what was predicted without correction, both > 0.
        """
        factors = dict(self.factors)
        for key, (actual, predicted) in sums.items():
            before = factors.get(key, Factor(value=1.0, num_steps=0))
            num_steps = before.num_steps + 1
            value = before.value + max(_WEIGHT, 1 / num_steps) * (actual / predicted - before.value)
            factors[key] = Factor(value=value, num_steps=num_steps)
        return replace(self, factors=factors)


UNCORRECTED = Correction()
"""What nothing was learnt for yet."""
