"""Gives a worker the microbatches it trains on, read here or ahead of time, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

from torch import Tensor

from resilient.data.dataset import Dataset, Sample, collate_of, num_targets
from resilient.data.processes import DataProcesses
from resilient.data.read_ahead import ReadAhead
from resilient.data.reader import MicrobatchReader, Read, Reading, Reads
from resilient.data.sample_types import NamedEntries
from resilient.data.sampler import StepSampler, microbatches
from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import LayerSpec, Model
from resilient.runtime.job import Job


def sampler_of(job: Job) -> StepSampler:
    """Return what says which samples the job's steps train on."""
    return StepSampler(num_samples=len(job.dataset), global_batch=job.global_batch, seed=job.seed)


def reader_of(job: Job) -> MicrobatchReader:
    """Return what reads the job's microbatches."""
    declared = frozenset[str]().union(*(spec.reads for spec in job.model.layers if spec.reads is not None))
    check_always = partial(check_num_targets, job.model, job.dataset)
    collate = collate_of(job.dataset, job.model)
    return MicrobatchReader(
        job.dataset, job.model.check, check_always, sampler_of(job), job.microbatch, collate, declared
    )


def reads_of(layers: tuple[LayerSpec, ...]) -> Reads:
    """Return the entries of a microbatch that some layers read; None for all."""
    return reduce(
        lambda left, right: None if left is None or right is None else left | right, (layer.reads for layer in layers)
    )


class Batches:
    """Loads what steps train on: a pure function of (seed, step), so any worker can load any microbatch at any time.

    Args:
        job: The job.
        processes: What reads samples ahead of time; None to read them here, when they are needed.

    Attributes:
        readings: Position -> what was read of the microbatch that was loaded last.
    """

    def __init__(self, job: Job, processes: DataProcesses | None = None) -> None:
        self._job = job
        self._sampler = sampler_of(job)
        self._reader = reader_of(job)
        self._ahead = None if processes is None else ReadAhead(processes, job.num_steps)
        self._reads: Reads = None
        self.readings: dict[int, Reading] = {}

    def enter(self, positions: tuple[int, ...], reads: Reads) -> None:
        """Begin to load other microbatches of each step, or other entries: a generation's plan says which."""
        self._reads = reads
        self.readings.clear()
        if self._ahead is not None:
            self._ahead.enter(positions, reads)

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
            The collated tensors by name, ``[microbatch, ...]``, on the job's device, floating-point ones in its type;
            those that no layer here reads have a shape, but no values (they are on ``meta``).

        Raises:
            SampleError: A sample cannot be trained on; it is named.
            DataProcessError: A process that reads samples is gone.
        """
        if self._ahead is None:
            read = self._reader.read(step, position, self._reads)
        else:
            read = self._ahead.take(step, position)
        self.readings[position] = read.reading
        return self._placed(read.batch)

    def samples(self, step: int, position: int) -> list[Read]:
        """Read and check the samples of microbatch ``position`` of a step, each with its index.

        Raises:
            SampleError: A sample cannot be trained on; it is named.
        """
        return self._reader.samples(step, position, None)

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return self._reader.name(index)

    def join(self, read: Sequence[Read]) -> dict[str, Tensor]:
        """Collate samples, as :meth:`batch` returns them."""
        return self._placed(self._reader.join(read))

    def _placed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        placed = {entry: self._place(value) for entry, value in batch.items()}
        return NamedEntries(placed, f"microbatches of {type(self._job.dataset).__name__}")

    def told(self, step: int, position: int) -> str:
        """Return, in words, the samples of a microbatch."""
        indices = microbatches(self._sampler.indices(step), self._job.microbatch)[position]
        return f"samples {indices.tolist()} of {type(self._job.dataset).__name__}"

    def _place(self, value: Tensor) -> Tensor:
        dtype = self._job.dtype if value.is_floating_point() else None
        return value.to(device="meta" if value.is_meta else self._job.device, dtype=dtype)


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
    elif found == said + 1 and getattr(model, "labels", "shifted") is None:
        fix += '; or, if labels are not shifted, as transformers wants them, pass MultimodalModule(labels="unshifted")'
    raise SampleError(f"{name}: num_targets({index}) must be {found}, the targets in the sample, got {got}; {fix}")
