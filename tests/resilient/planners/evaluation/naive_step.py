"""One step simulated the slow way, task by task, from what the evaluation says of itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from resilient.planners.costs.cost_model import Curve, UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Assignment, Configuration, Encoders, Replica, Setting
from resilient.templates.inputs.cluster import Link


@dataclass(frozen=True)
class Task:
    """What a stage does with a microbatch: its forward, or the backward of samples that one turn returns."""

    kind: str
    unit: str
    pipeline: int
    stage: int
    microbatch: int
    turn: int


class NaiveStep:
    """All units have degree 1. Where all share devices they have equally many stages and as many replicas.

    Args:
        setting: The job.
        configuration: Its units.
        assignment: Of the samples.
        batch: They.
        replicas: Pipelines.
    """

    def __init__(
        self,
        setting: Setting,
        configuration: Configuration,
        assignment: Assignment,
        batch: SampleTable,
        replicas: Sequence[Replica],
    ) -> None:
        self.setting, self.configuration, self.replicas = setting, configuration, replicas
        self.places, self.batch = assignment.units, batch
        self.encoders = [unit.name for unit in setting.costs.units if unit.name != LLM]
        self.replicated = configuration.encoders is Encoders.REPLICATED
        self.in_turns = configuration.colocated and not self.replicated
        self.width = max(each.num_microbatches for each in replicas)
        self.depth = configuration.units[LLM].pp
        self.rows = [list(row) for row in self._rows()]
        self.messages = self._messages()
        position = {task: (row, at) for row, tasks in enumerate(self.rows) for at, task in enumerate(tasks)}

        @cache
        def end_ns(task: Task) -> int:
            row, at = position[task]
            starts = [end_ns(self.rows[row][at - 1])] if at else [0]
            starts += [end_ns(source) + round(delay * 1e6) for source, delay in self._inputs(task)]
            return max(starts) + round(self._length_ms(task) * 1e6)

        self.ends = {task: end_ns(task) for tasks in self.rows for task in tasks}

    @property
    def iteration_ms(self) -> float:
        """When the last task ends."""
        return max(self.ends.values(), default=0) / 1e6

    def spans(self) -> list[tuple[str, int, int, bool, int, int, int]]:
        """Return unit, pipeline, stage, whether backward, microbatch, start and end of all tasks, in order."""
        found: list[tuple[str, int, int, bool, int, int, int]] = []
        for task, end in self.ends.items():
            start = end - round(self._length_ms(task) * 1e6)
            found.append((task.unit, task.pipeline, task.stage, task.kind == "B", task.microbatch, start, end))
        return sorted(found)

    def peak_bytes(self) -> int:
        """Return the most that the devices of a row hold at any time, beside their layers."""
        peak = 0.0
        for tasks in self.rows:
            changes: list[tuple[int, float]] = []
            for task in tasks:
                start = self.ends[task] - round(self._length_ms(task) * 1e6)
                kept = self._kept_bytes(task)
                changes.append((start, kept) if task.kind == "F" else (self.ends[task], -kept))
            held = 0.0
            for _, change in sorted(changes):  # what is given up comes first
                held += change
                peak = max(peak, held)
        return round(peak)

    def _samples(self, unit: str, pipeline: int, microbatch: int) -> list[int]:
        place, tokens = self.places[unit], self.batch.units[unit].tokens
        inside = (place.replica == pipeline) & (place.microbatch == microbatch) & (tokens > 0)
        return np.flatnonzero(inside).tolist()

    def _turn(self, unit: str, sample: int) -> int:
        """In which microbatch the gradient of a sample comes back."""
        return int(self.places[unit if self.in_turns else LLM].microbatch[sample])

    def _forwards(self, unit: str, pipeline: int, stage: int) -> dict[int, list[Task]]:
        """Return the forwards of each turn."""
        found: dict[int, list[Task]] = defaultdict(list)
        earliest = self.width
        for microbatch in reversed(range(self.width)):
            members = self._samples(unit, pipeline, microbatch)
            if members:
                earliest = min(earliest, *(self._turn(unit, sample) for sample in members))
                turn = microbatch if unit == LLM or self.in_turns else earliest
                found[turn].insert(0, Task("F", unit, pipeline, stage, microbatch, -1))
        return found

    def _backwards(self, unit: str, pipeline: int, stage: int) -> dict[int, list[Task]]:
        found: dict[int, list[Task]] = defaultdict(list)
        if self._runs_backward(unit, stage):
            for microbatch in range(self.width):
                for turn in sorted({self._turn(unit, sample) for sample in self._samples(unit, pipeline, microbatch)}):
                    turn = microbatch if unit == LLM else turn
                    found[turn].append(Task("B", unit, pipeline, stage, microbatch, turn))
        return found

    def _rows(self) -> Iterator[list[Task]]:
        """Return the tasks of each row in order."""
        for pipeline in range(len(self.replicas)):
            for stage in range(self.depth):
                with_encoders = self.encoders if self.replicated else []
                row = self._interleaved([*with_encoders, LLM], pipeline, stage)
                if self.in_turns:
                    groups = [[name] for name in self.encoders]
                    groups = [self.encoders] if self.configuration.encoders is Encoders.COLOCATED else groups
                    for group in reversed(groups):
                        both = self._interleaved(group, pipeline, stage, apart=True)
                        before = [task for task in both if task.kind == "F"]
                        row = [*before, *row, *(task for task in both if task.kind == "B")]
                yield row
            if not self.replicated and not self.in_turns:
                together = self.configuration.encoders is Encoders.COLOCATED
                for group in [self.encoders] if together else [[name] for name in self.encoders]:
                    for stage in range(max((self.configuration.units[name].pp for name in group), default=0)):
                        yield self._interleaved(group, pipeline, stage)

    def _interleaved(self, units: Sequence[str], pipeline: int, stage: int, *, apart: bool = False) -> list[Task]:
        """Return the tasks of units on one row: in each turn forwards, and the backwards that are due."""
        units = [name for name in units if self.replicated or stage < self.configuration.units[name].pp]
        forwards = {name: self._forwards(name, pipeline, stage) for name in units}
        backwards = {name: self._backwards(name, pipeline, stage) for name in units}
        row: list[Task] = []
        for turn in range(4 * self.width + 4 * self.depth + 8):
            for kind, order in (("F", units), ("B", units[::-1])):
                due: list[Task] = []
                for name in order:
                    behind = (self.depth if self.replicated else self.configuration.units[name].pp) - 1 - stage
                    behind += 0 if name == LLM or self.replicated else self.depth
                    behind = 2 * self.width if apart else behind
                    due += forwards[name][turn] if kind == "F" else backwards[name][turn - behind]
                # Encoders follow each other in each microbatch, and the language model is next to its neighbours.
                language = [task for task in due if task.unit == LLM]
                others = sorted((task for task in due if task.unit != LLM), key=lambda task: task.microbatch)
                row += [*others, *language] if kind == "F" else [*language, *others]
        return row

    def _messages(self) -> dict[tuple[str, int, int, int, int], float]:
        """Return by encoder, its pipeline and microbatch, and the language model's two, the tokens handed over."""
        found: dict[tuple[str, int, int, int, int], float] = defaultdict(float)
        for name in self.encoders:
            for sample, tokens in enumerate(self.batch.units[name].tokens.tolist()):
                if tokens and self.batch.units[LLM].tokens[sample]:
                    source, target = self.places[name], self.places[LLM]
                    at = [int(each[sample]) for place in (source, target) for each in (place.replica, place.microbatch)]
                    found[name, at[0], at[1], at[2], at[3]] += tokens
        return found

    def _handover_ms(self, key: tuple[str, int, int, int, int]) -> float:
        name, source, _, target, _ = key
        if self.replicated and source == target:
            return 0.0
        cluster = self.setting.cluster
        sizes = [self.configuration.units[unit].pp for unit in (name, LLM)]
        devices = max(sizes) if self.configuration.colocated else sum(sizes)
        inside = source == target and devices <= cluster.devices_per_node
        link = cluster.intra_node if inside or self.setting.num_nodes == 1 else cluster.inter_node
        return link.transfer_ms(self.messages[key] * self._costs(name).output_bytes)

    def _inputs(self, task: Task) -> Iterator[tuple[Task, float]]:
        """Return the tasks that one waits for, and how long their messages take."""
        stages = self.configuration.units[task.unit].pp
        cell = (task.unit, task.pipeline, task.microbatch)
        if not (self.replicated and task.unit != LLM):
            before = task.stage + (-1 if task.kind == "F" else 1)
            if 0 <= before < stages:
                yield Task(task.kind, task.unit, task.pipeline, before, task.microbatch, task.turn), self._pass_ms(task)
        first = task.unit == LLM and (self.replicated or task.stage == 0) and task.kind == "F"
        last = task.unit != LLM and (self.replicated or task.stage == stages - 1) and task.kind == "B"
        for key in self.messages if first or last else ():
            at = task.stage if self.replicated else None
            if first and key[3:] == cell[1:]:
                stage = self.configuration.units[key[0]].pp - 1 if at is None else at
                yield Task("F", *key[:2], stage, key[2], -1), self._handover_ms(key)
            if last and key[:3] == cell and (self.in_turns or key[4] == task.turn):
                yield Task("B", LLM, key[3], at or 0, key[4], key[4]), self._handover_ms(key)

    def _pass_ms(self, task: Task) -> float:
        cluster, stages = self.setting.cluster, self.configuration.units[task.unit].pp
        link: Link = cluster.intra_node if stages <= cluster.devices_per_node else cluster.inter_node
        tokens = float(self.batch.units[task.unit].tokens[self._samples(*self._cell(task))].sum())
        return link.transfer_ms(tokens * self._costs(task.unit).boundary_bytes) * self._part(task)

    def _cell(self, task: Task) -> tuple[str, int, int]:
        return task.unit, task.pipeline, task.microbatch

    def _part(self, task: Task) -> float:
        """Return what part of its microbatch a task is."""
        if task.kind == "F" or task.unit == LLM:
            return 1.0
        members = self._samples(*self._cell(task))
        tokens = self.batch.units[task.unit].tokens
        own = [sample for sample in members if self._turn(task.unit, sample) == task.turn]
        return float(tokens[own].sum() / tokens[members].sum())

    def _costs(self, unit: str) -> UnitCosts:
        return self.setting.costs.by_name[unit]

    def _layers(self, unit: str, stage: int) -> range:
        counts = self.configuration.units[unit].stage_layers
        stage = 0 if self.replicated and unit != LLM else stage
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def _share(self, unit: str) -> float:
        if self.configuration.colocated or self.replicated:
            return 1.0
        return self.configuration.units[unit].dp / self.configuration.units[LLM].dp

    def _runs_backward(self, unit: str, stage: int) -> bool:
        layers = [self._costs(unit).layers[layer] for layer in self._layers(unit, stage)]
        return any(layer.trainable or layer.input_gradient for layer in layers)

    def _length_ms(self, task: Task) -> float:
        layers = [self._costs(task.unit).layers[layer] for layer in self._layers(task.unit, task.stage)]
        curves = [layer.curves[0].forward if task.kind == "F" else layer.backward(0) for layer in layers]
        curve, lengths = sum(curves, Curve()), self.batch.units[task.unit]
        members, share = self._samples(*self._cell(task)), self._share(task.unit)
        work = curve.attention * lengths.squares[members].sum() + curve.linear * lengths.tokens[members].sum()
        whole = float(work) / share + curve.fixed / min(share, 1.0)
        return whole / self.replicas[task.pipeline].speed * self._part(task)

    def _kept_bytes(self, task: Task) -> float:
        layers = [self._costs(task.unit).layers[layer] for layer in self._layers(task.unit, task.stage)]
        layers = [layer for layer in layers if layer.trainable or layer.input_gradient]
        tokens = self.batch.units[task.unit].tokens[self._samples(*self._cell(task))].sum()
        per_token = sum(layer.curves[0].activation_bytes for layer in layers)
        return float(tokens) / self._share(task.unit) * per_token * self._part(task)
