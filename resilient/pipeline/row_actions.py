"""What the executor looks up of one row of a schedule: from where to where tensors go, and which action is the last.

Owns the way from printed names (unit, lane, stage of the lane) to numbers of stages, and what of schedules real stages
can run. Knows no tensors. Must not import torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from resilient.errors import ArgumentError
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Action, Op, Schedule


class StageLink(NamedTuple):
    """A cell's activations on their way from one stage to the next, or to a unit that they feed; gradients come back.

    Args:
        source: Number of the stage that makes them, lane after lane.
        target: Number of the stage that uses them.
        cell: Of both: all lanes number microbatches alike.
    """

    source: int
    target: int
    cell: int

    @property
    def border(self) -> tuple[int, int]:
        """The two stages."""
        return self.source, self.target


class RowActions:
    """One row of a schedule.

    Args:
        schedule: Of the whole pipeline.
        row: Which one.

    Attributes:
        actions: What it does.
        states: By stage, the states whose gradients it sums.
        last_backward: By stage, the action that completes the gradients.
        last_read: By cell, the last action that needs the microbatch.
        next_receipt: After each receipt of activations, the one that follows.

    Raises:
        ValueError: What feeds a unit is not the same microbatch.
    """

    def __init__(self, schedule: Schedule, row: int) -> None:
        graph = self._graph = schedule.graph
        self.schedule = schedule
        self.actions = schedule.row(row)
        self._into: dict[tuple[int, int], list[StageLink]] = {}
        self._from: dict[tuple[int, int], list[StageLink]] = {}
        ends = graph.tables.ends_of.tolist()
        self._first, self._last = {first for first, _ in ends}, {end - 1 for _, end in ends}
        for flow, (source, cell, part, target, _) in zip(graph.flows, graph.tables.flows.tolist(), strict=True):
            if part or cell != flow.target_cell:
                # a stage has one autograd graph of a microbatch, and no word of which samples go where
                late = schedule.named(Op.FORWARD, target, flow.target_cell, 0)
                apart = schedule.named(Op.BACKWARD, source, cell, part)
                raise ArgumentError(
                    "schedule",
                    "feed each cell from those of the same number, and have one backward of each",
                    f"{apart} for {flow.target}:{flow.target_cell}" if part else f"{late} of {flow.source}:{cell}",
                    "place the samples of a microbatch together in every unit",
                )
            link = StageLink(source, target, cell)
            self._into.setdefault((target, cell), []).append(link)
            self._from.setdefault((source, cell), []).append(link)
        self.states: dict[int, list[int]] = {}
        for action in self.actions:
            if action.op is Op.REDUCE:
                self.states.setdefault(self.stage(action), []).append(action.index)
        completing = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        self.last_backward = {self.stage(action): action for action in self.actions if action.op in completing}
        reads = (Op.RECV_F, Op.FORWARD, Op.SEND_F)
        self.last_read = {action.index: action for action in self.actions if action.op in reads}
        self.next_receipt = dict(pairwise(action for action in self.actions if action.op is Op.RECV_F))

    def stage(self, action: Action) -> int:
        """Return the number of an action's stage."""
        return self._graph.first_stage[action.lane] + action.stage

    def inputs(self, stage: int, cell: int) -> list[StageLink]:
        """Return where what a stage's forward needs comes from."""
        return self._into.get((stage, cell), []) if stage in self._first else [StageLink(stage - 1, stage, cell)]

    def outputs(self, stage: int, cell: int) -> list[StageLink]:
        """Return where what it makes goes."""
        return self._from.get((stage, cell), []) if stage in self._last else [StageLink(stage, stage + 1, cell)]

    def crosses(self, link: StageLink) -> bool:
        """Return whether its ends are in different rows."""
        return self._graph.row_of[link.source] != self._graph.row_of[link.target]

    def link(self, message: Action) -> StageLink:
        """Return what a message is sent or received over."""
        stage = self.stage(message)
        comes_in = message.op in (Op.RECV_F, Op.SEND_B)
        links = self.inputs(stage, message.index) if comes_in else self.outputs(stage, message.index)
        if message.peer is None:
            return links[0]
        lanes = ((self._graph.stages[link.source if comes_in else link.target][0], link) for link in links)
        return next(link for lane, link in lanes if lane == message.peer.lane)

    def has_backward(self, stage: int) -> bool:
        """Return whether a stage differentiates anything."""
        return self._graph.tables.backward_of[stage] != Backward.NONE

    def is_split(self, backward: Action) -> bool:
        """Return whether a backward's second half comes later: a frozen stage has none."""
        kind = self._graph.tables.backward_of[self.stage(backward)]
        return backward.op is Op.BACKWARD_INPUT and kind == Backward.ALL
