"""What one unit does in a step: its microbatches, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica
from resilient.planners.stages.degraded_replicas import tokens_held
from resilient.planners.stages.stage_work import Calls, Work, stage_work
from resilient.templates.common.arrays import Flags, Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class StepUnit:
    """A unit's work. A cell is a microbatch of a pipeline.

    Args:
        costs: Of the unit.
        spread: Over devices.
        share: Replicas of the unit for each pipeline.
        lengths: Of the samples.
        width: Cells of each pipeline, used or not.
        cell: Of each sample.
        counted: The cells there are.
        work: What they take at full speed.
        speeds: Of each cell's pipeline.
    """

    costs: UnitCosts
    spread: Parallelism
    share: float
    lengths: Lengths
    width: int
    cell: Ints
    counted: Flags
    work: Work
    speeds: Floats

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        costs: UnitCosts,
        assignment: Assignment,
        batch: SampleTable,
        replicas: Sequence[Replica],
    ) -> StepUnit:
        spread, place = configuration.units[costs.name], assignment.units[costs.name]
        if len(spread.stage_layers) != spread.pp or sum(spread.stage_layers) != len(costs.layers):
            raise ValueError(
                f"stage_layers of {costs.name!r} must spread {len(costs.layers)} layers over {spread.pp} stages, got "
                f"{spread.stage_layers}; give each stage its number of layers"
            )
        counts = np.array([each.num_microbatches for each in replicas])
        if np.any(place.replica >= len(replicas)) or np.any(place.microbatch >= counts[place.replica]):
            raise ValueError(
                f"places in {costs.name!r} must be within {len(replicas)} replicas of {counts.tolist()} microbatches, "
                f"got replica {place.replica.max(initial=0)} and microbatch {place.microbatch.max(initial=0)}; "
                f"assign the batch to these replicas"
            )
        width = int(counts.max())
        cell = place.replica * width + place.microbatch
        lengths = batch.units[costs.name]
        last = np.zeros(len(replicas), np.int64)
        np.maximum.at(last, place.replica, place.microbatch + 1)
        if costs.name == LLM:
            last = counts
        ring = costs.name == LLM or assignment.units[LLM].group is None
        share = 1.0 if configuration.colocated else spread.dp / configuration.units[LLM].dp
        calls = _calls(place, cell, lengths, spread.cp, len(replicas) * width)
        work = stage_work(costs, spread, calls, share, ring=ring)
        held = np.repeat([tokens_held(spread, each.devices) for each in replicas], width)
        return cls(
            costs=costs,
            spread=spread,
            share=share,
            lengths=lengths,
            width=width,
            cell=cell,
            counted=(np.arange(width)[None, :] < last[:, None]).ravel(),
            work=replace(work, kept_bytes=work.kept_bytes * held),
            speeds=np.repeat([each.speed for each in replicas], width),
        )

    @cached_property
    def tokens(self) -> Floats:
        """Tokens of each cell."""
        return loads(self.lengths.tokens, self.cell, len(self.counted))

    @property
    def std_ms(self) -> float:
        total = (self.work.forward_ms + self.work.backward_ms).sum(axis=0)[self.counted]
        return float(total.std()) if len(total) else 0.0


def _calls(place: Place, cell: Ints, lengths: Lengths, cp: int, num_cells: int) -> Calls:
    if place.group is None or place.degree is None:
        group, degree = np.zeros_like(cell), np.full_like(cell, cp)
    else:
        group, degree = place.group, place.degree
    wide = int(group.max(initial=0)) + 1
    keys, first, call = np.unique(cell * wide + group, return_index=True, return_inverse=True)
    return Calls(
        cell=keys // wide,
        degree=degree[first],
        tokens=loads(lengths.tokens, call, len(keys)),
        squares=loads(lengths.squares, call, len(keys)),
        num_cells=num_cells,
    )
