"""The steps of pipelines of units: cells as assigned, in the order of a schedule made for them.

A sample may be in one pipeline with an encoder and in another with the language model. Pipelines that share samples so
in a step have one schedule in it, which the workers of all of them make alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from resilient.comm import Communicator
from resilient.data.lengths import LengthSums
from resilient.data.reader import Cell
from resilient.models.layer import Batch
from resilient.observability.step_trace import PlannedRow
from resilient.pipeline.row_actions import CellPart, RowActions
from resilient.pipeline.stage_timer import StageCell
from resilient.pipeline.step_work import StepWork
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import Assignments
from resilient.runtime.steps.unit_graph import PlanLanes, handed_over
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.common.arrays import Floats
from resilient.templates.plan import Slot
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.template import StageSpec

WARM_UP_STEPS = 2
"""Of a generation, that say nothing of how long later ones take."""


@dataclass(frozen=True)
class _Step:
    """What a step is for the pipelines that exchange features with a worker's, ``row`` being the worker's.

    ``cells_ms``: what each of their stages is expected to take for each cell, uncorrected.
    """

    pipelines: tuple[int, ...]
    cells: StepCells
    schedule: Schedule
    row: int
    cells_ms: Floats


class UnitSteps:
    """The steps of one worker.

    Args:
        comm: The generation's groups.
        assignments: Of its steps.
        slot: This worker's place.
        lanes: Of the plan.
        states: Returns the indices of the states whose gradients are summed for a stage.
        split: Whether backwards for the weights stand apart.
        times: What its actions are expected to take.
    """

    def __init__(
        self,
        *,
        comm: Communicator,
        assignments: Assignments,
        slot: Slot,
        lanes: PlanLanes,
        states: Callable[[StageSpec], Sequence[int]],
        split: bool,
        times: UnitTimes,
    ) -> None:
        self._comm = comm
        self._assignments = assignments
        self._slot = slot
        self._lanes = lanes
        self._states = states
        self._split = split
        self._times = times
        self._made: dict[int, _Step] = {}
        self._num_learnt = 0

    @property
    def waited_s(self) -> float:
        """How long rank 0 has waited, at the newest barrier, for an assignment."""
        return self._assignments.waited_s

    def begin(self, version: int) -> None:
        """Share the assignments of the first steps, and the costs by which they are made."""
        self._times.meet(self._comm)
        self._assignments.begin(version)

    def cells(self, step: int) -> Sequence[Cell] | None:
        """Return what this worker reads in a step."""
        assignment = self._assignments.of(step)
        if assignment is None:
            return None
        of_step = self._of(step, assignment)
        row = RowActions(of_step.schedule, of_step.row)
        forwards = (action for action in row.actions if action.op is Op.FORWARD)
        parts = (part for action in forwards for part in row.parts(row.stage(action), action.index))
        return list(dict.fromkeys(self._cell(of_step.cells, part) for part in parts))

    def lengths(self, step: int, cell: Cell) -> Sequence[LengthSums]:
        """Return what the assignment says of each of a cell's samples."""
        assignment = self._assignments.of(step)
        assert assignment is not None, "a cell is known by its assignment"
        unit, samples = assignment.units.index(cell.unit), list(cell.samples)
        tokens, squares = assignment.tokens[unit, samples].tolist(), assignment.squares[unit, samples].tolist()
        return [LengthSums(*sums) for sums in zip(tokens, squares, strict=True)]

    def cell_at(self, step: int, unit: str, position: int) -> Cell:
        """Return the cell that begins with a sample."""
        found = self.cells(step)
        assert found is not None, "a step begins only with its assignment"
        return next(cell for cell in found if cell.unit == unit and cell.samples[0] == position)

    def work(self, step: int, num_targets: int, batch: Callable[[Cell], Batch]) -> StepWork:
        """Return what a step is here."""
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step begins only with its assignment"
        self._assignments.start(step)
        of_step = self._of(step, assignment)
        cells = of_step.cells
        number = {unit: index for index, unit in enumerate(assignment.units)}
        tokens = assignment.tokens.tolist()

        def samples(part: CellPart) -> tuple[int, ...]:
            return cells.part(*part)

        return StepWork(
            step=step,
            schedule=of_step.schedule,
            row=of_step.row,
            num_targets=num_targets,
            position=lambda part: samples(part)[0],
            batch=lambda part: batch(self._cell(cells, part)),
            samples=samples,
            num_features=lambda source, target, sample: tokens[number[handed_over(source, target)]][sample],
        )

    def planned(self, step: int) -> PlannedRow:
        """Return what a step that begins is expected to take here."""
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step begins only with its assignment"
        found, correction = self._of(step, assignment), self._assignments.learning.correction
        return self._times.planned(found.schedule, found.pipelines, found.row, assignment, found.cells, correction)

    def num_microbatches(self, step: int) -> float:
        """Return what its stages' cells are expected to take, over what the plan has them take for one microbatch.

        Costs that are wrong about a unit are corrected, for workers do more or less of it. About lengths they are not:
        were all long samples one worker's, it could not be told whether it is slow or they are costlier.
        """
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step that was done had its assignment"
        found, learning = self._of(step, assignment), self._assignments.learning
        graph = found.schedule.graph
        own = np.flatnonzero(graph.tables.row_of == found.row).tolist()
        expected_ms = sum(
            learning.unit_factor(graph.stages[stage][0].unit) * float(found.cells_ms[stage].sum()) for stage in own
        )
        planned_ms = sum(stage.forward_ms + stage.backward_ms for stage in self._slot.stages)
        return expected_ms / planned_ms if planned_ms else 0.0

    def learn(self, step: int, taken_ms: Mapping[StageCell, float]) -> None:
        """Compare what cells took with what they were expected to take; the first steps are slow on every machine."""
        self._num_learnt += 1
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step that was done had its assignment"
        if self._num_learnt <= WARM_UP_STEPS:
            return
        found = self._of(step, assignment)
        for (stage, cell), took_ms in taken_ms.items():
            lane = found.schedule.graph.stages[stage][0]
            longest = assignment.lengths(lane.unit).longest[list(found.cells.samples[lane][cell])]
            self._assignments.learning.see(
                lane.unit, int(longest.max()), expected_ms=float(found.cells_ms[stage, cell]), taken_ms=took_ms
            )

    def bring(self, step: int) -> Tensor:
        """Return what travels in the barrier of a step."""
        return self._assignments.bring(step)

    def take(self, step: int, total: Tensor) -> None:
        """Take in what the barrier of a step gave."""
        self._assignments.take(step, total)
        self._made.pop(step, None)

    def close(self) -> None:
        """End what makes assignments."""
        self._assignments.close()

    def _of(self, step: int, assignment: StepAssignment) -> _Step:
        if step not in self._made:
            pipelines = assignment.joined(self._slot.pipeline_index)
            cells = assignment.cells(pipelines, self._lanes)
            schedule = self._lanes.schedule(pipelines, cells, self._states, split=self._split)
            row = self._lanes.ranks(pipelines).index(self._slot.rank)
            cells_ms = self._times.cells_ms(schedule.graph, assignment, cells)
            self._made[step] = _Step(pipelines, cells, schedule, row, cells_ms)
        return self._made[step]

    def _cell(self, cells: StepCells, part: CellPart) -> Cell:
        """Return what is read for a part; its lane has the number that it has in the pipeline."""
        return Cell(part.lane.unit, cells.part(*part), self._lanes.specs[part.lane, 0].lane.number)
