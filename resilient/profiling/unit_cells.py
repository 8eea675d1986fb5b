"""Which samples the units of a model are measured on: packed cells, from the smallest to the largest of a step.

The same for all seeds of a job, so that its runs share what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from resilient.data.dataset import Sample
from resilient.data.lazy import Lazy
from resilient.data.lengths import SampleLengths
from resilient.data.seeding import generators_kept, sample_key, seed_generators
from resilient.errors import ArgumentError
from resilient.models.packing import Packable, why_padded
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.runtime.job import Job
from resilient.templates.common.arrays import Ints

_ALONE = (0.0, 0.5, 1.0)
"""Quantiles of the samples that are a cell each: the longest have more attention to a token than cells of many."""

_MEAN_CELLS = (1, 2, 3, 4)
"""Mean cells whose samples are packed into one: planners' cells are rarely larger, but where a sample is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnSamples:
    """Samples of a data set, and how long they are.

    Args:
        indices: Of each, ``[num_samples]``; some may come twice.
        table: Their lengths in each unit of the model, in the units' order.
    """

    indices: Ints
    table: SampleTable

    def cells(self, unit: str, microbatch: int) -> list[tuple[int, ...]]:
        """Return positions of samples whose cells a unit is measured on, of four sizes or more.

        Args:
            unit: The unit.
            microbatch: Samples of a microbatch, of which some may have nothing for the unit.

        Raises:
            ArgumentError: None of all that were drawn has anything for it.
        """
        lengths = self.table.units[unit]
        some = np.flatnonzero(lengths.tokens)
        if not some.size:
            fix = f"leave {unit} out of the model, or mix in samples that it is for"
            raise ArgumentError("dataset", f"have samples for {unit}", f"none among {len(self.indices)}", fix)
        ascending = some[np.argsort(lengths.tokens[some], kind="stable")]
        mean_cell = max(1, round(microbatch * some.size / len(self.indices)))
        chosen = [ascending[[int(part * (some.size - 1))]] for part in _ALONE]
        chosen += [np.resize(some, count * mean_cell) for count in _MEAN_CELLS]
        sizes = {(int(lengths.tokens[each].sum()), int(lengths.squares[each].sum())): each for each in chosen}
        return [tuple(each.tolist()) for each in sizes.values()]


def draw_lengths(job: Job, count: int = 256) -> DrawnSamples:
    """Draw samples of a job's data set, whatever its seed; those whose lengths nobody says are loaded, and remembered.

    Args:
        job: The job.
        count: How many.

    Raises:
        ArgumentError: The model cannot pack the data set's samples.
        SampleError: A sample cannot be trained on.
    """
    why, model = why_padded(job.model, job.dataset), job.model
    if why is not None or not isinstance(model, Packable):
        raise ArgumentError("model", "pack the data set's samples", f"a job in which {why}", "change that")
    indices = np.random.default_rng(0).integers(len(job.dataset), size=count)
    found = SampleLengths(job.dataset, model).of(indices.tolist())
    units = {unit: Lengths.of([lengths.get(unit, []) for lengths in found]) for unit in model.units}
    return DrawnSamples(indices=indices, table=SampleTable(units=units))


class CellReader:
    """Reads cells of the samples that were drawn.

    Args:
        job: The job, whose model packs them.
        drawn: They.
    """

    def __init__(self, job: Job, drawn: DrawnSamples) -> None:
        assert isinstance(job.model, Packable)
        self._job = job
        self._model: Packable = job.model
        self._indices = drawn.indices.tolist()
        self._samples: dict[int, Sample] = {}

    def batch(self, unit: str, cell: Sequence[int]) -> dict[str, Tensor]:
        """Return what a unit reads of samples, on the job's device.

        Args:
            unit: The unit.
            cell: The samples' positions among those that were drawn.

        Raises:
            SampleError: One of them cannot be trained on.
        """
        indices = [self._indices[position] for position in cell]
        with generators_kept():
            samples = [self._sample(index) for index in indices]
            batch = self._model.collate_unit(unit, samples, [sample_key(0, 0, index) for index in indices])
        dtype, device = self._job.dtype, self._job.device
        return {entry: value.to(device, dtype if value.is_floating_point() else None) for entry, value in batch.items()}

    def _sample(self, index: int) -> Sample:
        if index not in self._samples:
            seed_generators("measured", index)
            sample = {entry: _loaded(value) for entry, value in self._job.dataset[index].items()}
            self._job.model.check(sample, f"sample {index} of {type(self._job.dataset).__name__}")
            self._samples[index] = sample
        return self._samples[index]


def _loaded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_loaded(each) for each in value]
    return value.load() if isinstance(value, Lazy) else value
