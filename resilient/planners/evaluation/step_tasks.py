"""What is computed in a step, in which order on each row of devices, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.planners.costs.samples import LLM
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.evaluation.timeline import Tasks
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.stage_work import by_stage, gathers_ms
from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.inputs.cluster import Link


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTasks:
    """The tasks of a step, row by row in the order they run in; arrays ``[num_tasks]``.

    Args:
        tasks: Their rows, lengths and waits.
        lane: Index of ``DeviceLayout.lanes``.
        backward: Whether it is one.
        microbatch: Of its unit and pipeline.
        kept_bytes: Activations that a device holds on to after it, less those that it gives up.
        filled: Part of its devices' time in which they compute.
    """

    tasks: Tasks
    lane: Ints
    backward: Flags
    microbatch: Ints
    kept_bytes: Floats
    filled: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class _Backwards:
    """The backwards of a unit: of a whole cell, or of its samples that went to one turn of the language model."""

    cell: Ints
    turn: Ints
    part: Floats  # of the cell's time and activations
    of_sample: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class _Added:
    """A unit's tasks by number, -1 where there is none: ``[stage, cell]`` and ``[stage, backward]``."""

    forward: Ints
    backward: Ints
    parts: _Backwards


class StepBuilder:
    """Builds the tasks of one step.

    A stage runs what is of an earlier turn first, and of one turn forwards before backwards. A forward's turn is the
    microbatch of the language model that it is for; a backward's is later by as many as the stage is ahead. Every task
    waits for tasks of an earlier turn or, in its own, for what comes before it in every row: there are no circles.
    """

    def __init__(
        self, setting: Setting, configuration: Configuration, units: Sequence[StepUnit], layout: DeviceLayout
    ) -> None:
        self._setting, self._configuration, self._units, self._layout = setting, configuration, units, layout
        self._llm = next(unit for unit in units if unit.costs.name == LLM)
        self._columns: list[Ints] = []  # of tasks: lane, turn, backward, microbatch, length
        self._kept: list[Floats] = []
        self._filled: list[Floats] = []
        self._waits: list[Ints] = [np.zeros((3, 0), np.int64)]  # source, target, delay
        self._count = 0

    def build(self) -> StepTasks:
        """Return the tasks."""
        added = {unit.costs.name: self._add(number, unit) for number, unit in enumerate(self._units)}
        for unit in self._units:
            if unit is not self._llm:
                self._join(unit, added[unit.costs.name], added[LLM])
        lane, turn, backward, microbatch, length = np.concatenate(self._columns, axis=1)
        row = self._layout.row[lane]
        unit_number = np.searchsorted(self._layout.first_lane, lane, side="right") - 1
        # On shared devices an encoder's forward comes before the language model's, its backward after it.
        of_llm = np.array([unit is self._llm for unit in self._units])[unit_number]
        order = np.lexsort(
            (np.where(backward, -unit_number, unit_number), microbatch, of_llm != backward, backward, turn, row)
        )
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        if self._layout.turns and len(order):
            self._take_turns(row[order], backward[order], order)
        source, target, delay = np.concatenate(self._waits, axis=1)
        return StepTasks(
            tasks=Tasks(
                row=row[order],
                length_ns=length[order],
                sources=position[source],
                targets=position[target],
                delays_ns=delay,
            ),
            lane=lane[order],
            backward=backward[order] > 0,
            microbatch=microbatch[order],
            kept_bytes=np.concatenate(self._kept)[order],
            filled=np.concatenate(self._filled)[order],
        )

    def _add(self, number: int, unit: StepUnit) -> _Added:
        """Add a unit's tasks."""
        repeated = self._layout.replicated and unit is not self._llm
        num_stages = self._layout.stages[number]
        copies = num_stages if repeated else 1
        stages, cells = np.arange(num_stages)[:, None], np.flatnonzero(unit.tokens > 0)
        after = num_stages - 1 - stages
        if unit is not self._llm and not repeated:
            after = after + self._llm.spread.pp
        backwards = self._backwards(unit)
        if unit is self._llm or self._layout.turns:
            turns = cells % unit.width
        else:
            first = np.full(len(unit.tokens), unit.width)
            np.minimum.at(first, backwards.cell, backwards.turn)
            by_pipeline = first.reshape(-1, unit.width)
            # Encoders run in order: what comes before an early one is early, too.
            turns = np.minimum.accumulate(by_pipeline[:, ::-1], axis=1)[:, ::-1].ravel()[cells]
        late = backwards.turn + (2 * unit.width + 0 * stages if self._layout.turns and unit is not self._llm else after)
        one, other = unit.work.forward_ms / unit.speeds, unit.work.backward_ms / unit.speeds
        if self._configuration.sharded:
            gather, scatter = gathers_ms(unit.costs, unit.spread, self._setting.cluster)
            one, other = np.maximum(one, gather[:, None]), np.maximum(other, scatter[:, None])
        one, other, kept, filled = (
            np.repeat(each, copies, axis=0) for each in (one, other, unit.work.kept_bytes, unit.work.filled)
        )
        trained = np.repeat(_trained(unit), copies)
        forward_ids = np.full(one.shape, -1)
        forward_ids[:, cells] = self._tasks(number, stages, cells, turns + 0 * stages, 0, one[:, cells])
        backward_ids = np.full((num_stages, len(backwards.cell)), -1)
        lengths = other[:, backwards.cell] * backwards.part
        backward_ids[trained] = self._tasks(number, stages[trained], backwards.cell, late[trained], 1, lengths[trained])
        self._kept += [kept[:, cells].ravel(), (-kept[:, backwards.cell] * backwards.part)[trained].ravel()]
        self._filled += [filled[:, cells].ravel(), filled[trained][:, backwards.cell].ravel()]
        if not repeated:
            self._pass_on(unit, forward_ids, backward_ids, backwards)
        return _Added(forward=forward_ids, backward=backward_ids, parts=backwards)

    def _backwards(self, unit: StepUnit) -> _Backwards:
        """Return a unit's backwards, with the turn in which the language model returns their gradients."""
        consumer = self._llm.cell % unit.width
        if unit is self._llm or self._layout.turns:
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

    def _tasks(self, number: int, stages: Ints, cells: Ints, turns: Ints, backward: int, lengths_ms: Floats) -> Ints:
        """Add tasks, stage by stage. [len(stages), len(cells)]"""
        width, first_lane = self._units[number].width, self._layout.first_lane[number]
        lanes = first_lane + (cells // width) * self._layout.stages[number] + stages
        shape = (len(stages), len(cells))
        columns = (lanes, turns, np.full(shape, backward), cells % width, np.rint(lengths_ms * 1e6))
        self._columns.append(np.stack([np.broadcast_to(each, shape).ravel() for each in columns]).astype(np.int64))
        first = self._count
        self._count += shape[0] * shape[1]
        return np.arange(first, self._count).reshape(shape)

    def _pass_on(self, unit: StepUnit, forward: Ints, backward: Ints, parts: _Backwards) -> None:
        """Have a unit's stages wait for each other. Each device sends its part of a message."""
        cluster, size = self._setting.cluster, unit.spread.tp * unit.spread.cp
        link = cluster.intra_node if unit.spread.pp * size <= cluster.devices_per_node else cluster.inter_node
        delay = np.array([link.transfer_ms(each * unit.costs.boundary_bytes / size) for each in unit.tokens])
        cells, trained = np.flatnonzero(unit.tokens > 0), _trained(unit)
        for stage in range(1, unit.spread.pp):
            self._wait(forward[stage - 1, cells], forward[stage, cells], delay[cells])
            if trained[stage - 1]:
                self._wait(backward[stage], backward[stage - 1], delay[parts.cell] * parts.part)

    def _join(self, unit: StepUnit, encoder: _Added, llm: _Added) -> None:
        """Have the language model wait for an encoder's outputs, and the encoder for their gradients."""
        uses = (unit.lengths.tokens > 0) & (self._llm.lengths.tokens > 0)
        if not uses.any():
            return
        pairs = np.stack([unit.cell, self._llm.cell, encoder.parts.of_sample, llm.parts.of_sample])[:, uses]
        (source, target, part, from_llm), sample = np.unique(pairs, axis=1, return_inverse=True)
        tokens = loads(unit.lengths.tokens[uses], sample.ravel(), len(source))
        same = source // unit.width == target // unit.width
        delay = np.array(
            [
                self._link(unit, inside).transfer_ms(each * unit.costs.output_bytes / _fewer(unit, self._llm))
                for each, inside in zip(tokens, same, strict=True)
            ]
        )
        trained = _trained(unit)[-1]
        for stage in range(self._llm.spread.pp if self._layout.replicated else 1):
            # Replicated encoders are where their outputs are used.
            delays, at = (np.where(same, 0.0, delay), stage) if self._layout.replicated else (delay, -1)
            self._wait(encoder.forward[at, source], llm.forward[stage, target], delays)
            if trained:
                self._wait(llm.backward[stage, from_llm], encoder.backward[at, part], delays)

    def _link(self, unit: StepUnit, same_pipeline: bool) -> Link:
        """Return the link that an encoder's outputs take: within a node only if all that they may reach is in it."""
        cluster = self._setting.cluster
        sizes = [each.spread.pp * each.spread.tp * each.spread.cp for each in (unit, self._llm)]
        devices = (max if self._configuration.colocated else sum)(sizes)
        inside = self._setting.num_nodes == 1 or (same_pipeline and devices <= cluster.devices_per_node)
        return cluster.intra_node if inside else cluster.inter_node

    def _wait(self, sources: Ints, targets: Ints, delays_ms: Floats) -> None:
        self._waits.append(np.stack([sources, targets, np.rint(delays_ms * 1e6).astype(np.int64)]))

    def _take_turns(self, row: Ints, backward: Ints, order: Ints) -> None:
        """Let groups that share devices follow each other: encoders, language model, encoders' backwards in reverse."""
        last, first = np.full((2, 2, self._layout.first_row[-1]), -1)
        _, at = np.unique(row * 2 + backward, return_index=True)  # tasks are in order of both
        ends = np.append(at[1:], len(row)) - 1
        first[backward[at], row[at]], last[backward[at], row[at]] = order[at], order[ends]
        whole = slice(self._layout.first_row[-2], self._layout.first_row[-1])
        last[0, whole], first[1, whole] = np.where(last[1, whole] >= 0, last[1, whole], last[0, whole]), -1
        on_device = self._layout.on_devices()
        for number, rows in enumerate(on_device):
            for later in on_device[number + 1 :]:
                pairs = np.unique(np.stack([rows, later]), axis=1)
                pairs = pairs[:, (pairs >= 0).all(axis=0)]
                after = np.where(last[1, pairs[1]] >= 0, last[1, pairs[1]], last[0, pairs[1]])
                for sources, targets in ((last[0, pairs[0]], first[0, pairs[1]]), (after, first[1, pairs[0]])):
                    both = (sources >= 0) & (targets >= 0)
                    self._wait(sources[both], targets[both], np.zeros(int(both.sum())))


def _trained(unit: StepUnit) -> Flags:
    """Return which stages have a backward: from the first one on that is trained, or gets a gradient for its input."""
    runs = [layer.has_backward for layer in unit.costs.layers]
    return by_stage(unit.spread, runs) > 0


def _fewer(unit: StepUnit, other: StepUnit) -> int:
    """Return the devices of the smaller of two stages: each sends or receives its part."""
    return min(each.spread.tp * each.spread.cp for each in (unit, other))
