"""Describes a planner's answer as the runtime would run it: a step's graph, the order of its actions, and their costs.

All pipelines are one graph, as a planner may have an encoder work for several of them. Stages are up to as many
microbatches ahead as there are stages after them (1F1B), or a multiple of that (eager 1F1B); with split backwards what
parameters need comes as late as that of the first stage of their lane that has a backward (ZB-H1), but for stages that
do all of a backward at once. Where encoders lie on the language model's devices, they do their forwards before all of
its, and their backwards after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.samples import LLM
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.node_places import in_one_node
from resilient.planners.stages.stage_work import halved
from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.inputs.cluster import Link
from resilient.templates.schedules.graph import Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.simulator import ActionCosts
from resilient.templates.schedules.unit_generator import generate_units


class PlannedStep(NamedTuple):
    """A step as the simulator takes it.

    Args:
        schedule: What is done, in which order.
        costs: What it costs.
        filled: Part of a stage's devices' time with a cell in which they compute. [num_stages, num_cells]
    """

    schedule: Schedule
    costs: ActionCosts
    filled: Floats


def planned_step(
    setting: Setting, configuration: Configuration, units: Sequence[StepUnit], layout: DeviceLayout
) -> PlannedStep:
    """Return the step of a planner's answer.

    Args:
        setting: The job.
        configuration: How it uses its devices.
        units: What they do, in order of execution; those that the language model has in its stages are in it.
        layout: Where they are.
    """
    return _Step(setting, configuration, units, layout).planned()


class _Flows(NamedTuple):
    """What goes between the language model and another unit, sorted; arrays are ``[num_flows]``."""

    first: StepUnit  # makes it
    then: StepUnit  # uses it
    source: Ints  # cells of both
    target: Ints
    tokens: Floats  # of the unit beside the language model: so many rows are sent


class _Step:
    def __init__(
        self, setting: Setting, configuration: Configuration, units: Sequence[StepUnit], layout: DeviceLayout
    ) -> None:
        self._setting, self._configuration, self._units, self._layout = setting, configuration, units, layout
        language = next(index for index, unit in enumerate(units) if unit.costs.name == LLM)
        self._llm = llm = units[language]
        self._flows = [_flows(unit, llm, unit) for unit in units[:language]]
        self._flows += [_flows(llm, unit, unit) for unit in units[language + 1 :]]

    def planned(self) -> PlannedStep:
        graph = StepGraph(
            lanes=tuple(self._lanes()), flows=tuple(self._named_flows()), num_rows=len(self._layout.sizes)
        )
        return PlannedStep(
            schedule=generate_units(
                graph,
                pace=LLM,
                lead=self._configuration.lead,
                split=list(self._halved()),
                apart=self._configuration.encoders_come_first,
            ),
            costs=self._costs(graph),
            filled=self._by_stage([unit.work.filled[:, :, None] for unit in self._units], graph.num_cells)[:, :, 0],
        )

    def _lanes(self) -> Iterator[UnitLane]:
        for unit in self._units:
            used = unit.there.reshape(-1, unit.width)
            for number, rows in enumerate(self._layout.rows[unit.costs.name].tolist()):
                yield UnitLane(
                    name=LaneName(unit.costs.name, number),
                    rows=tuple(rows),
                    cells=tuple(np.flatnonzero(used[number]).tolist()),
                    backwards=unit.backwards,
                    whole=unit.whole,
                )

    def _halved(self) -> Iterator[bool]:
        """Yield of each stage, lane after lane, whether it runs its backwards in halves."""
        for unit in self._units:
            split = self._setting.splits & halved(unit.costs, unit.spread, self._configuration.shard)
            yield from np.tile(split, len(self._layout.rows[unit.costs.name])).tolist()

    def _named_flows(self) -> Iterator[Flow]:
        for flows in self._flows:
            sources, targets = (
                [LaneName(unit.costs.name, number) for number in range(len(self._layout.rows[unit.costs.name]))]
                for unit in (flows.first, flows.then)
            )
            for source, target in zip(flows.source.tolist(), flows.target.tolist(), strict=True):
                lane, cell = divmod(source, flows.first.width)
                other, there = divmod(target, flows.then.width)
                yield Flow(sources[lane], cell, targets[other], there)

    def _costs(self, graph: StepGraph) -> ActionCosts:
        """Return what actions cost."""
        num_cells = graph.num_cells
        forward, backward, weights, passed, latency = (list[Floats]() for _ in range(5))
        for unit in self._units:
            later = unit.parts.weights_ms if self._setting.splits else np.zeros_like(unit.parts.weights_ms)
            forward.append(unit.parts.forward_ms / unit.speeds[:, None])
            backward.append(np.maximum(unit.parts.backward_ms - later, 0.0) / unit.speeds[:, None])
            weights.append(later / unit.speeds[:, None])
            near = self._near_stages(unit)
            num_bytes = unit.tokens * unit.costs.boundary_bytes
            wide = np.repeat(near, unit.width, axis=0).T[:, :, None]
            passed.append(self._sent_ms(wide, num_bytes, unit.spread.tp * unit.spread.cp))
            latency.append(self._latency_ms(near))
        flow_latency, flow_transfer = self._handovers()
        return ActionCosts(
            forward_ms=self._by_stage(forward, num_cells),
            backward_input_ms=self._by_stage(backward, num_cells),
            backward_weight_ms=self._by_stage(weights, num_cells),
            latency_ms=np.concatenate([each.ravel() for each in latency])[:-1],
            transfer_ms=self._by_stage(passed, num_cells)[:-1],
            flow_latency_ms=flow_latency,
            flow_transfer_ms=flow_transfer,
            activation_bytes=self._by_stage([unit.parts.kept_bytes for unit in self._units], num_cells),
            deferred_bytes=self._by_stage([unit.parts.deferred_bytes for unit in self._units], num_cells),
        )

    def _by_stage(self, tables: Sequence[Floats], num_cells: int) -> Floats:
        """Return what units have by stage, cell and part as the graph numbers them.

        ``[num_stages, num_cells, num_parts]``
        """
        found: list[Floats] = []
        num_parts = max(table.shape[2] for table in tables)
        for unit, table in zip(self._units, tables, strict=True):
            shape = (unit.spread.num_stages, -1, unit.width, table.shape[2])
            lanes = table.reshape(shape).swapaxes(0, 1).reshape(-1, *shape[2:])
            wide = np.zeros((len(lanes), num_cells, num_parts))
            wide[:, : unit.width, : shape[3]] = lanes[:, :num_cells]
            found.append(wide)
        return np.concatenate(found)

    def _handovers(self) -> tuple[Floats, Floats]:
        """Return latency and transfer of each flow. Each device of the smaller stage sends or receives its part."""
        rows, latencies, transfers = self._layout.rows, [np.zeros(0)], [np.zeros(0)]
        for flows in self._flows:
            first, then = flows.first, flows.then
            beside = then if first is self._llm else first
            fewer = min(each.spread.tp * each.spread.cp for each in (first, then))
            source = rows[first.costs.name][flows.source // first.width, -1]
            target = rows[then.costs.name][flows.target // then.width, 0]
            near = in_one_node(self._layout, source, target, self._setting.cluster.devices_per_node)
            latencies.append(self._latency_ms(near))
            transfers.append(self._sent_ms(near, flows.tokens * beside.costs.output_bytes, fewer))
        return np.concatenate(latencies), np.concatenate(transfers)

    def _near_stages(self, unit: StepUnit) -> Flags:
        """Return whether what each stage sends the next one stays in a node. [num_lanes, num_stages]"""
        rows = self._layout.rows[unit.costs.name]
        return in_one_node(self._layout, rows, np.roll(rows, -1, axis=1), self._setting.cluster.devices_per_node)

    def _latency_ms(self, near: Flags) -> Floats:
        cluster = self._setting.cluster
        return np.where(near, cluster.intra_node.latency_ms, cluster.inter_node.latency_ms)

    def _sent_ms(self, near: Flags, num_bytes: Floats, devices: int) -> Floats:
        """Return how long messages keep links busy of which so many devices send or receive a part each.

        What leaves a node goes through its cards, which may be fewer.
        """
        cluster = self._setting.cluster
        nodes = -(-devices // cluster.devices_per_node)
        cards = min(devices, nodes * (cluster.cards_per_node or cluster.devices_per_node))
        within = _occupied_ms(cluster.intra_node, num_bytes / devices)
        return np.where(near, within, _occupied_ms(cluster.inter_node, num_bytes / cards))


def _flows(first: StepUnit, then: StepUnit, beside: StepUnit) -> _Flows:
    uses = (first.lengths.tokens > 0) & (then.lengths.tokens > 0)
    pairs, of_sample = np.unique((first.cell * len(then.tokens) + then.cell)[uses], return_inverse=True)
    source, target = np.divmod(pairs, len(then.tokens))
    tokens = loads(beside.lengths.tokens[uses], of_sample, len(pairs))
    return _Flows(first=first, then=then, source=source, target=target, tokens=tokens)


def _occupied_ms(link: Link, num_bytes: Floats) -> Floats:
    """Return how long messages keep a link busy."""
    return np.zeros_like(num_bytes) if link.bytes_per_s is None else num_bytes / link.bytes_per_s * 1e3
