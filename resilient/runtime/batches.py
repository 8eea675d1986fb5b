"""Loads the microbatches of a step on this worker: reads, checks and collates samples, moves them to the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from resilient.data.dataset import Dataset, Sample, collate, num_targets
from resilient.data.sample_types import NamedEntries, check_sample
from resilient.data.sampler import StepSampler, microbatches
from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import Model
from resilient.runtime.job import Job

Read = tuple[int, Sample]
"""A sample as it was read, after its index."""


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
        return self.join(self.samples(step, position))

    def samples(self, step: int, position: int) -> list[Read]:
        """Read and check the samples of microbatch ``position`` of a step, each with its index.

        Raises:
            SampleError: A sample cannot be trained on; it is named.
        """
        job = self._job
        indices = microbatches(self._sampler.indices(step), job.microbatch)[position]
        read: list[Read] = []
        for index in map(int, indices):
            sample = job.dataset[index]
            if index not in self._checked:
                check_sample(job.dataset, sample, self.name(index))
                job.model.check(sample, self.name(index))
                self._checked.add(index)
            check_num_targets(job.model, job.dataset, index, sample, self.name(index))
            read.append((index, sample))
        return read

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return f"sample {index} of {type(self._job.dataset).__name__}"

    def join(self, read: Sequence[Read]) -> dict[str, Tensor]:
        """Collate samples, as :meth:`batch` returns them."""
        dataset = self._job.dataset
        try:
            batch = collate(dataset, [sample for _, sample in read])
        except SampleError as error:
            indices = [index for index, _ in read]
            raise SampleError(f"samples {indices} of {type(dataset).__name__}: {error}") from None
        placed = {key: self._place(value) for key, value in batch.items()}
        return NamedEntries(placed, f"microbatches of {type(dataset).__name__}")

    def _place(self, value: Tensor) -> Tensor:
        dtype = self._job.dtype if value.is_floating_point() else None
        return value.to(device=self._job.device, dtype=dtype)


def check_num_targets(model: Model, dataset: Dataset, index: int, sample: Sample, name: str) -> None:
    """Compare the targets that the model counts in a sample, if it can, with what the data set says of them.

    Raises:
        SampleError: They differ: every step would be of the wrong size.
    """
    count = getattr(model, "num_targets", None)
    found, said = None if count is None else count(sample), num_targets(dataset, index)
    if found is None or found == said:
        return
    kind = type(dataset).__name__
    got, fix = f"{said}", f"have {kind}.num_targets return {found} for it"
    if not hasattr(dataset, "num_targets"):
        got = f"{said}, the default"
        fix = f"give {kind} a method num_targets(self, index) -> int that returns {found} for it"
    if isinstance(model, Chain):
        fix += "; or, if they are not the loss's targets, rename the sample's entry of labels or targets"
    raise SampleError(f"{name}: num_targets({index}) must be {found}, the targets in the sample, got {got}; {fix}")
