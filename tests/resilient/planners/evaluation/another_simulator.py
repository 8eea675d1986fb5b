"""Another simulation of a planner's answer on one node, written from what planners are told, to judge the judge by.

It takes nothing from the judge but the order in which each row of devices computes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Assignment, Configuration, Encoders, Setting
from resilient.templates.schedules.schedule import Op, Schedule


class Cell(NamedTuple):
    unit: str
    lane: int
    number: int


class Task(NamedTuple):
    """One row's work on one cell: the forwards of all of its parts, or the backward of one."""

    cell: Cell
    stage: int
    op: Op
    part: int = 0


def tasks_of(schedule: Schedule) -> list[list[Task]]:
    """Return what each row computes, in its order; frozen stages pass gradients on in backwards, too."""
    return [
        [
            Task(Cell(each.lane.unit, each.lane.number, each.index), each.stage, min(each.op, Op.BACKWARD), each.part)
            for each in row
            if each.op.computes
        ]
        for row in schedule.rows
    ]


class AnotherSimulator:
    """A step of whole replicas, in which nothing is divided but the optimizer.

    Args:
        setting: The job, on one node.
        configuration: Without context parallelism, replicated encoders and divided copies.
        assignment: Where samples go.
        batch: They.
    """

    def __init__(
        self, setting: Setting, configuration: Configuration, assignment: Assignment, batch: SampleTable
    ) -> None:
        self.setting, self.configuration, self.batch = setting, configuration, batch
        self.cells: dict[Cell, list[int]] = defaultdict(list)
        for unit in configuration.units:
            self._deal(unit, assignment)
        self.targets: dict[Cell, list[tuple[Cell, list[int]]]] = {}
        self.parts: dict[Cell, list[list[int]]] = {}
        for cell, samples in self.cells.items():
            place = {each: to for to in self.cells if to.unit == self._then(cell.unit) for each in self.cells[to]}
            users = sorted({place[each] for each in samples if each in place})
            self.targets[cell] = [(to, [each for each in samples if place.get(each) == to]) for to in users]
            if len(users) < 2 or self._at_once(cell.unit):
                self.parts[cell] = [samples]
                continue
            self.parts[cell] = [[each for each in samples if place.get(each, users[0]) == to] for to in users]

    def _then(self, unit: str) -> str | None:
        """Return the unit that uses what one makes."""
        names = list(self.configuration.units)
        return LLM if names.index(unit) < names.index(LLM) else names[-1] if unit == LLM != names[-1] else None

    def _at_once(self, unit: str) -> bool:
        """Return whether cells have no parts: nothing is differentiated, or encoders wait for all gradients anyway."""
        first = self.configuration.colocated and unit != LLM
        return first or not self._trained(unit, self.configuration.units[unit].pp - 1)

    def _deal(self, unit: str, assignment: Assignment) -> None:
        """Deal each microbatch over the lanes of its pipeline: longest first, most to the one that had least so far."""
        spread, pipelines = self.configuration.units[unit], self.configuration.units[LLM].dp
        place, tokens = assignment.units[unit], self.batch.units[unit].tokens
        work = self.setting.costs.by_name[unit].work(spread.tp).of(self.batch.units[unit])
        firsts = [number * spread.dp // pipelines for number in range(pipelines + 1)]
        so_far = defaultdict[int, float](float)
        for microbatch in range(int(place.microbatch.max(initial=0)) + 1):
            for pipeline, first in enumerate(firsts[:-1]):
                lanes = range(first, max(firsts[pipeline + 1], first + 1))
                shared = [each for each in range(pipelines) if firsts[each] == first]
                number = microbatch * len(shared) + shared.index(pipeline)
                bins: list[list[int]] = [[] for _ in lanes]
                here = (place.replica == pipeline) & (place.microbatch == microbatch) & (tokens > 0)
                for sample in sorted(here.nonzero()[0].tolist(), key=lambda each: -work[each]):
                    min(bins, key=lambda each: work[each].sum()).append(sample)
                bins.sort(key=lambda each: -work[each].sum())
                for lane, samples in zip(sorted(lanes, key=lambda each: so_far[each]), bins, strict=True):
                    so_far[lane] += float(work[samples].sum())
                    if samples:
                        self.cells[Cell(unit, lane, number)] = sorted(samples)

    def expected(self) -> Counter[Task]:
        """Return what has to be computed, once each."""
        found = Counter[Task]()
        for cell, parts in self.parts.items():
            for stage in range(self.configuration.units[cell.unit].pp):
                found[Task(cell, stage, Op.FORWARD)] += 1
                if self._trained(cell.unit, stage):
                    found.update(Task(cell, stage, Op.BACKWARD, part) for part in range(len(parts)))
        return found

    def _layers(self, unit: str, stage: int) -> range:
        counts = self.configuration.units[unit].stage_layers
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def _trained(self, unit: str, stage: int) -> bool:
        layers = self.setting.costs.by_name[unit].layers
        return any(layers[each].has_backward for each in self._layers(unit, stage))

    def _tokens(self, unit: str, samples: Sequence[int]) -> int:
        return int(self.batch.units[unit].tokens[samples].sum())

    def _calls(self, task: Task) -> list[list[int]]:
        """Return the samples of each call of a task."""
        return self.parts[task.cell] if task.op is Op.FORWARD else [self.parts[task.cell][task.part]]

    def _tokens_of(self, task: Task) -> int:
        """Return the tokens that a task is about."""
        return sum(self._tokens(task.cell.unit, samples) for samples in self._calls(task))

    def _again(self, unit: str, stage: int) -> tuple[list[int], list[int]]:
        """Return the layers of a stage that have a backward: those that run their forward in it again, and others."""
        layers = self.setting.costs.by_name[unit].layers
        passed = [each for each in self._layers(unit, stage) if layers[each].has_backward]
        number = math.ceil(self.configuration.units[unit].recompute * len(passed) - 1e-9)
        return passed[:number], passed[number:]

    def taken_ms(self, task: Task) -> float:
        """Return how long a row computes."""
        unit = task.cell.unit
        costs, tp = self.setting.costs.by_name[unit], self.configuration.units[unit].tp
        degree, squares = costs.index(tp, 1), self.batch.units[unit].squares
        curves = list[Curve]()
        for number in self._layers(unit, task.stage):
            layer = costs.layers[number]
            of, again = layer.curves[degree], number in self._again(unit, task.stage)[0]
            if task.op is Op.FORWARD or again:
                curves.append(of.forward)
            if task.op is not Op.FORWARD:
                curves += [of.backward_input] * layer.input_gradient + [of.backward_weight] * layer.trainable
        return sum(
            each.call_ms(self._tokens(unit, samples), float(squares[samples].sum()))
            for samples in self._calls(task)
            for each in curves
        )

    def kept_bytes(self, task: Task) -> float:
        """Return what a forward keeps, or a backward frees."""
        unit = task.cell.unit
        costs, tp = self.setting.costs.by_name[unit], self.configuration.units[unit].tp
        again, others = (
            [costs.layers[each].curves[costs.index(tp, 1)].activation_bytes for each in some]
            for some in self._again(unit, task.stage)
        )
        of_token = len(again) * costs.boundary_bytes + max(again, default=0.0) + sum(others)
        return self._tokens_of(task) * of_token

    def messages(self, task: Task, last: bool) -> list[tuple[Task, float]]:
        """Return the tasks that wait for one, and the bytes that each device sends them.

        Args:
            task: It.
            last: Whether it is the last of its stage's backwards of its cell, with which gradients of all that the
                cell was given are whole.
        """
        cell, stage, units = task.cell, task.stage, self.configuration.units
        costs, spread = self.setting.costs.by_name[cell.unit], units[cell.unit]
        passed = self._tokens_of(task) * costs.boundary_bytes / spread.tp
        found: list[tuple[Task, float]] = []
        if task.op is not Op.FORWARD:
            if stage and self._trained(cell.unit, stage - 1):
                found.append((task._replace(stage=stage - 1), passed))
            for source, part, num_bytes in self._features(cell) if last and not stage else []:
                end = units[source.unit].pp - 1
                if self._trained(source.unit, end):
                    found.append((Task(source, end, Op.BACKWARD, part), num_bytes))
        elif stage < spread.pp - 1:
            found.append((task._replace(stage=stage + 1), passed))
        else:
            found = [(Task(to, 0, Op.FORWARD), self._feature_bytes(cell, to, own)) for to, own in self.targets[cell]]
            if not found and self._trained(cell.unit, stage):
                found.append((task._replace(op=Op.BACKWARD), 0.0))
        return found

    def _features(self, target: Cell) -> list[tuple[Cell, int, float]]:
        order = list(self.configuration.units)
        return [
            (cell, part if len(self.parts[cell]) > 1 else 0, self._feature_bytes(cell, to, samples))
            for cell in sorted(self.parts, key=lambda each: (order.index(each.unit), each))
            for part, (to, samples) in enumerate(self.targets[cell])
            if to == target
        ]

    def _feature_bytes(self, source: Cell, target: Cell, samples: Sequence[int]) -> float:
        unit = target.unit if source.unit == LLM else source.unit
        sizes = [self.configuration.units[each].tp for each in (unit, LLM)]
        return self._tokens(unit, samples) * self.setting.costs.by_name[unit].output_bytes / min(sizes)

    def step_ms(self, rows: Sequence[Sequence[Task]]) -> float:
        """Return when the last task ends: rows keep their order, and messages to another row follow each other."""
        row_of = {task: row for row, tasks in enumerate(rows) for task in tasks}
        waits, link = Counter[Task](), self.setting.cluster.intra_node
        parts_left = Counter((task.cell, task.stage) for task in row_of if task.op is Op.BACKWARD)
        for task in row_of:
            waits.update(to for to, _ in self.messages(task, last=task.part == 0))
        ready, free = defaultdict[Task, float](float), defaultdict[tuple[int, int], float](float)
        clocks, left = [0.0] * len(rows), [list(tasks) for tasks in rows]
        while any(left):
            row = next(each for each, tasks in enumerate(left) if tasks and not waits[tasks[0]])
            task = left[row].pop(0)
            clocks[row] = max(clocks[row], ready[task]) + self.taken_ms(task)
            parts_left[task.cell, task.stage] -= task.op is Op.BACKWARD
            for to, num_bytes in self.messages(task, last=not parts_left[task.cell, task.stage]):
                arrival, way = clocks[row], (row, row_of[to])
                if row != row_of[to]:
                    free[way] = max(arrival, free[way]) + link.transfer_ms(num_bytes) - link.latency_ms
                    arrival = free[way] + link.latency_ms
                ready[to] = max(ready[to], arrival)
                waits[to] -= 1
        return max(clocks, default=0.0)

    def peak_bytes(self, rows: Sequence[Sequence[Task]]) -> float:
        """Return the most that a device holds."""
        units, held = self.configuration.units, defaultdict[tuple[str, int], float](float)
        for tasks in rows:
            now = 0.0
            for task in tasks:
                now += self.kept_bytes(task) * (1 if task.op is Op.FORWARD else -1)
                key = self._host(task.cell.unit), task.stage
                held[key] = max(held[key], now)
        states = defaultdict[tuple[str, int], float](float)
        for unit, spread in units.items():
            for stage in range(spread.pp):
                states[self._host(unit), stage] += self._state_bytes(unit, stage)
        return max(states[key] + held[key] for key in states)

    def _host(self, unit: str) -> str:
        """Return the name of those that share a unit's devices."""
        if self.configuration.colocated:
            return "all"
        return "encoders" if unit != LLM and self.configuration.encoders is Encoders.COLOCATED else unit

    def _state_bytes(self, unit: str, stage: int) -> float:
        spread, layers = self.configuration.units[unit], self.setting.costs.by_name[unit].layers
        own = [layers[each] for each in self._layers(unit, stage)]
        kept = sum(each.parameter_bytes + each.gradient_bytes for each in own)
        return (kept + sum(each.optimizer_bytes for each in own) / spread.dp) / spread.tp
