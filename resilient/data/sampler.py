"""Which samples a step trains on: a pure function of (seed, step), whatever the cluster looks like."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepSampler:
    """Order of samples: a seeded permutation per epoch, cut into batches that run across epoch borders.

    Args:
        num_samples: Samples in the data set.
        global_batch: Samples per step.
        seed: The job's seed, >= 0.
    """

    num_samples: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("global_batch", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}; pass a larger one")

    def indices(self, step: int) -> Indices:
        """Return the samples of a step, shape ``[global_batch]``, in the order they are cut into microbatches.

        Args:
            step: 1 for the first step of the job.
        """
        begin, end = self._places(step)
        parts: list[Indices] = []
        while begin < end:
            epoch, offset = divmod(begin, self.num_samples)
            part = _permutation(self.num_samples, self.seed, epoch)[offset : offset + end - begin]
            parts.append(part)
            begin += len(part)
        return np.concatenate(parts)

    def epochs(self, step: int) -> Indices:
        """Return the epoch, 0 for the first, that each of a step's samples is read in."""
        return np.arange(*self._places(step), dtype=np.int64) // self.num_samples

    def _places(self, step: int) -> tuple[int, int]:
        """Return where a step begins and ends in the endless order of all epochs."""
        if step < 1:
            raise ValueError(f"step must be >= 1, got {step}; the first step of a job is step 1")
        return (step - 1) * self.global_batch, step * self.global_batch


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> Indices:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    order = generator.permutation(num_samples)
    order.flags.writeable = False
    return order
