"""Simulates one step of a planner's answer: the judge that all planners are compared by.

A replica of the language model and its share of each encoder are a pipeline. Its stages run 1F1B: a stage with d stages
after it is d microbatches ahead. A microbatch of the language model waits for all encoder microbatches that its samples
were in. An encoder's backward waits for the language model's microbatches that its samples went to; samples that went
to different ones are differentiated apart (Entrain's split backward). Where encoders are colocated, their forwards all
come before the language model's on the same devices, their backwards all after.

Places are indexed by the replicas that ``assign`` was given, in every unit. With another number of encoder replicas
each pipeline has a share of them: too few are slower, as if each worked for several pipelines at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.planners.balance import loads
from resilient.planners.costs import Floats
from resilient.planners.planner import LLM, Assignment, Configuration, Encoders, Replica, Setting
from resilient.planners.samples import Ints, SampleTable
from resilient.planners.stage_work import gathers_ms, gradient_sum_ms, state_bytes
from resilient.planners.step_unit import StepUnit
from resilient.planners.timeline import Tasks, end_times
from resilient.templates.cluster import Link


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """What is computed when; arrays ``[num_tasks]``.

    Args:
        lane: A stage of one unit in one pipeline, index of ``Result.lanes``.
        backward: Whether it is one.
        microbatch: Of its unit and pipeline.
        start_ns: From the step's start.
        end_ns: Likewise.
    """

    lane: Ints
    backward: npt.NDArray[np.bool_]
    microbatch: Ints
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One stage of one unit in one pipeline."""

    unit: str
    pipeline: int
    stage: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What a step takes.

    Args:
        iteration_ms: With the sums of gradients.
        sum_ms: Part of it after the last backward, in which gradients are summed over replicas.
        bubble: Part of its devices' time in which nothing is computed.
        std_ms: By unit, standard deviation over microbatches of their time in all stages, at full speed.
        peak_bytes: Of the device that needs most memory.
        lanes: All stages of all pipelines.
        spans: What they do.
    """

    iteration_ms: float
    sum_ms: float
    bubble: float
    std_ms: Mapping[str, float]
    peak_bytes: int
    lanes: tuple[Lane, ...]
    spans: Spans


def evaluate(
    setting: Setting,
    configuration: Configuration,
    assignment: Assignment,
    batch: SampleTable,
    replicas: Sequence[Replica],
) -> Result:
    """Simulate one step.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        assignment: Where the samples go.
        batch: The samples.
        replicas: What ``assign`` was given.

    Raises:
        ValueError: A place is not within the replicas and their microbatches, a unit's layers are not spread, or
            encoders share stages among themselves, which is not simulated.
    """
    several = len(setting.costs.units) > 2
    if configuration.encoders is Encoders.REPLICATED or (configuration.encoders is Encoders.COLOCATED and several):
        raise ValueError(
            f"encoders must be {Encoders.PARALLEL.value} to be simulated, got {configuration.encoders.value}; "
            f"compare by predicted_ms, or give them stages of their own"
        )
    units = [StepUnit.of(configuration, unit, assignment, batch, replicas) for unit in setting.costs.units]
    return _Step(setting, configuration, units, batch, replicas).result()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Backwards:
    """The backwards of a unit: of a whole cell, or of its samples that went to one turn of the language model."""

    cell: Ints
    turn: Ints
    part: Floats  # of the cell's time and activations
    of_sample: Ints


class _Step:
    """Builds the tasks of a step and reads the result off their times."""

    def __init__(
        self,
        setting: Setting,
        configuration: Configuration,
        units: Sequence[StepUnit],
        batch: SampleTable,
        replicas: Sequence[Replica],
    ) -> None:
        self.setting, self.configuration, self.units, self.batch = setting, configuration, units, batch
        self.num_pipelines = len(replicas)
        self.llm = next(unit for unit in units if unit.costs.name == LLM)
        self.first_lane = np.cumsum([0, *(self.num_pipelines * unit.spread.pp for unit in units)])
        self.columns: list[Ints] = []  # of tasks: lane, turn, backward, microbatch, length
        self.kept: list[Floats] = []
        self.filled: list[Floats] = []
        self.waits: list[Ints] = [np.zeros((3, 0), np.int64)]  # source, target, delay
        self.count = 0

    def result(self) -> Result:
        ids = {unit.costs.name: self._add(number, unit) for number, unit in enumerate(self.units)}
        for unit in self.units:
            if unit is not self.llm:
                self._join(unit, *ids[unit.costs.name], *ids[LLM])
        lane, turn, backward, microbatch, length = np.concatenate(self.columns, axis=1)
        order = np.lexsort((microbatch, backward, turn, lane))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        if self.configuration.colocated:
            self._take_turns(lane[order], backward[order], order)
        source, target, delay = np.concatenate(self.waits, axis=1)
        lane, length = lane[order], length[order]
        ends = end_times(
            Tasks(row=lane, length_ns=length, sources=position[source], targets=position[target], delays_ns=delay)
        )
        step_ns = self._with_sums(lane, ends - length, ends)
        return Result(
            iteration_ms=step_ns / 1e6,
            sum_ms=(step_ns - int(ends.max(initial=0))) / 1e6,
            bubble=self._bubble(lane, length * np.concatenate(self.filled)[order], step_ns),
            std_ms={unit.costs.name: unit.std_ms for unit in self.units},
            peak_bytes=self._peak_bytes(lane, np.concatenate(self.kept)[order]),
            lanes=tuple(
                Lane(unit=unit.costs.name, pipeline=pipeline, stage=stage)
                for unit in self.units
                for pipeline in range(self.num_pipelines)
                for stage in range(unit.spread.pp)
            ),
            spans=Spans(
                lane=lane,
                backward=backward[order] > 0,
                microbatch=microbatch[order],
                start_ns=ends - length,
                end_ns=ends,
            ),
        )

    def _add(self, number: int, unit: StepUnit) -> tuple[Ints, Ints, _Backwards]:
        """Add a unit's tasks; return those of forwards and backwards, ``[stage, cell]``, -1 where there is none."""
        stages, cells = np.arange(unit.spread.pp)[:, None], np.flatnonzero(unit.tokens > 0)
        after = unit.spread.pp - 1 - stages + (0 if unit is self.llm else self.llm.spread.pp)
        backwards = self._backwards(unit)
        if unit is self.llm or self.configuration.colocated:
            turns = cells % unit.width
        else:
            first = np.full(len(unit.tokens), unit.width)
            np.minimum.at(first, backwards.cell, backwards.turn)
            by_pipeline = first.reshape(-1, unit.width)
            # Encoders run in order: what comes before an early one is early, too.
            turns = np.minimum.accumulate(by_pipeline[:, ::-1], axis=1)[:, ::-1].ravel()[cells]
        one, other = unit.work.forward_ms / unit.speeds, unit.work.backward_ms / unit.speeds
        if self.configuration.sharded:
            gather, scatter = gathers_ms(unit.costs, unit.spread, self.setting.cluster)
            one, other = np.maximum(one, gather[:, None]), np.maximum(other, scatter[:, None])
        forward_ids = np.full(one.shape, -1)
        forward_ids[:, cells] = self._tasks(number, cells, turns + 0 * stages, 0, one[:, cells])
        trained = np.flatnonzero(unit.trained)
        backward_ids = np.full((unit.spread.pp, len(backwards.cell)), -1)
        if self.configuration.colocated and unit is not self.llm:
            late = backwards.turn + 2 * unit.width + 0 * stages
        else:
            late = backwards.turn + after
        lengths = other[:, backwards.cell] * backwards.part
        backward_ids[trained] = self._tasks(number, backwards.cell, late[trained], 1, lengths[trained], trained)
        for stage in range(unit.spread.pp):
            self.kept.append(unit.work.kept_bytes[stage, cells])
            self.filled.append(unit.work.filled[stage, cells])
        for stage in trained:
            self.kept.append(-unit.work.kept_bytes[stage, backwards.cell] * backwards.part)
            self.filled.append(unit.work.filled[stage, backwards.cell])
        link = self._link(unit)
        delay = np.array([link.transfer_ms(each * unit.costs.boundary_bytes / unit.spread.tp) for each in unit.tokens])
        for stage in range(1, unit.spread.pp):
            self._wait(forward_ids[stage - 1, cells], forward_ids[stage, cells], delay[cells])
            if unit.trained[stage - 1]:
                self._wait(backward_ids[stage], backward_ids[stage - 1], delay[backwards.cell] * backwards.part)
        return forward_ids, backward_ids, backwards

    def _backwards(self, unit: StepUnit) -> _Backwards:
        """Return a unit's backwards, with the turn in which the language model returns their gradients."""
        consumer = self.llm.cell % unit.width
        if unit is self.llm or self.configuration.colocated:
            consumer = unit.cell % unit.width
        keys, of_sample = np.unique(unit.cell * unit.width + consumer, return_inverse=True)
        tokens = loads(unit.lengths.tokens, of_sample, len(keys))
        used = tokens > 0
        renumbered = np.where(used, np.cumsum(used) - 1, -1)
        cell = keys[used] // unit.width
        return _Backwards(
            cell=cell,
            turn=keys[used] % unit.width,
            part=tokens[used] / unit.tokens[cell],
            of_sample=renumbered[of_sample],
        )

    def _tasks(
        self, number: int, cells: Ints, turns: Ints, backward: int, lengths_ms: Floats, stages: Ints | None = None
    ) -> Ints:
        """Add tasks, stage by stage. [len(stages), len(cells)]"""
        unit = self.units[number]
        stages = np.arange(unit.spread.pp) if stages is None else stages
        lanes = self.first_lane[number] + (cells // unit.width) * unit.spread.pp + stages[:, None]
        shape = (len(stages), len(cells))
        columns = (lanes, turns, np.full(shape, backward), cells % unit.width, np.rint(lengths_ms * 1e6))
        self.columns.append(np.stack([np.broadcast_to(each, shape).ravel() for each in columns]).astype(np.int64))
        first = self.count
        self.count += shape[0] * shape[1]
        return np.arange(first, self.count).reshape(shape)

    def _join(
        self, unit: StepUnit, forward: Ints, backward: Ints, parts: _Backwards, to: Ints, back: Ints, llm: _Backwards
    ) -> None:
        """Have the language model wait for an encoder's outputs, and the encoder for their gradients."""
        uses = (unit.lengths.tokens > 0) & (self.llm.lengths.tokens > 0)
        if not uses.any():
            return
        link = self._link(unit)
        pairs = np.stack([unit.cell, self.llm.cell, parts.of_sample, llm.of_sample])[:, uses]
        (source, target, part, from_llm), sample = np.unique(pairs, axis=1, return_inverse=True)
        tokens = loads(unit.lengths.tokens[uses], sample.ravel(), len(source))
        delay = np.array([link.transfer_ms(each * unit.costs.output_bytes) for each in tokens])
        self._wait(forward[-1, source], to[0, target], delay)
        if unit.trained[-1]:
            self._wait(back[0, from_llm], backward[-1, part], delay)

    def _wait(self, sources: Ints, targets: Ints, delays_ms: Floats) -> None:
        self.waits.append(np.stack([sources, targets, np.rint(delays_ms * 1e6).astype(np.int64)]))

    def _take_turns(self, lane: Ints, backward: Ints, order: Ints) -> None:
        """Let units that share devices follow each other: encoders, language model, encoders' backwards in reverse."""
        last, first = np.full((2, 2, self.first_lane[-1]), -1)
        _, at = np.unique(lane * 2 + backward, return_index=True)  # tasks are in order of both
        ends = np.append(at[1:], len(lane)) - 1
        first[backward[at], lane[at]], last[backward[at], lane[at]] = order[at], order[ends]
        whole = slice(self.first_lane[-2], self.first_lane[-1])
        last[0, whole], first[1, whole] = np.where(last[1, whole] >= 0, last[1, whole], last[0, whole]), -1
        on_device = [self._lane_of_device(number) for number in range(len(self.units))]
        for number, lanes in enumerate(on_device):
            for later in on_device[number + 1 :]:
                pairs = np.unique(np.stack([lanes, later]), axis=1)
                pairs = pairs[:, (pairs >= 0).all(axis=0)]
                after = np.where(last[1, pairs[1]] >= 0, last[1, pairs[1]], last[0, pairs[1]])
                for sources, targets in ((last[0, pairs[0]], first[0, pairs[1]]), (after, first[1, pairs[0]])):
                    both = (sources >= 0) & (targets >= 0)
                    self._wait(sources[both], targets[both], np.zeros(int(both.sum())))

    def _lane_of_device(self, number: int) -> Ints:
        """Return the lane of a unit that each device is in, -1 for none. Devices are numbered pipeline by pipeline."""
        most = max(self.num_pipelines * each.spread.num_devices // each.spread.dp for each in self.units)
        each = self.units[number].spread
        lanes = self.first_lane[number] + np.arange(most) // (each.tp * each.cp)
        return np.where(lanes < self.first_lane[number + 1], lanes, -1)

    def _link(self, unit: StepUnit) -> Link:
        cluster, spread = self.setting.cluster, unit.spread
        inside = spread.pp * spread.tp * spread.cp <= cluster.devices_per_node
        return cluster.intra_node if inside else cluster.inter_node

    def _with_sums(self, lane: Ints, starts: Ints, ends: Ints) -> int:
        """Return when the step ends: after every stage's gradients are summed over its replicas.

        The sum of a layer's gradient starts when its last backward ends; the layers of a stage follow each other.
        """
        begun, done = np.zeros((2, self.first_lane[-1]), np.int64)
        np.maximum.at(begun, lane, starts)
        np.maximum.at(done, lane, ends)
        step = int(ends.max(initial=0))
        if self.configuration.sharded:
            return step
        for number, unit in enumerate(self.units):
            own = slice(self.first_lane[number], self.first_lane[number + 1])
            sums = np.rint(1e6 * gradient_sum_ms(unit.costs, unit.spread, self.setting.cluster)).astype(np.int64)
            last = sums // np.array(unit.spread.stage_layers)
            first_ends = begun[own].reshape(-1, unit.spread.pp) + sums
            step = max(step, int(np.maximum(first_ends, done[own].reshape(-1, unit.spread.pp) + last).max()))
        return step

    def _bubble(self, lane: Ints, length: Floats, step_ns: int) -> float:
        devices = [unit.spread.tp * unit.spread.cp * unit.share for unit in self.units]
        weights = np.repeat(devices, np.diff(self.first_lane))
        busy = float(np.dot(np.bincount(lane, weights=length, minlength=len(weights)), weights))
        by_unit = [weights[first:end].sum() for first, end in zip(self.first_lane, self.first_lane[1:], strict=False)]
        total = max(by_unit) if self.configuration.colocated else sum(by_unit)
        return 1 - busy / (step_ns * total) if step_ns else 0.0

    def _peak_bytes(self, lane: Ints, changes: Floats) -> int:
        """Return the most that a device holds: activations in the order of its tasks, and state."""
        sums = np.cumsum(changes)
        before = np.concatenate(([0.0], sums))[np.searchsorted(lane, np.arange(self.first_lane[-1]))]
        peaks = np.zeros(self.first_lane[-1])
        np.maximum.at(peaks, lane, sums - before[lane])
        for number, unit in enumerate(self.units):
            state = state_bytes(unit.costs, unit.spread, sharded=self.configuration.sharded)
            peaks[self.first_lane[number] : self.first_lane[number + 1]] += np.tile(state, self.num_pipelines)
        if not self.configuration.colocated:
            return round(peaks.max())
        on_device = np.stack([self._lane_of_device(number) for number in range(len(self.units))])
        return round(np.where(on_device >= 0, peaks[on_device], 0.0).sum(axis=0).max())
