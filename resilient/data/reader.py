"""Reads microbatches: a function of (seed, step, position) alone, in whatever process, or refused by name.

Owns the seeding around a data set's code, the check of its samples, what is left out of them where no layer reads it,
and the checksums by which those who read the same find out whether they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from resilient.data.checksums import entry_checksum
from resilient.data.dataset import Collate, Dataset, Sample, stack
from resilient.data.lazy import Lazy
from resilient.data.sample_types import check_types
from resilient.data.sampler import StepSampler, microbatches
from resilient.data.seeding import draw, generators_kept, seed_generators
from resilient.errors import SampleError

Reads = frozenset[str] | None
"""Entries of microbatches that some layers read; None for all."""

REPEATABLE = (
    "have __getitem__ depend on the index and on what it draws from the global generators of random, numpy and torch "
    "alone, not on generators of its own, the time or the order of a set"
)


@dataclass(frozen=True, kw_only=True)
class Read:
    """A sample as it was read: its index, its entries, and how long that took."""

    index: int
    sample: dict[str, Any]
    ms: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read of a microbatch, to be compared with what others read of it.

    Args:
        indices: Its samples.
        samples: Of each sample, the checksums of its entries.
        batch: Checksums of the collated entries.
        sample_ms: How long reading a sample took, the median.
    """

    indices: tuple[int, ...]
    samples: tuple[dict[str, int], ...]
    batch: dict[str, int]
    sample_ms: float


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A collated microbatch, ``[microbatch, ...]`` by name, in host memory; what nobody asked for is on ``meta``."""

    batch: dict[str, Tensor]
    reading: Reading


class MicrobatchReader:
    """Reads the microbatches of a data set.

    Args:
        dataset: The data set.
        check: Raises ``SampleError`` for a sample (the second argument names it) that cannot be trained on; called once
            for each.
        check_always: Likewise, with its index first; called whenever it is read, with those entries that have values.
        sampler: Says which samples a step trains on.
        microbatch: Samples of a microbatch.
        collate: Joins them.
        declared: Entries that some layer says it reads: only those are left out where no layer here does.
    """

    def __init__(
        self,
        dataset: Dataset,
        check: Callable[[Sample, str], None],
        check_always: Callable[[int, Sample, str], None],
        sampler: StepSampler,
        microbatch: int,
        collate: Collate,
        declared: frozenset[str] = frozenset(),
    ) -> None:
        self._dataset = dataset
        self._check = check
        self._check_always = check_always
        self._sampler = sampler
        self._microbatch = microbatch
        self._collate = collate
        self._declared = declared
        self._checked = np.zeros(sampler.num_samples, dtype=np.bool_)  # a byte a sample, a set would take a hundred
        self._is_repeatable = False
        self._kind = type(dataset).__name__

    def read(self, step: int, position: int, reads: Reads) -> Microbatch:
        """Read microbatch ``position`` of a step, with those entries that some layers read.

        The process's own generators are left as they were.

        Raises:
            SampleError: A sample cannot be trained on, or is no function of index, epoch and seed; it is named.
        """
        with generators_kept():
            read = self._samples(step, position, reads)
            joined = self._joined(read)
        batch = {
            entry: value.contiguous() if reads is None or entry in reads else value.to("meta")
            for entry, value in joined.items()
        }
        reading = Reading(
            indices=tuple(each.index for each in read),
            samples=tuple(self._checksums(each.sample, reads) for each in read),
            batch=_checksums(batch),
            sample_ms=median(each.ms for each in read),
        )
        return Microbatch(batch=batch, reading=reading)

    def samples(self, step: int, position: int, reads: Reads) -> list[Read]:
        """Read and check the samples of a microbatch, as :meth:`read` does."""
        with generators_kept():
            return self._samples(step, position, reads)

    def join(self, read: Sequence[Read]) -> dict[str, Tensor]:
        """Collate samples.

        Raises:
            SampleError: They cannot be collated, or only at random.
        """
        with generators_kept():
            return self._joined(read)

    def _samples(self, step: int, position: int, reads: Reads) -> list[Read]:
        indices = microbatches(self._sampler.indices(step), self._microbatch)[position].tolist()
        epochs = microbatches(self._sampler.epochs(step), self._microbatch)[position].tolist()
        read = [self._sample(*each, reads) for each in zip(indices, epochs, strict=True)]
        if not self._is_repeatable:
            self._compare(read[0], self._sample(indices[0], epochs[0], reads), reads)
            self._is_repeatable = True
        _leave_out_whole_entries([each.sample for each in read])
        return read

    def _joined(self, read: Sequence[Read]) -> dict[str, Tensor]:
        batch, has_drawn = self._collated(read, "collate")
        # what other threads draw meanwhile is not its own, and changes nothing
        if has_drawn and _checksums(batch) != _checksums(self._collated(read, "collate again")[0]):
            raise SampleError(
                f"collate of {self._kind} must draw no random numbers, got some; draw them in __getitem__, for "
                "after a failure other samples may be collated together"
            )
        return batch

    def _collated(self, read: Sequence[Read], seed: str) -> tuple[dict[str, Tensor], bool]:
        """Collate samples; return what came of it, and whether anybody has drawn random numbers meanwhile."""
        seed_generators(seed)
        undrawn = draw()
        seed_generators(seed)
        try:
            batch = self._collate([each.sample for each in read])
        except SampleError as error:
            raise SampleError(f"samples {[each.index for each in read]} of {self._kind}: {error}") from None
        return batch, draw() != undrawn

    def name(self, index: int) -> str:
        """Return what to call a sample in messages."""
        return f"sample {index} of {self._kind}"

    def _sample(self, index: int, epoch: int, reads: Reads) -> Read:
        started, seed, name = time.perf_counter(), self._sampler.seed, self.name(index)
        seed_generators(seed, epoch, index)
        sample = self._dataset[index]
        check_types(sample, name, is_stacked=self._collate is stack)
        loaded: dict[str, Any] = {}
        for entry, value in sample.items():
            if _is_lazy(value):
                seed_generators(seed, epoch, index, entry)
                value = _loaded(value, f"{name}: {entry!r}", self._skips(entry, reads))
            loaded[entry] = value
        took_ms = 1000 * (time.perf_counter() - started)
        if not self._checked[index]:
            self._check(loaded, name)
            self._checked[index] = True
        known = {entry: value for entry, value in loaded.items() if not any(map(_is_empty, _flat(value)))}
        self._check_always(index, known, name)
        return Read(index=index, sample=loaded, ms=took_ms)

    def _compare(self, first: Read, second: Read, reads: Reads) -> None:
        """Refuse a data set that is no function of index, epoch and seed, where reading a sample twice shows it."""
        before, after = self._checksums(first.sample, reads), self._checksums(second.sample, reads)
        for entry in {**before, **after}:
            if before.get(entry) != after.get(entry):
                raise SampleError(
                    f"{self.name(first.index)}: {entry!r} must be the same whenever it is read, got another the "
                    f"second time; {REPEATABLE}"
                )

    def _skips(self, entry: str, reads: Reads) -> bool:
        return reads is not None and entry in self._declared and entry not in reads

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
    empty = {entry for sample in samples for entry, value in sample.items() if any(map(_is_empty, _flat(value)))}
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


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
