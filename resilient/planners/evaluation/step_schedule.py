"""Describes a planner's answer as the runtime would run it: a step's graph, the order of its actions, and their costs.

All pipelines are one graph, as a planner may have an encoder work for several of them. Stages are up to as many
microbatches ahead as there are stages after them (1F1B), or a multiple of that (eager 1F1B). Where encoders lie on the
language model's devices, they do their forwards before all of its, and their backwards after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.samples import LLM
from resilient.planners.evaluation.step_unit import StepUnit
from resilient.planners.packing.balance import loads
from resilient.planners.planner import Configuration, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.templates.common.arrays import Floats, Ints
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
    made_of: Floats  # tokens of the samples in the unit that makes it


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
        apart = self._configuration.colocated and not self._layout.replicated
        return PlannedStep(
            schedule=generate_units(graph, pace=LLM, lead=self._configuration.lead, apart=apart),
            costs=self._costs(graph),
            filled=self._by_stage([unit.work.filled for unit in self._units], graph.num_cells),
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
                )

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
        """Return what actions cost. A backward's parts share its time, and what is kept and sent, by their tokens."""
        num_cells, setting = graph.num_cells, self._setting
        forward, backward, passed, latency = list[Floats](), list[Floats](), list[Floats](), list[Floats]()
        for unit in self._units:
            forward.append(unit.work.forward_ms / unit.speeds)
            backward.append(unit.work.backward_ms / unit.speeds)
            size, cluster = unit.spread.tp * unit.spread.cp, setting.cluster
            inside = unit.spread.pp * size <= cluster.devices_per_node
            link = cluster.intra_node if inside else cluster.inter_node
            sent = _occupied_ms(link, unit.tokens * unit.costs.boundary_bytes / size)
            passed.append(np.broadcast_to(sent, forward[-1].shape))
            latency.append(np.full((len(self._layout.rows[unit.costs.name]), unit.spread.num_stages), link.latency_ms))
        part = self._parts(graph)
        flow_latency, flow_transfer = self._handovers()
        return ActionCosts(
            forward_ms=self._by_stage(forward, num_cells),
            backward_input_ms=self._by_stage(backward, num_cells)[:, :, None] * part,
            latency_ms=np.concatenate([each.ravel() for each in latency])[:-1],
            transfer_ms=(self._by_stage(passed, num_cells)[:, :, None] * part)[:-1],
            flow_latency_ms=flow_latency,
            flow_transfer_ms=flow_transfer,
            activation_bytes=self._by_stage([unit.work.kept_bytes for unit in self._units], num_cells)[:, :, None]
            * part,
        )

    def _by_stage(self, tables: Sequence[Floats], num_cells: int) -> Floats:
        """Return what units have by stage and cell as the graph numbers them. [num_stages, num_cells]"""
        found: list[Floats] = []
        for unit, table in zip(self._units, tables, strict=True):
            lanes = table.reshape(unit.spread.num_stages, -1, unit.width).swapaxes(0, 1).reshape(-1, unit.width)
            wide = np.zeros((len(lanes), num_cells))
            wide[:, : unit.width] = lanes[:, :num_cells]
            found.append(wide)
        return np.concatenate(found)

    def _parts(self, graph: StepGraph) -> Floats:
        """Return what each part is of its cell. [num_stages, num_cells, num_parts]"""
        tables = graph.tables
        part = np.zeros((*tables.parts.shape, max(1, int(tables.parts.max(initial=1)))))
        part[:, :, 0] = 1.0
        if self._flows:
            source, cell, number, _, _ = tables.flows.T
            lane = tables.lane_of[source]
            part[lane, cell] = 0.0
            part[lane, cell, number] = np.concatenate([each.made_of for each in self._flows])
            # samples that go nowhere are in the first part
            all_tokens = np.concatenate([each.first.tokens[each.source] for each in self._flows])
            part[lane, cell, 0] += np.maximum(all_tokens - part[lane, cell].sum(axis=1), 0.0)
            part[lane, cell] /= part[lane, cell].sum(axis=1, keepdims=True)
        return part[tables.lane_of]

    def _handovers(self) -> tuple[Floats, Floats]:
        """Return latency and transfer of each flow. Each device of the smaller stage sends or receives its part."""
        cluster, llm = self._setting.cluster, self._llm
        latencies, transfers = [np.zeros(0)], [np.zeros(0)]
        for flows in self._flows:
            unit, cells, language_cells = flows.first, flows.source, flows.target
            if unit is llm:
                unit, cells, language_cells = flows.then, flows.target, flows.source
            fewer = min(each.spread.tp * each.spread.cp for each in (unit, llm))
            # Within a node only if all lanes of a pipeline are in it.
            spreads = [replace(each.spread, dp=-(-each.spread.dp // llm.spread.dp)) for each in (unit, llm)]
            sizes = [each.num_devices for each in spreads]
            near = (max if self._configuration.colocated else sum)(sizes) <= cluster.devices_per_node
            works_for = self._layout.lanes[unit.costs.name][language_cells // llm.width]
            lane = cells // unit.width
            same = (works_for[:, 0] <= lane) & (lane < works_for[:, 1])
            inside = same & near | (self._setting.num_nodes == 1)
            num_bytes = flows.tokens * unit.costs.output_bytes / fewer
            ways = cluster.intra_node, cluster.inter_node
            latencies.append(np.where(inside, *(each.latency_ms for each in ways)))
            transfers.append(np.where(inside, *(_occupied_ms(each, num_bytes) for each in ways)))
        return np.concatenate(latencies), np.concatenate(transfers)


def _flows(first: StepUnit, then: StepUnit, beside: StepUnit) -> _Flows:
    uses = (first.lengths.tokens > 0) & (then.lengths.tokens > 0)
    pairs, of_sample = np.unique((first.cell * len(then.tokens) + then.cell)[uses], return_inverse=True)
    source, target = np.divmod(pairs, len(then.tokens))
    tokens, made_of = (loads(each.lengths.tokens[uses], of_sample, len(pairs)) for each in (beside, first))
    return _Flows(first=first, then=then, source=source, target=target, tokens=tokens, made_of=made_of)


def _occupied_ms(link: Link, num_bytes: Floats) -> Floats:
    """Return how long messages keep a link busy."""
    return np.zeros_like(num_bytes) if link.bytes_per_s is None else num_bytes / link.bytes_per_s * 1e3
