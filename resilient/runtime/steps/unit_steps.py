"""The steps of a pipeline of units: cells as assigned, in the order of a schedule made for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from resilient.data.reader import Cell
from resilient.models.layer import Batch
from resilient.observability.step_trace import PlannedRow
from resilient.pipeline.row_actions import CellPart, RowActions
from resilient.pipeline.step_work import StepWork
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import Assignments
from resilient.runtime.steps.unit_graph import step_schedule
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.templates.plan import Slot
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.template import PipelineTemplate


class UnitSteps:
    """The steps of one worker's pipeline.

    Args:
        assignments: Of the generation.
        slot: This worker's place.
        template: Of its pipeline.
        feeds: Which unit's features go to which later one.
        backwards: What each stage differentiates.
        states: Per stage, the indices of the states whose gradients are summed.
        split: Whether backwards for the weights stand apart.
        times: What its actions are expected to take.
    """

    def __init__(
        self,
        *,
        assignments: Assignments,
        slot: Slot,
        template: PipelineTemplate,
        feeds: Sequence[tuple[str, str]],
        backwards: Sequence[Backward],
        states: Sequence[Sequence[int]],
        split: bool,
        times: UnitTimes,
    ) -> None:
        self._assignments = assignments
        self._slot = slot
        self._template = template
        self._feeds = feeds
        self._backwards = backwards
        self._states = states
        self._split = split
        self._times = times
        self._made: dict[int, tuple[StepCells, Schedule]] = {}

    @property
    def waited_s(self) -> float:
        """How long rank 0 has waited, at the newest barrier, for an assignment."""
        return self._assignments.waited_s

    def begin(self, version: int) -> None:
        """Share the assignments of the first steps."""
        self._assignments.begin(version)

    def cells(self, step: int) -> Sequence[Cell] | None:
        """Return what this worker reads in a step."""
        assignment = self._assignments.of(step)
        if assignment is None:
            return None
        cells, schedule = self._of(step, assignment)
        row = RowActions(schedule, self._slot.row_index)
        forwards = (action for action in row.actions if action.op is Op.FORWARD)
        parts = (part for action in forwards for part in row.parts(row.stage(action), action.index))
        return list(dict.fromkeys(_cell(cells, part) for part in parts))

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
        cells, schedule = self._of(step, assignment)
        number = {unit: index for index, unit in enumerate(assignment.units)}
        tokens = assignment.tokens.tolist()

        def samples(part: CellPart) -> tuple[int, ...]:
            return cells.part(*part)

        return StepWork(
            step=step,
            schedule=schedule,
            num_targets=num_targets,
            position=lambda part: samples(part)[0],
            batch=lambda part: batch(_cell(cells, part)),
            samples=samples,
            num_features=lambda unit, sample: tokens[number[unit]][sample],
        )

    def planned(self, step: int) -> PlannedRow:
        """Return what a step that begins is expected to take here."""
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step begins only with its assignment"
        cells, schedule = self._of(step, assignment)
        return self._times.planned(schedule, self._slot.row_index, assignment, cells)

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

    def _of(self, step: int, assignment: StepAssignment) -> tuple[StepCells, Schedule]:
        if step not in self._made:
            cells = assignment.cells(self._slot.pipeline_index, self._template.lanes, self._feeds)
            schedule = step_schedule(self._template, cells, self._backwards, self._states, split=self._split)
            self._made[step] = cells, schedule
        return self._made[step]


def _cell(cells: StepCells, part: CellPart) -> Cell:
    return Cell(part.lane.unit, cells.part(*part), part.lane.number)
