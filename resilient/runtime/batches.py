"""Gives a worker the cells it trains on, read here or ahead of time, on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from torch import Tensor

from resilient.data.dataset import Dataset, Sample, collate_of, num_targets
from resilient.data.lengths import LengthSums, SampleLengths
from resilient.data.processes import DataProcesses
from resilient.data.read_ahead import CellsOf, ReadAhead
from resilient.data.reader import Cell, MicrobatchReader, Packing, Read, Reading, Reads
from resilient.data.sample_types import NamedEntries
from resilient.data.sampler import StepSampler
from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import LayerSpec, Model
from resilient.models.packing import Packable
from resilient.runtime.job import Job


def sampler_of(job: Job) -> StepSampler:
    """Return what says which samples the job's steps train on."""
    return StepSampler(num_samples=len(job.dataset), global_batch=job.global_batch, seed=job.seed)


def reader_of(job: Job) -> MicrobatchReader:
    """Return what reads the job's cells."""
    model, dataset = job.model, job.dataset
    declared = frozenset[str]().union(*(spec.reads for spec in model.layers if spec.reads is not None))
    packing = None
    if isinstance(model, Packable):
        packing = Packing(reads=unit_reads(model), lengths=model.lengths, collate_unit=model.collate_unit)
    check_always, collate = partial(check_num_targets, model, dataset), collate_of(dataset, model)
    return MicrobatchReader(dataset, model.check, check_always, sampler_of(job), collate, declared, packing)


def reads_of(layers: tuple[LayerSpec, ...]) -> Reads:
    """Return the entries of a cell that some layers read; None for all."""
    return reduce(
        lambda left, right: None if left is None or right is None else left | right, (layer.reads for layer in layers)
    )


def unit_reads(model: Model) -> dict[str, Reads]:
    """Return the entries that each unit's layers read, whatever worker they are on; of a chain's microbatches all."""
    units = dict.fromkeys(layer.unit for layer in model.layers)
    return {"": None} | {unit: reads_of(tuple(each for each in model.layers if each.unit == unit)) for unit in units}


PlannedLengths = Callable[[int, Cell], Sequence[LengthSums]]
"""By what a step was planned of each of a cell's samples; empty where nothing is."""


class Batches:
    """Loads what steps train on: a pure function of (seed, step), so any worker can load any cell at any time.

    Args:
        job: The job.
        processes: What reads samples ahead of time; None to read them here, when they are needed.

    Attributes:
        lengths: Of the samples of units' cells, which are compared with those that were read; None where there are no
            units that can be apart.
    """

    def __init__(self, job: Job, processes: DataProcesses | None = None) -> None:
        self._job = job
        self._sampler = sampler_of(job)
        self._reader = reader_of(job)
        self._ahead = None if processes is None else ReadAhead(processes, job.num_steps, job.read_ahead)
        self.lengths = SampleLengths(job.dataset, job.model) if isinstance(job.model, Packable) else None
        self._reads: Reads = None
        self._read_step = 0
        self._readings: dict[Cell, Reading] = {}
        self._planned: PlannedLengths = lambda step, cell: ()

    def enter(self, cells_of: CellsOf, reads: Reads, planned: PlannedLengths = lambda step, cell: ()) -> None:
        """Begin to load other cells of each step, or other entries: a generation's plan says which.

        Args:
            cells_of: The cells of a step.
            reads: The entries of cells.
            planned: By what a step was planned of each of a cell's samples, as far as that is known.
        """
        self._reads = reads
        self._planned = planned
        self._readings.clear()
        if self._ahead is not None:
            self._ahead.enter(cells_of, reads)

    @property
    def reads_here(self) -> bool:
        """Whether samples are read when they are asked for; otherwise other processes read them ahead of time."""
        return self._ahead is None

    def num_targets(self, step: int) -> int:
        """Return the number of loss-bearing targets of a step's global batch, from metadata alone.

        Raises:
            ValueError: It is zero.
        """
        total = sum(num_targets(self._job.dataset, int(index)) for index in self._sampler.indices(step))
        if total <= 0:
            raise ValueError(f"num_targets of step {step} must be > 0, got {total}; check the data set's num_targets()")
        return total

    def batch(self, step: int, cell: Cell) -> dict[str, Tensor]:
        """Load a cell of a step.

        Returns:
            The collated tensors by name, of a chain ``[microbatch, ...]``, on the job's device, floating-point ones in
            its type; those that no layer here reads have a shape, but no values (they are on ``meta``). The lengths of
            a unit's segments stay in host memory, where they are read.

        Raises:
            SampleError: A sample cannot be trained on; it is named.
            DataProcessError: A process that reads samples is gone.
        """
        if self._ahead is None or not cell.samples:
            read = self._reader.read(step, cell, self._reads)
        else:
            read = self._ahead.take(step, cell)
        self._note(step, cell, read.reading)
        return self._placed(read.batch, stays=f"{cell.unit}.segments")

    def readings(self, step: int) -> dict[Cell, Reading]:
        """Return what was read of the cells of the step that was loaded last; nothing of others."""
        return self._readings if step == self._read_step else {}

    def samples(self, step: int, cell: Cell) -> list[Read]:
        """Read and check the samples of a cell of a step, each with its index.

        Raises:
            SampleError: A sample cannot be trained on; it is named.
        """
        return self._reader.samples(step, cell)

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return self._reader.name(index)

    def join(self, read: Sequence[Read]) -> dict[str, Tensor]:
        """Collate samples, as :meth:`batch` returns those of a chain's microbatch."""
        return self._placed(self._reader.join(read))

    def _placed(self, batch: dict[str, Tensor], stays: str = "") -> dict[str, Tensor]:
        placed = {entry: value if entry == stays else self._place(value) for entry, value in batch.items()}
        return NamedEntries(placed, f"microbatches of {type(self._job.dataset).__name__}")

    def told(self, step: int, cell: Cell) -> str:
        """Return, in words, the samples of a cell."""
        return f"samples {self._reader.indices(step, cell)} of {type(self._job.dataset).__name__}"

    def _note(self, step: int, cell: Cell, reading: Reading) -> None:
        if step != self._read_step:
            self._read_step, self._readings = step, {}
        if self.lengths is not None:
            known = self._planned(step, cell) or (None,) * len(reading.lengths)
            for index, found, sums in zip(reading.indices, reading.lengths, known, strict=False):  # a chain's has none
                self.lengths.check(index, found, self._reader.name(index), {} if sums is None else {cell.unit: sums})
        if cell.samples:
            self._readings[cell] = reading

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
