"""Loads the microbatches of a step on this worker: reads, checks and collates samples, moves them to the device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from resilient.data.dataset import collate, num_targets
from resilient.data.sampler import StepSampler, microbatches
from resilient.errors import SampleError
from resilient.runtime.job import Job


class Batches:
    """Loads what steps train on: a pure function of (seed, step), so any worker can load any microbatch at any time.

    Args:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sampler = StepSampler(num_samples=len(job.dataset), global_batch=job.global_batch, seed=job.seed)
        self._checked: set[int] = set()

    def num_targets(self, step: int) -> int:
        """Return the number of loss-bearing targets of a step's global batch, from metadata alone.

        Raises:
            ValueError: It is zero.
        """
        total = sum(num_targets(self._job.dataset, int(index)) for index in self._sampler.indices(step))
        if total <= 0:
            raise ValueError(f"num_targets of step {step} must be > 0, got {total}; check the data set's num_targets()")
        return total

    def batch(self, step: int, position: int) -> dict[str, Tensor]:
        """Load microbatch ``position`` of a step.

        Returns:
            The collated tensors by name, ``[microbatch, ...]``, on the job's device; floating-point ones in its type.

        Raises:
            SampleError: A sample cannot be trained on; it is named.
        """
        job = self._job
        indices = microbatches(self._sampler.indices(step), job.microbatch)[position]
        samples = []
        for index in map(int, indices):
            sample = job.dataset[index]
            if index not in self._checked:
                name = f"sample {index} of {type(job.dataset).__name__}"
                if not isinstance(sample, Mapping):
                    raise SampleError(f"{name}: must map names to tensors, got {type(sample).__name__}; return a dict")
                job.model.check(sample, name)
                self._checked.add(index)
            samples.append(sample)
        try:
            batch = collate(job.dataset, samples)
        except SampleError as error:
            raise SampleError(f"samples {indices.tolist()} of {type(job.dataset).__name__}: {error}") from None
        return {key: self._place(value) for key, value in batch.items()}

    def _place(self, value: Tensor) -> Tensor:
        dtype = self._job.dtype if value.is_floating_point() else None
        return value.to(device=self._job.device, dtype=dtype)
