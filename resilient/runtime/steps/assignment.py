"""Where the samples of one step go, as all workers know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from resilient.planners.costs.samples import Lengths
from resilient.planners.pipelines.sample_places import NOWHERE
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.step_cells import StepCells

_NUMBERS = 6
"""That are told of each sample in each unit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAssignment:
    """Places and lengths of one step's samples.

    Args:
        units: Names, in order.
        places: Pipeline, lane and cell of each sample in each unit; all -1 where it has nothing to do. Where devices of
            a stage have samples of their own, cell number n is that of device n % devices in round n // devices.
            ``[num_units, num_samples, 3]``
        tokens: Of each sample in each unit. ``[num_units, num_samples]``
        squares: Sums of its sequences' squared lengths, likewise.
        longest: The longest of its sequences, likewise.
    """

    units: tuple[str, ...]
    places: Tensor
    tokens: Tensor
    squares: Tensor
    longest: Tensor

    @staticmethod
    def encoded_size(num_units: int, num_samples: int) -> int:
        """Return how many numbers :meth:`encoded` has."""
        return num_units * num_samples * _NUMBERS

    def encoded(self) -> Tensor:
        """Return it as numbers that may be added to zeros; float64, ``[encoded_size]``."""
        lengths = torch.stack((self.tokens, self.squares, self.longest), dim=2)
        return torch.cat((self.places, lengths), dim=2).to(torch.float64).flatten()

    @classmethod
    def decoded(cls, units: tuple[str, ...], numbers: Tensor) -> StepAssignment:
        """Return what :meth:`encoded` gave these numbers."""
        table = numbers.to(torch.int64).reshape(len(units), -1, _NUMBERS)
        tokens, squares, longest = table[..., 3:].unbind(dim=2)
        return cls(units=units, places=table[..., :3], tokens=tokens, squares=squares, longest=longest)

    def lengths(self, unit: str) -> Lengths:
        """Return the lengths of all samples in a unit."""
        return self._lengths[unit]

    @cached_property
    def _lengths(self) -> dict[str, Lengths]:
        of_units = zip(self.tokens.numpy(), self.squares.numpy(), self.longest.numpy(), strict=True)
        return {
            unit: Lengths(tokens=tokens, squares=squares, longest=longest)
            for unit, (tokens, squares, longest) in zip(self.units, of_units, strict=True)
        }

    def joined(self, pipeline: int) -> tuple[int, ...]:
        """Return the pipelines, ascending, that exchange features with one, or with others that do; and it itself."""
        of_samples = {frozenset(each) - {NOWHERE} for each in zip(*self.places[..., 0].tolist(), strict=True)}
        found, before = {pipeline}, set[int]()
        while found != before:
            before = found
            found = found.union(*(each for each in of_samples if each & found))
        return tuple(sorted(found))

    def cells(self, pipelines: Sequence[int], lanes: PlanLanes, device: int | None = None) -> StepCells:
        """Return the cells of some pipelines; of sharded ones they are rounds.

        Args:
            pipelines: Ascending; with each all that it exchanges features with (:meth:`joined`).
            lanes: Of the plan.
            device: The one of each stage whose samples are told; None for all.
        """
        samples: dict[LaneName, dict[int, list[int]]] = {lane: {} for lane in lanes.lanes(pipelines)}
        for unit, places in zip(self.units, self.places.tolist(), strict=True):
            for sample, (pipeline, lane, number) in enumerate(places):
                if pipeline not in pipelines:
                    continue
                cell, place = divmod(number, lanes.round_size(pipeline))
                if device in (None, place):
                    name = lanes.name(pipeline, LaneName(unit, lane))
                    samples[name].setdefault(cell, []).append(sample)
        ordered = {lane: {cell: tuple(cells[cell]) for cell in sorted(cells)} for lane, cells in samples.items()}
        return StepCells(samples=ordered, feeds=lanes.feeds, whole=lanes.whole)
