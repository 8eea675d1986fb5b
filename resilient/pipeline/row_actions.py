"""What the executor looks up of one row of a schedule: from where to where tensors go, and which action is the last.

Owns the way from printed names (unit, lane, stage of the lane) to numbers of stages. Knows no tensors. Must not import
torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from resilient.templates.schedules.graph import Backward, LaneName, StageName
from resilient.templates.schedules.schedule import Action, Op, Schedule


class CellPart(NamedTuple):
    """What a lane's stages compute and differentiate at once: a cell, or what of it goes to one cell of a later unit.

    Samples of a cell that go to none are in its part 0.
    """

    lane: LaneName
    cell: int
    part: int = 0

    def __str__(self) -> str:
        lane, part = f"{self.lane}:" if self.lane.unit else "", f".{self.part}" if self.part else ""
        return f"{lane}{self.cell}{part}"


Border = tuple[StageName, StageName]
"""Two stages, the second of which uses what the first makes."""


class StageLink(NamedTuple):
    """Activations on their way from one stage to the next, or to a unit that they feed; gradients come back.

    Args:
        source: Number of the stage that makes them, lane after lane.
        target: Number of the stage that uses them.
        cell: Of the source's lane.
        part: Of that cell.
        target_cell: Of the target's lane.
    """

    source: int
    target: int
    cell: int
    part: int
    target_cell: int


class RowActions:
    """One row of a schedule.

    Args:
        schedule: Of the whole pipeline, or of several that exchange features.
        row: Which one.

    Attributes:
        actions: What it does.
        num_parts: The most that a cell of any lane has.
        states: By stage, the states whose gradients it sums.
        last_backward: By stage, the action that completes the gradients.
        last_read: By lane and cell, the last action that needs the samples.
        next_receipt: After each receipt of activations, the one that follows.
        first_receipt: The first of activations or gradients; None without any.
    """

    def __init__(self, schedule: Schedule, row: int) -> None:
        graph = self._graph = schedule.graph
        tables = graph.tables
        self.schedule = schedule
        self.actions = schedule.row(row)
        self.num_parts = int(tables.parts.max(initial=1))
        self._parts = tables.parts.tolist()
        self._lane_of = tables.lane_of.tolist()
        self._into: dict[tuple[int, int], list[StageLink]] = {}
        self._from: dict[tuple[int, int, int], list[StageLink]] = {}
        self._numbers: dict[StageLink, int] = {}
        ends = tables.ends_of.tolist()
        self._first, self._last = {first for first, _ in ends}, {end - 1 for _, end in ends}
        for flow, (source, cell, part, target, target_cell) in enumerate(tables.flows.tolist()):
            link = StageLink(source, target, cell, part, target_cell)
            self._into.setdefault((target, target_cell), []).append(link)
            self._from.setdefault((source, cell, part), []).append(link)
            self._numbers[link] = flow
        self.states: dict[int, list[int]] = {}
        for action in self.actions:
            if action.op is Op.REDUCE:
                self.states.setdefault(self.stage(action), []).append(action.index)
        completing = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        self.last_backward = {self.stage(action): action for action in self.actions if action.op in completing}
        reads = (Op.RECV_F, Op.FORWARD, Op.SEND_F)
        self.last_read = {(action.lane, action.index): action for action in self.actions if action.op in reads}
        self.next_receipt = dict(pairwise(action for action in self.actions if action.op is Op.RECV_F))
        self.first_receipt = next((each for each in self.actions if each.op in (Op.RECV_F, Op.RECV_B)), None)

    def stage(self, action: Action) -> int:
        """Return the number of an action's stage."""
        return self._graph.first_stage[action.lane] + action.stage

    def name(self, stage: int) -> StageName:
        """Return what a stage is called in every step, which its number need not be."""
        return self._graph.stages[stage]

    def border(self, link: StageLink) -> Border:
        """Return the stages at the ends of a link."""
        return self.name(link.source), self.name(link.target)

    def lane(self, stage: int) -> LaneName:
        """Return the lane of a stage."""
        return self._graph.stages[stage][0]

    def part(self, backward: Action) -> CellPart:
        """Return what a backward differentiates."""
        return CellPart(backward.lane, backward.index, backward.part)

    def parts(self, stage: int, cell: int) -> list[CellPart]:
        """Return the parts of a cell of a stage's lane."""
        return [CellPart(self.lane(stage), cell, part) for part in range(self._parts[self._lane_of[stage]][cell])]

    def is_first(self, stage: int) -> bool:
        """Return whether a stage is its lane's first: what comes in is made by other units."""
        return stage in self._first

    def inputs(self, stage: int, cell: int) -> list[StageLink]:
        """Return where what a stage's forward needs comes from; within a lane the link of each part of the cell."""
        if stage in self._first:
            return self._into.get((stage, cell), [])
        return [self._within(stage - 1, each) for each in self.parts(stage, cell)]

    def outputs(self, stage: int, part: CellPart) -> list[StageLink]:
        """Return where what a stage makes of a part goes: to several cells of later units where cells are whole."""
        if stage in self._last:
            return self._from.get((stage, part.cell, part.part), [])
        return [self._within(stage, part)]

    def crosses(self, link: StageLink) -> bool:
        """Return whether its ends are in different rows."""
        return self._graph.row_of[link.source] != self._graph.row_of[link.target]

    def number(self, link: StageLink) -> int:
        """Return what tells a link's messages from the others of its border."""
        return self._numbers.get(link, link.cell * self.num_parts + link.part)

    def source(self, link: StageLink) -> CellPart:
        """Return what a link's activations are made of."""
        return CellPart(self.lane(link.source), link.cell, link.part)

    def links(self, message: Action) -> list[StageLink]:
        """Return what a message is sent or received over: between stages of a lane activations of all parts at once."""
        stage = self.stage(message)
        comes_in = message.op in (Op.RECV_F, Op.SEND_B)
        if message.peer is None:
            before = stage - 1 if comes_in else stage
            parts = self.parts(stage, message.index)
            chosen = parts if message.op in (Op.RECV_F, Op.SEND_F) else [parts[message.part]]
            return [self._within(before, each) for each in chosen]
        if comes_in:
            links = self._into[stage, message.index]
            cell, part, lane = message.peer.cell, message.part, message.peer.lane
            return [link for link in links if self.lane(link.source) == lane and (link.cell, link.part) == (cell, part)]
        links = self._from[stage, message.index, message.part]
        return [link for link in links if (self.lane(link.target), link.target_cell) == message.peer]

    def has_backward(self, stage: int) -> bool:
        """Return whether a stage differentiates anything."""
        return self._graph.tables.backward_of[stage] != Backward.NONE

    def is_split(self, backward: Action) -> bool:
        """Return whether a backward's second half comes later: a frozen stage has none."""
        kind = self._graph.tables.backward_of[self.stage(backward)]
        return backward.op is Op.BACKWARD_INPUT and kind == Backward.ALL

    def _within(self, stage: int, part: CellPart) -> StageLink:
        return StageLink(stage, stage + 1, part.cell, part.part, part.cell)
