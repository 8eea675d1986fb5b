"""What one step of a pipeline consists of: lanes of units, their cells, and what flows from which cell to which.

Pipelines that exchange features in a step are one graph: their rows follow each other.

Owns the description; in which order it is done is a :class:`resilient.templates.schedules.schedule.Schedule`. A model
that is one chain of stages is one unit with one lane (:func:`chain_graph`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Flags, Ints

UNIT_NAME = r"[A-Za-z][A-Za-z0-9_-]*"


class LaneName(NamedTuple):
    """Which lane of which unit; the unit of a chain has no name. Prints as ``vision.0``."""

    unit: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.unit}.{self.number}" if self.unit else ""


CHAIN = LaneName()
"""The only lane of a chain."""

StageName = tuple[LaneName, int]
"""A stage: its lane, and its number there."""


class Backward(IntEnum):
    """What a stage differentiates."""

    NONE = 0  # a frozen stage behind which nothing is trained; every stage of an evaluation
    INPUTS = 1  # a frozen stage: only what the one before it wants
    ALL = 2


@dataclass(frozen=True, kw_only=True)
class UnitLane:
    """One replica of a unit in a pipeline: a chain of stages.

    Args:
        name: Of which unit, and which of its lanes.
        rows: Of each stage, the row that runs it; -1 where none does, which no schedule can be valid for.
        cells: Those that have samples, ascending: the others have no actions.
        backwards: What each stage differentiates. Behind one that has a backward all have one.
        whole: Whether a cell is computed and differentiated at once, after the gradients of all its samples came back;
            else in parts, each when the gradients of its samples did.
    """

    name: LaneName = CHAIN
    rows: tuple[int, ...]
    cells: tuple[int, ...]
    backwards: tuple[Backward, ...]
    whole: bool = False

    def __post_init__(self) -> None:
        if self.name != CHAIN and (re.fullmatch(UNIT_NAME, self.name.unit) is None or self.name.number < 0):
            raise ArgumentError(
                "name", "be a word and a number >= 0", repr(tuple(self.name)), "begin units with a letter: vision, llm"
            )
        if not self.rows or len(self.rows) != len(self.backwards):
            given = f"{len(self.rows)} rows and {len(self.backwards)} backwards"
            raise ArgumentError(
                self._label, "have a row and a backward for each stage, 1 or more", given, "list each stage"
            )
        if min(self.rows) < -1:
            raise ArgumentError(f"rows of {self._label}", "be >= -1", list(self.rows), "-1 is none")
        if any(before >= after for before, after in pairwise((-1, *self.cells))):
            raise ArgumentError(f"cells of {self._label}", "be ascending and >= 0", list(self.cells), "list each once")
        if any(before > Backward.NONE and not after for before, after in pairwise(self.backwards)):
            given = ", ".join(each.name for each in self.backwards)
            raise ArgumentError(
                f"backwards of {self._label}",
                "go on to the last stage",
                given,
                "gradients come from there: INPUTS at least",
            )

    @property
    def _label(self) -> str:
        return f"lane {self.name}" if self.name.unit else "the chain"


class Flow(NamedTuple):
    """What a cell of one unit makes for a cell of a later one: features one way, where trained gradients the other."""

    source: LaneName
    cell: int
    target: LaneName
    target_cell: int


class GraphTables(NamedTuple):
    """A graph as compiled loops take it. Stages are numbered lane after lane, flows as in the graph.

    Args:
        row_of: Of each stage, ``[num_stages]``.
        backward_of: Of each stage.
        lane_of: Of each stage.
        ends_of: First stage of each lane and one past its last one, ``[num_lanes, 2]``.
        parts: Of each cell's backward; 0 where there are no samples. ``[num_lanes, num_cells]``
        flows: Last stage of the source, cell, part, first stage of the target, and its cell. ``[num_flows, 5]``
    """

    row_of: Ints
    backward_of: Ints
    lane_of: Ints
    ends_of: Ints
    parts: Ints
    flows: Ints


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One step of a pipeline, or of several that exchange features.

    A cell has a part for each flow that leaves it, in the order of the flows: samples whose gradients come back in
    different cells are differentiated apart. Without any it has one part, and in lanes whose cells are whole.

    Args:
        lanes: Unit by unit; units that others get something from come before these.
        flows: Sorted, each once, from an earlier unit to a later one.
        num_rows: Of the pipelines.
    """

    lanes: tuple[UnitLane, ...]
    flows: tuple[Flow, ...] = ()
    num_rows: int

    def __post_init__(self) -> None:
        names = [lane.name for lane in self.lanes]
        units = list(dict.fromkeys(name.unit for name in names))
        if not names or names != sorted(set(names), key=lambda name: (units.index(name.unit), name.number)):
            raise ArgumentError("lanes", "be 1 or more, each once, unit by unit", _list(names), "sort them")
        rows = [row for lane in self.lanes for row in lane.rows]
        if max(rows) >= self.num_rows:
            raise ArgumentError("rows of stages", f"be below {self.num_rows}", max(rows), "number rows from 0")
        if self.flows:
            self._check_flows(units)

    def _check_flows(self, units: Sequence[str]) -> None:
        """Refuse flows that there cannot be; a step of many pipelines has thousands."""
        lanes, (source, cell, target, target_cell) = self.lanes, self.flow_ends.T
        outside = ~(self._have_cells(source, cell) & self._have_cells(target, target_cell))
        if outside.any():
            told = _told(self.flows[outside.argmax()])
            raise ArgumentError("flows", "join cells that have samples", told, "name lanes of the graph")
        unit_of = np.array([units.index(lane.name.unit) for lane in lanes])
        back = unit_of[source] >= unit_of[target]
        if back.any():
            told = _told(self.flows[back.argmax()])
            raise ArgumentError("flows", "lead to a later unit", told, f"units are {', '.join(units)}")
        first, last = (np.array([lane.backwards[place] for lane in lanes]) > Backward.NONE for place in (0, -1))
        lacks = last[source] & ~first[target]
        if lacks.any():
            flow = self.flows[lacks.argmax()]
            fix = f"{flow.target} needs a backward: INPUTS"
            raise ArgumentError("flows", "give a trained unit its gradient", _told(flow), fix)
        steps = np.diff(self.flow_ends, axis=0)
        if np.any(steps[np.arange(len(steps)), (steps != 0).argmax(axis=1)] <= 0):
            raise ArgumentError("flows", "be sorted by source and target, each once", _list(self.flows), "sort them")

    def _have_cells(self, lane: Ints, cell: Ints) -> Flags:
        """Return whether lanes, by position, have cells; -1 is none."""
        there = np.zeros((len(self.lanes) + 1, self.num_cells + 1), np.bool_)
        for number, each in enumerate(self.lanes):
            there[number, list(each.cells)] = True
        return there[lane, np.where(cell < 0, self.num_cells, cell).clip(max=self.num_cells)]

    @cached_property
    def flow_ends(self) -> Ints:
        """Of each flow the source's position among the lanes, -1 for none, and its cell; and the target's likewise.

        ``[num_flows, 4]``
        """
        position = {lane.name: number for number, lane in enumerate(self.lanes)}
        ends = [
            (position.get(source, -1), cell, position.get(target, -1), at) for source, cell, target, at in self.flows
        ]
        return np.array(ends, np.int64).reshape(-1, 4)

    @cached_property
    def first_stage(self) -> dict[LaneName, int]:
        """Number of each lane's first stage."""
        before = np.cumsum([0, *(len(lane.rows) for lane in self.lanes)]).tolist()
        return {lane.name: first for lane, first in zip(self.lanes, before, strict=False)}

    @cached_property
    def stages(self) -> tuple[StageName, ...]:
        """The stages, lane after lane."""
        return tuple((lane.name, stage) for lane in self.lanes for stage in range(len(lane.rows)))

    @cached_property
    def row_of(self) -> tuple[int, ...]:
        """The row of each stage, lane after lane."""
        return tuple(row for lane in self.lanes for row in lane.rows)

    def stages_of(self, row: int) -> list[StageName]:
        """Return the stages that a row runs."""
        return [stage for stage, at in zip(self.stages, self.row_of, strict=True) if at == row]

    @property
    def num_stages(self) -> int:
        """Of all lanes."""
        return len(self.row_of)

    @cached_property
    def num_cells(self) -> int:
        """One more than the highest cell of any lane."""
        return max((lane.cells[-1] + 1 for lane in self.lanes if lane.cells), default=0)

    @cached_property
    def flow_number(self) -> dict[Flow, int]:
        """The position of each flow."""
        return {flow: number for number, flow in enumerate(self.flows)}

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """Of each flow, the part of its source's backward that it brings the gradient for."""
        source = self.flow_ends[:, :2]
        whole = np.array([lane.whole for lane in self.lanes])[source[:, 0]]
        another = np.append(False, np.all(source[1:] == source[:-1], axis=1)) & ~whole if self.flows else whole
        place = np.arange(len(another))
        return tuple((place - np.maximum.accumulate(np.where(another, 0, place))).tolist())

    def end_of(self, flow: int, source: bool) -> int:
        """Return the stage that a flow comes from, or the one it goes to."""
        return int(self.tables.flows[flow, 0 if source else 3])

    @cached_property
    def tables(self) -> GraphTables:
        """The same as arrays."""
        sizes = np.array([len(lane.rows) for lane in self.lanes])
        ends = np.cumsum(sizes, dtype=np.int64)
        shape = (len(self.lanes), self.num_cells)
        source, cell, target, target_cell = self.flow_ends.T
        parts = np.zeros(shape, np.int64)
        for number, lane in enumerate(self.lanes):
            parts[number, list(lane.cells)] = 1
        part_of = np.array(self.part_of, np.int64)
        np.maximum.at(parts, (source, cell), part_of + 1)
        return GraphTables(
            row_of=np.array(self.row_of, np.int64),
            backward_of=np.array([each for lane in self.lanes for each in lane.backwards], np.int64),
            lane_of=np.repeat(np.arange(shape[0]), sizes),
            ends_of=np.stack([ends - sizes, ends], axis=1),
            parts=parts,
            flows=np.stack([ends[source] - 1, cell, part_of, (ends - sizes)[target], target_cell], axis=1),
        )


def chain_graph(rows: Sequence[int], num_rows: int, num_cells: int, backward: Backward = Backward.ALL) -> StepGraph:
    """Return a step of a model that is one chain.

    Args:
        rows: Of each stage.
        num_rows: Of the pipeline.
        num_cells: Its microbatches.
        backward: What every stage differentiates.
    """
    lane = UnitLane(rows=tuple(rows), cells=tuple(range(num_cells)), backwards=(backward,) * len(rows))
    return StepGraph(lanes=(lane,), num_rows=num_rows)


def _list(words: Sequence[object]) -> str:
    return f"[{', '.join(_told(word) if isinstance(word, Flow) else str(word) for word in words)}]"


def _told(flow: Flow) -> str:
    return f"{flow.source}:{flow.cell}>{flow.target}:{flow.target_cell}"
