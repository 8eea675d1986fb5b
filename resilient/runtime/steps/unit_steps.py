"""The steps of pipelines of units: cells as assigned, in the order of a schedule made for them.

A sample may be in one pipeline with an encoder and in another with the language model. Pipelines that share samples so
in a step have one schedule in it, which the workers of all of them make alike.

The devices of sharded stages have samples of their own, and do the same in the same order: in a cell, which is a round
of theirs, those without samples take part in gathers and sums. Tensor-parallel ones have the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
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
from resilient.templates.common.arrays import Flags, Floats
from resilient.templates.plan import Slot
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.schedule import Op, Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.template import StageSpec

WARM_UP_STEPS = 2
"""Of a generation, that say nothing of how long later ones take."""


@dataclass(frozen=True)
class _Step:
    """What a step is for the pipelines that exchange features with a worker's, ``row`` being the worker's.

    ``devices``: the cells of each device of sharded stages; elsewhere all. ``cells``: the worker's of them. ``idle``:
    those that others have alone. ``cells_ms``: what each stage is expected to take for each cell, uncorrected; of
    devices that wait for each other, the one that takes longest. ``leads``: whether that is the worker's.
    """

    pipelines: tuple[int, ...]
    devices: Sequence[StepCells]
    cells: StepCells
    idle: frozenset[tuple[LaneName, int]]
    schedule: Schedule
    row: int
    cells_ms: Floats
    leads: Flags


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
        row, idle = RowActions(of_step.schedule, of_step.row), of_step.idle
        forwards = (each for each in row.actions if each.op is Op.FORWARD and (each.lane, each.index) not in idle)
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
            idle=of_step.idle,
        )

    def planned(self, step: int) -> PlannedRow:
        """Return what a step that begins is expected to take here."""
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step begins only with its assignment"
        found, correction = self._of(step, assignment), self._assignments.learning.correction
        planned = self._times.planned(
            found.schedule,
            found.pipelines,
            found.row,
            assignment,
            found.devices,
            self._slot.group_index,
            correction,
        )
        return msgspec.structs.replace(planned, device=self._slot.shard_index)

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
            learning.unit_factor(lane.unit, self._degree)
            * float(found.cells_ms[stage, list(found.cells.samples[lane])].sum())
            for stage in own
            for lane, _ in [graph.stages[stage]]
        )
        planned_ms = sum(stage.forward_ms + stage.backward_ms for stage in self._slot.stages)
        return expected_ms / planned_ms if planned_ms else 0.0

    def learn(self, step: int, taken_ms: Mapping[StageCell, float]) -> None:
        """Compare what cells took with what they were expected to take; the first steps are slow on every machine.

        Of devices that wait for each other, only the one that should take longest says anything of it.
        """
        self._num_learnt += 1
        assignment = self._assignments.of(step)
        assert assignment is not None, "a step that was done had its assignment"
        if self._num_learnt <= WARM_UP_STEPS:
            return
        found = self._of(step, assignment)
        for (stage, cell), took_ms in taken_ms.items():
            lane = found.schedule.graph.stages[stage][0]
            if not found.leads[stage, cell]:
                continue
            longest = assignment.lengths(lane.unit).longest[list(found.cells.samples[lane][cell])]
            expected_ms = float(found.cells_ms[stage, cell])
            self._assignments.learning.see(
                lane.unit, int(longest.max()), expected_ms=expected_ms, taken_ms=took_ms, degree=self._degree
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
            slot, lanes = self._slot, self._lanes
            pipelines = assignment.joined(slot.pipeline_index)
            everything = assignment.cells(pipelines, lanes)
            schedule = lanes.schedule(pipelines, everything, self._states, split=self._split)
            devices, idle = [everything], frozenset[tuple[LaneName, int]]()
            num_devices = lanes.round_size(slot.pipeline_index)
            if num_devices > 1:
                devices = [assignment.cells(pipelines, lanes, device) for device in range(num_devices)]
                own = devices[slot.group_index]
                rounds = ((lane, cell) for lane, cells in everything.samples.items() for cell in cells)
                idle = frozenset((lane, cell) for lane, cell in rounds if cell not in own.samples[lane])
                # all do the same in the same order; features are those of the worker's samples
                schedule = replace(schedule, graph=replace(schedule.graph, flows=own.flows))
            of_devices = [self._times.cells_ms(schedule.graph, assignment, each) for each in devices]
            longest_ms = np.max(of_devices, axis=0)
            self._made[step] = _Step(
                pipelines=pipelines,
                devices=devices,
                cells=devices[slot.group_index],
                idle=idle,
                schedule=schedule,
                row=lanes.rows(pipelines).index(lanes.rows((slot.pipeline_index,))[slot.row_index]),
                cells_ms=longest_ms,
                leads=of_devices[slot.group_index] >= longest_ms,
            )
        return self._made[step]

    @property
    def _degree(self) -> int:
        """How many devices share each of the worker's cells."""
        return self._slot.stages[0].tp_degree

    def _cell(self, cells: StepCells, part: CellPart) -> Cell:
        """Return what is read for a part; its lane has the number that it has in the pipeline."""
        return Cell(part.lane.unit, cells.part(*part), self._lanes.specs[part.lane, 0].lane.number)
