"""The lengths of samples, known before they are loaded: said by the data set, or learnt by loading each sample once.

What was learnt is kept in the user's cache, a line for each sample. Nothing depends on its being there.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from resilient.common.arguments import described, whole_number
from resilient.common.sources import user_sources
from resilient.common.user_cache import cache_folder
from resilient.data.dataset import Dataset, Sample
from resilient.data.lazy import Lazy
from resilient.data.seeding import generators_kept, seed_generators
from resilient.errors import ArgumentError, SampleError, literal

logger = logging.getLogger(__name__)

UnitLengths = dict[str, list[int]]
"""Unit -> the tokens of each of a sample's sequences; units without any are left out."""


class LengthSums(NamedTuple):
    """What steps are planned by of a sample's sequences in one unit: their tokens, and the sum of their squares."""

    tokens: int
    squares: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthSums:
        """Return those of sequences of these lengths."""
        return cls(sum(lengths), sum(each * each for each in lengths))


class Measure(Protocol):
    """What knows a sample's lengths once it is loaded: :class:`resilient.models.packing.Packable`."""

    @property
    def units(self) -> Mapping[str, tuple[str, ...]]: ...

    def check(self, sample: Sample, name: str) -> None: ...

    def lengths(self, sample: Sample) -> UnitLengths: ...

    def digest(self) -> str: ...


class SampleLengths:
    """The lengths of a data set's samples.

    Args:
        dataset: Asked first, if it has ``lengths``.
        model: Measures samples that were loaded.
    """

    def __init__(self, dataset: Dataset, model: Measure) -> None:
        self._dataset = dataset
        self._model = model
        self._kind = type(dataset).__name__
        self._says = getattr(dataset, "lengths", None)

    @cached_property
    def file(self) -> Path:
        """Where it is kept what was learnt of this data set, under this model."""
        kind = type(self._dataset)
        settings = {key: value for key, value in vars(self._dataset).items() if isinstance(value, int | str | Path)}
        key = (
            self._model.digest(),
            f"{kind.__module__}.{kind.__qualname__}",
            sorted((name, str(value)) for name, value in settings.items()),
            len(self._dataset),
            user_sources(),
        )
        return cache_folder("lengths") / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.jsonl"

    @cached_property
    def _learnt(self) -> dict[int, UnitLengths]:
        try:
            lines = self.file.read_bytes().splitlines()
        except OSError:
            return {}
        learnt: dict[int, UnitLengths] = {}
        for line in lines:
            try:
                index, lengths = msgspec.json.decode(line, type=tuple[int, UnitLengths])
            except msgspec.DecodeError:  # empty, or of a process that was killed while it wrote
                continue
            learnt[index] = lengths
        return learnt

    def of(self, indices: Sequence[int]) -> list[UnitLengths]:
        """Return the lengths of samples; those that nobody knows are loaded, and remembered.

        Raises:
            ArgumentError: The data set says something else than lengths.
            SampleError: A sample that is loaded cannot be trained on.
        """
        if self._says is not None:
            return [self._said(index, self._says(index)) for index in indices]
        new = {index: self._loaded(index) for index in dict.fromkeys(indices) if index not in self._learnt}
        if new:
            self._learnt.update(new)
            self._keep(new)
        return [self._learnt[index] for index in indices]

    def check(self, index: int, found: UnitLengths, name: str, planned: Mapping[str, LengthSums]) -> None:
        """Compare the lengths of a sample that was loaded with what is known of it here, and what others planned by.

        Args:
            index: Of the sample.
            found: Its lengths.
            name: What to call it.
            planned: By unit, what is known of its lengths by whoever planned the step it is of.

        Raises:
            SampleError: It has others: the step was not planned for it.
        """
        found = _some(found)
        if self._says is not None or index in self._learnt:
            self._compare(index, found, name)
        for unit, sums in planned.items():
            lengths = found.get(unit, [])
            if sums != LengthSums.of(lengths):
                raise SampleError(
                    f"{name}: must have {sums.tokens} tokens for {unit} (squares: {sums.squares}), by which its step "
                    f"was planned, got {lengths}; have its sizes depend on the index alone, or, if it was changed on "
                    f"purpose, delete {self.file} on all nodes"
                )

    def _compare(self, index: int, found: UnitLengths, name: str) -> None:
        (said,) = self.of([index])
        if said == found:
            return
        if self._says is not None:
            fix = f"have {self._kind}.lengths return {found} for it"
            raise SampleError(f"{name}: lengths({index}) must be {found}, those of the sample, got {said}; {fix}")
        raise SampleError(
            f"{name}: must have the lengths {said}, as when it was first loaded, got {found}; have its sizes depend on "
            f"the index alone, or, if it was changed on purpose, delete {self.file}"
        )

    def _said(self, index: int, value: Any) -> UnitLengths:
        field = f"lengths({index}) of {self._kind}"
        if not isinstance(value, Mapping) or not all(isinstance(each, list | tuple) for each in value.values()):
            fix = literal("return {'vision': [tokens of each image], 'llm': [tokens of its text]}")
            raise ArgumentError(field, "map units to lists of whole numbers", described(value), fix)
        known = ", ".join(self._model.units)
        if others := [str(unit) for unit in value if unit not in self._model.units]:
            raise ArgumentError(field, f"be of the model's units, {known}", ", ".join(others), "rename or leave out")
        fix = "leave out sequences without tokens"
        return _some({unit: [whole_number(field, each, 1, fix) for each in lengths] for unit, lengths in value.items()})

    def _loaded(self, index: int) -> UnitLengths:
        name = f"sample {index} of {self._kind}"
        with generators_kept():
            seed_generators("lengths", index)
            sample = {entry: _shaped(value) for entry, value in self._dataset[index].items()}
        self._model.check(sample, name)
        return _some(self._model.lengths(sample))

    def _keep(self, new: Mapping[int, UnitLengths]) -> None:
        # a line begins with its end: the one before may have been cut off
        lines = b"".join(b"\n" + msgspec.json.encode(item) for item in new.items())
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                file.write(lines)
        except OSError as error:
            logger.warning("the lengths of samples are not kept, the next run loads them again: %s", error)


def _some(lengths: Mapping[str, Sequence[int]]) -> UnitLengths:
    return {unit: list(each) for unit, each in sorted(lengths.items()) if each}


def _shaped(value: Any) -> Any:
    """Return an entry of a sample without loading what is lazy in it."""
    if isinstance(value, list | tuple):
        return [_shaped(each) for each in value]
    return value.empty() if isinstance(value, Lazy) else value
