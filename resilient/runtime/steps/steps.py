"""What the steps of a generation are for one worker, and those of a chain: equal microbatches in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from resilient.data.lengths import LengthSums
from resilient.data.reader import Cell
from resilient.models.layer import Batch
from resilient.observability.step_trace import PlannedRow
from resilient.pipeline.stage_timer import StageCell
from resilient.pipeline.step_work import StepWork
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.stage_times import StageTimes, action_ms


class Steps(Protocol):
    """The steps of one generation on one worker.

    What all must know of a later step travels in the barrier of an earlier one (``bring``, ``take``).
    """

    @property
    def waited_s(self) -> float:
        """How long the newest :meth:`bring` had to wait here for what others are to know."""
        ...

    def begin(self, version: int) -> None:
        """Meet the other ranks, which call this, too, before the first step after ``version``.

        Raises:
            CommunicationError: A peer is gone.
        """
        ...

    def cells(self, step: int) -> Sequence[Cell] | None:
        """Return what this worker reads in a step, in the order of need; None while nobody knows."""
        ...

    def lengths(self, step: int, cell: Cell) -> Sequence[LengthSums]:
        """Return by what a step was planned of each of a cell's samples; nothing where it was not by their lengths."""
        ...

    def cell_at(self, step: int, unit: str, position: int) -> Cell:
        """Return the cell of a unit of which :attr:`StepWork.position` is the number."""
        ...

    def work(self, step: int, num_targets: int, batch: Callable[[Cell], Batch]) -> StepWork:
        """Return what a step is here.

        Args:
            step: Its number.
            num_targets: Loss-bearing targets of the global batch.
            batch: Loads a cell's samples, collated, on the stage's device.
        """
        ...

    def planned(self, step: int) -> PlannedRow:
        """Return what a step that begins is expected to take here."""
        ...

    def bring(self, step: int) -> Tensor:
        """Return what this rank adds to the sum over all ranks in the barrier of a step; float64, ``[size]``."""
        ...

    def num_microbatches(self, step: int) -> float:
        """Return how many of the plan's mean microbatches a step was worth for this worker's stages; any number >= 0.

        By what they are expected to take, so that the time of one can be compared with other workers'.
        """
        ...

    def learn(self, step: int, taken_ms: Mapping[StageCell, float]) -> None:
        """Learn from a step that is committed how long things take.

        Args:
            step: Its number.
            taken_ms: What this worker's stages computed for each cell.
        """
        ...

    def take(self, step: int, total: Tensor) -> None:
        """Take in that sum; all ranks have the same one."""
        ...

    def close(self) -> None:
        """End what runs beside the steps."""
        ...


class ChainSteps:
    """The steps of a chain.

    Args:
        schedule: Of the pipeline, or of a device of each of its stages.
        positions: Those of their microbatches within a step's: of one for each round of the schedule, but that there
            may be none for the last.
        microbatch: Samples of each.
        pipeline: This worker's.
        row: This worker's of the schedule.
        times: What each stage is expected to take.
        device: Which one of each stage.
    """

    waited_s = 0.0

    def __init__(
        self,
        schedule: Schedule,
        positions: Sequence[int],
        microbatch: int,
        pipeline: int,
        row: int,
        times: Sequence[StageTimes],
        device: int = 0,
    ) -> None:
        self._schedule = schedule
        self._pipeline = pipeline
        self._row = row
        self._times = times
        self._device = device
        self._positions = positions
        self._microbatch = microbatch
        self._idle = frozenset((CHAIN, cell) for cell in range(len(positions), schedule.graph.num_cells))
        self._cells = [Cell.of_chain(position, microbatch) for position in positions]

    def begin(self, version: int) -> None:
        """Nothing is to be known before a step."""

    def cells(self, step: int) -> Sequence[Cell]:
        """Return the microbatches of the pipeline."""
        return self._cells

    def lengths(self, step: int, cell: Cell) -> Sequence[LengthSums]:
        """Return nothing: a chain's steps do not depend on lengths."""
        return ()

    def cell_at(self, step: int, unit: str, position: int) -> Cell:
        """Return the microbatch at a position."""
        return Cell.of_chain(position, self._microbatch)

    def work(self, step: int, num_targets: int, batch: Callable[[Cell], Batch]) -> StepWork:
        """Return what a step is here: the same in every one."""
        return StepWork(
            step=step,
            schedule=self._schedule,
            row=self._row,
            num_targets=num_targets,
            position=lambda part: self._positions[part.cell],
            batch=lambda part: batch(self._cells[part.cell]),
            samples=lambda part: (self._positions[part.cell],),
            num_features=lambda source, target, sample: 1,
            idle=self._idle,
        )

    def planned(self, step: int) -> PlannedRow:
        """Return what every step is expected to take here."""
        actions = self._schedule.row(self._row)
        return PlannedRow(
            graph=self._schedule.graph,
            pipelines=(self._pipeline,),
            row=self._row,
            device=self._device,
            action_ms=tuple(action_ms(self._times, action) for action in actions),
        )

    def bring(self, step: int) -> Tensor:
        """Return nothing."""
        return torch.zeros(0, dtype=torch.float64)

    def num_microbatches(self, step: int) -> float:
        """Return the microbatches of the pipeline."""
        return float(len(self._positions))

    def learn(self, step: int, taken_ms: Mapping[StageCell, float]) -> None:
        """Nothing is placed by it."""

    def take(self, step: int, total: Tensor) -> None:
        """There is nothing to take."""

    def close(self) -> None:
        """Nothing runs beside the steps."""
