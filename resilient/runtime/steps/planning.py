"""What a worker has to make assignments with: the planner, what units cost, how long samples are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from resilient.data.lengths import SampleLengths
from resilient.data.sampler import StepSampler
from resilient.errors import ArgumentError
from resilient.planners.costs.correction import Correction
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.pipelines.sample_places import SamplePlaces
from resilient.planners.planner import Planner
from resilient.runtime.steps.assignment import StepAssignment
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Plan
from resilient.templates.template import PipelineTemplate


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlanning:
    """What outlives generations.

    Args:
        planner: Places samples.
        costs: What units cost on this worker's device.
        lengths: Of the data set's samples.
        feeds: Which unit's features go to which later one.
        templates: The planner's pipelines on consecutive numbers of nodes.
        cluster: The nodes.
    """

    planner: Planner
    costs: CostModel
    lengths: SampleLengths
    feeds: tuple[tuple[str, str], ...]
    templates: tuple[PipelineTemplate, ...]
    cluster: Cluster

    @property
    def units(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(unit.name for unit in self.costs.units)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that stages may have, ascending."""
        return tuple(sorted({tp for unit in self.costs.units for tp, _ in unit.degrees}))

    def placement(self, plan: Plan, microbatch: int) -> SamplePlaces:
        """Return what places samples in a plan's pipelines."""
        return SamplePlaces(self.planner, self.costs, self.cluster, microbatch, plan)

    def prepared(
        self, placement: SamplePlaces, sampler: StepSampler, step: int, correction: Correction
    ) -> Callable[[], StepAssignment]:
        """Look up the lengths of a step's samples, and return what makes its assignment of them, in any thread.

        Args:
            placement: Of :meth:`placement`.
            sampler: Chooses the samples.
            step: The step.
            correction: What was learnt from measured times.

        Returns:
            What makes the assignment; it raises an ArgumentError where the planner has no places for the samples.
        """
        table = lengths_table(self.units, self.lengths, sampler.indices(step).tolist())

        def make() -> StepAssignment:
            lengths = [table.units[unit] for unit in self.units]
            try:
                places = placement.places(table, correction)
            except ValueError as error:  # of a later step than the one in which it is heard of
                wanted, got = f"have places for the samples of step {step}", f"{self.planner.name!r}, which has none"
                raise ArgumentError("planner", wanted, f"{got}: {error}", "choose another one") from error
            return StepAssignment(
                units=self.units,
                places=torch.from_numpy(places),
                tokens=torch.from_numpy(np.stack([each.tokens for each in lengths])),
                squares=torch.from_numpy(np.stack([each.squares for each in lengths])),
                longest=torch.from_numpy(np.stack([each.longest for each in lengths])),
            )

        return make


def lengths_table(units: Sequence[str], lengths: SampleLengths, indices: Sequence[int]) -> SampleTable:
    """Return what planners know of samples.

    Raises:
        SampleError: A sample had to be loaded, and cannot be trained on.
    """
    of_samples = lengths.of(indices)
    return SampleTable(
        units={unit: Lengths.of([each.get(unit, []) for each in of_samples]) for unit in units},
        names=tuple(f"sample {index}" for index in indices),
    )


def feeds_of(units: Mapping[str, Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """Return which unit's features go to which later one, of a model's :attr:`units`."""
    return tuple((source, target) for target, sources in units.items() for source in sources)
