"""Reads cells: a function of (seed, step, samples) alone, in whatever process, or refused by name.

Owns the seeding around a data set's code, the check of its samples, what is left out of them where no layer reads it,
and the checksums by which those who read the same find out whether they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from resilient.data.checksums import entry_checksum, row_checksums
from resilient.data.dataset import Collate, Dataset, Sample, stack
from resilient.data.lazy import Lazy
from resilient.data.lengths import UnitLengths
from resilient.data.sample_types import check_types
from resilient.data.sampler import StepSampler
from resilient.data.seeding import DrawWatch, draw, generators_kept, sample_key, seed_generators, seed_torch
from resilient.errors import SampleError

Reads = frozenset[str] | None
"""Entries of cells that some layers read; None for all."""

_FEWEST_UNSEEDED = 4
"""Of fewer samples, to seed generators for each takes no longer than to find out whether anybody draws from them."""
_UNSEEDED = "not for a sample"
"""What generators are seeded from that no sample should draw from."""

REPEATABLE = (
    "have __getitem__ depend on the index and on what it draws from the global generators of random, numpy and torch "
    "alone, not on generators of its own, the time or the order of a set"
)


class Cell(NamedTuple):
    """Samples of a step that are read, and collated, together.

    Args:
        unit: The part of the model that processes them; "" for a microbatch of a chain, which goes through all layers.
        samples: Positions in the step's global batch.
        lane: Which of the unit's replicas in the pipeline.
    """

    unit: str
    samples: tuple[int, ...]
    lane: int = 0

    @classmethod
    def of_chain(cls, position: int, microbatch: int) -> Cell:
        """Return the microbatch at a position among those of a step, of so many samples."""
        return cls("", tuple(range(position * microbatch, (position + 1) * microbatch)))


def common(left: Reads, right: Reads) -> Reads:
    """Return the entries that are in both."""
    if left is None or right is None:
        return left if right is None else right
    return left & right


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How the cells of a model's units are made of samples (:class:`resilient.models.packing.Packable`).

    Args:
        reads: By unit, the entries of cells, and those of samples that they are made of, which its layers read.
        lengths: Measures a sample that was read, with or without values.
        collate_unit: Joins samples for a unit, given what the random numbers of each are drawn from.
    """

    reads: Mapping[str, Reads]
    lengths: Callable[[Sample], UnitLengths]
    collate_unit: Callable[[str, Sequence[Sample], Sequence[int]], dict[str, Tensor]]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A sample as it was read: its index, its entries, how long that took, and whether all of them have values."""

    index: int
    sample: dict[str, Any]
    ms: float
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read of a cell, to be compared with what others read of it.

    Args:
        indices: Its samples' in the data set.
        samples: Of each sample, the checksums of its entries.
        batch: Checksums of the collated entries.
        sample_ms: How long reading a sample took, the median.
        lengths: Of each sample of a unit's cell; none of a chain's microbatch.
    """

    indices: tuple[int, ...]
    samples: tuple[dict[str, int], ...]
    batch: dict[str, int]
    sample_ms: float
    lengths: tuple[UnitLengths, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A collated cell: tensors by name, in host memory; what nobody asked for is on ``meta``."""

    batch: dict[str, Tensor]
    reading: Reading


class MicrobatchReader:
    """Reads the cells of a data set.

    Args:
        dataset: The data set.
        check: Raises ``SampleError`` for a sample (the second argument names it) that cannot be trained on; called once
            for each.
        check_always: Likewise, with its index first; called whenever it is read, with those entries that have values.
        sampler: Says which samples a step trains on.
        collate: Joins those of a chain's microbatch.
        declared: Entries that some layer says it reads: only those are left out where no layer here does.
        packing: Joins those of a unit's cell; None where there are no such cells.
    """

    def __init__(
        self,
        dataset: Dataset,
        check: Callable[[Sample, str], None],
        check_always: Callable[[int, Sample, str], None],
        sampler: StepSampler,
        collate: Collate,
        declared: frozenset[str] = frozenset(),
        packing: Packing | None = None,
    ) -> None:
        self._dataset = dataset
        self._check = check
        self._check_always = check_always
        self._sampler = sampler
        self._collate = collate
        self._declared = declared
        self._packing = packing
        self._checked = np.zeros(sampler.num_samples, dtype=np.bool_)  # a byte a sample, a set would take a hundred
        self._repeatable = set[str]()  # units for which a sample was read twice
        self._kind = type(dataset).__name__
        self._are_seeded = False  # Python's and numpy's generators for each sample, as samples depend on them

    def read(self, step: int, cell: Cell, reads: Reads) -> Microbatch:
        """Read a cell of a step, with those entries that some layers read: of a unit's cell, those that the unit does.

        The process's own generators are left as they were.

        Raises:
            SampleError: A sample cannot be trained on, or is no function of index, epoch and seed; it is named.
        """
        packing = self._packing if cell.unit else None
        reads = reads if packing is None else common(reads, packing.reads[cell.unit])
        with generators_kept():
            read = self._samples(step, cell, reads)
            if packing is None:
                joined, lengths = self._joined(read, self._collate), ()
            else:
                keys = [sample_key(self._sampler.seed, step, each.index) for each in read]
                joined = self._joined(read, lambda samples: packing.collate_unit(cell.unit, samples, keys))
                lengths = tuple(packing.lengths(each.sample) for each in read)
        is_stacked = packing is None and self._collate is stack
        batch = {
            entry: value.contiguous() if reads is None or entry in reads else value.to("meta")
            for entry, value in joined.items()
        }
        reading = Reading(
            indices=tuple(each.index for each in read),
            samples=tuple(self._all_checksums(read, joined if is_stacked else {}, reads)),
            batch=_checksums(batch),
            sample_ms=median(each.ms for each in read) if read else 0.0,
            lengths=lengths,
        )
        return Microbatch(batch=batch, reading=reading)

    def samples(self, step: int, cell: Cell) -> list[Read]:
        """Read and check the samples of a cell, as :meth:`read` does, with all their entries."""
        with generators_kept():
            return self._samples(step, cell, None)

    def join(self, read: Sequence[Read]) -> dict[str, Tensor]:
        """Collate samples to a chain's microbatch.

        Raises:
            SampleError: They cannot be collated, or only at random.
        """
        with generators_kept():
            return self._joined(read, self._collate)

    def indices(self, step: int, cell: Cell) -> list[int]:
        """Return which samples of the data set a cell has."""
        return self._sampler.indices(step)[list(cell.samples)].tolist()

    def _samples(self, step: int, cell: Cell, reads: Reads) -> list[Read]:
        indices, epochs = self.indices(step, cell), self._sampler.epochs(step)[list(cell.samples)].tolist()
        order = list(zip(indices, epochs, strict=True))
        if order and cell.unit not in self._repeatable:
            read = self._first(order, reads)
            self._repeatable.add(cell.unit)
        else:
            read = self._following(order, reads)
        if not all(each.is_whole for each in read):
            _leave_out_whole_entries([each.sample for each in read])
        return read

    def _first(self, order: Sequence[tuple[int, int]], reads: Reads) -> list[Read]:
        """Read samples, by index and epoch, for the first time, and one twice.

        Finds out whether they depend on Python's or numpy's generators: draw from them, or look at their state.
        """
        watch = DrawWatch()
        read = [self._sample(*each, reads, watch.seed) for each in order]
        self._are_seeded = self._are_seeded or watch.has_drawn()
        if not self._are_seeded:
            seed_generators(_UNSEEDED)
            again = self._sample(*order[0], reads, seed_torch)
            self._are_seeded = self._differing(read[0], again, reads) is not None
        if self._are_seeded:
            self._compare(read[0], self._sample(*order[0], reads, seed_generators), reads)
        return read

    def _following(self, order: Sequence[tuple[int, int]], reads: Reads) -> list[Read]:
        """Read samples; once more, should they turn out to draw from generators that were not seeded for them."""
        if not self._are_seeded and len(order) >= _FEWEST_UNSEEDED:
            watch = DrawWatch()
            watch.seed(_UNSEEDED)
            try:
                read = [self._sample(*each, reads, seed_torch) for each in order]
            except Exception:
                if not watch.has_drawn():
                    raise
            else:
                if not watch.has_drawn():
                    return read
                del read  # not to hold both
            self._are_seeded = True
            self._checked[[index for index, _ in order]] = False  # others will come of them
        return [self._sample(*each, reads, seed_generators) for each in order]

    def _joined(self, read: Sequence[Read], collate: Collate) -> dict[str, Tensor]:
        batch, has_drawn = self._collated(read, collate, "collate")
        # what other threads draw meanwhile is not its own, and changes nothing
        if has_drawn and _checksums(batch) != _checksums(self._collated(read, collate, "collate again")[0]):
            raise SampleError(
                f"collate of {self._kind} must draw no random numbers, got some; draw them in __getitem__, for "
                "after a failure other samples may be collated together"
            )
        return batch

    def _collated(self, read: Sequence[Read], collate: Collate, seed: str) -> tuple[dict[str, Tensor], bool]:
        """Collate samples; return what came of it, and whether anybody has drawn random numbers meanwhile."""
        seed_generators(seed)
        undrawn = draw()
        seed_generators(seed)
        try:
            batch = collate([each.sample for each in read])
        except SampleError as error:
            raise SampleError(f"samples {[each.index for each in read]} of {self._kind}: {error}") from None
        return batch, draw() != undrawn

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return f"sample {index} of {self._kind}"

    def _sample(self, index: int, epoch: int, reads: Reads, seed_for: Callable[..., None]) -> Read:
        started, seed, name = time.perf_counter(), self._sampler.seed, self.name(index)
        seed_for(seed, epoch, index)
        sample = self._dataset[index]
        check_types(sample, name, is_stacked=self._collate is stack)
        loaded, is_whole = dict(sample), True
        for entry, value in sample.items():
            if isinstance(value, Tensor):
                is_whole = is_whole and not value.is_meta
                continue
            if _is_lazy(value):
                seed_for(seed, epoch, index, entry)
                value = loaded[entry] = _loaded(value, f"{name}: {entry!r}", self._skips(entry, reads))
            is_whole = is_whole and _has_values(value)
        took_ms = 1000 * (time.perf_counter() - started)
        if not self._checked[index]:
            self._check(loaded, name)
            self._checked[index] = True
        known: Sample = loaded
        if not is_whole:
            known = {entry: value for entry, value in loaded.items() if _has_values(value)}
        self._check_always(index, known, name)
        return Read(index=index, sample=loaded, ms=took_ms, is_whole=is_whole)

    def _compare(self, first: Read, second: Read, reads: Reads) -> None:
        """Refuse a data set that is no function of index, epoch and seed, where reading a sample twice shows it."""
        if (entry := self._differing(first, second, reads)) is not None:
            raise SampleError(
                f"{self.name(first.index)}: {entry!r} must be the same whenever it is read, got another the "
                f"second time; {REPEATABLE}"
            )

    def _differing(self, first: Read, second: Read, reads: Reads) -> str | None:
        """Return an entry that differs."""
        before, after = self._checksums(first.sample, reads), self._checksums(second.sample, reads)
        return next((entry for entry in {**before, **after} if before.get(entry) != after.get(entry)), None)

    def _skips(self, entry: str, reads: Reads) -> bool:
        return reads is not None and entry in self._declared and entry not in reads

    def _all_checksums(self, read: Sequence[Read], stacked: Mapping[str, Tensor], reads: Reads) -> list[dict[str, int]]:
        """Return the checksums of samples' entries.

        Args:
            read: The samples.
            stacked: Their entries; none where they were joined in another way.
            reads: Those to be read.
        """
        entries = [entry for entry in stacked if not self._skips(entry, reads)]
        if not entries:
            return [self._checksums(each.sample, reads) for each in read]
        columns = [row_checksums(stacked[entry], [each.sample[entry] for each in read]) for entry in entries]
        return [dict(zip(entries, row, strict=True)) for row in zip(*columns, strict=True)]

    def _checksums(self, sample: Mapping[str, Any], reads: Reads) -> dict[str, int]:
        return {entry: entry_checksum(value) for entry, value in sample.items() if not self._skips(entry, reads)}


def _is_lazy(value: Any) -> bool:
    return any(isinstance(each, Lazy) for each in _flat(value))


def _loaded(value: Any, name: str, skip: bool) -> Any:
    """Return an entry of a sample with what is lazy in it loaded, or without values."""
    if isinstance(value, list | tuple):
        return [_loaded(each, f"{name}[{place}]", skip) for place, each in enumerate(value)]
    if not isinstance(value, Lazy):
        return value
    if skip:
        return value.empty()
    tensor = value.load()
    if tensor.dtype != value.dtype or tuple(tensor.shape) != tuple(value.shape):
        raise SampleError(
            f"{name} must be {value.dtype} of shape {list(value.shape)} as declared, got {tensor.dtype} of shape "
            f"{list(tensor.shape)}; declare what is loaded"
        )
    return tensor


def _checksums(batch: Mapping[str, Tensor]) -> dict[str, int]:
    return {entry: entry_checksum(value) for entry, value in batch.items() if not value.is_meta}


def _leave_out_whole_entries(samples: Sequence[dict[str, Any]]) -> None:
    """Where an entry has no values in some samples, take them from the others: they are to be collated."""
    empty = {entry for sample in samples for entry, value in sample.items() if not _has_values(value)}
    for sample in samples:
        for entry in empty & sample.keys():
            value = sample[entry]
            sample[entry] = _without_values(value)


def _without_values(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_values(each) for each in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _has_values(value: Any) -> bool:
    """Return whether an entry of a sample has all its values: nothing of it is on ``meta``."""
    if isinstance(value, Tensor):
        return not value.is_meta
    return not any(isinstance(each, Tensor) and each.is_meta for each in _flat(value))
