"""What the workers of a pipeline do in a step, in which order: immutable, printable actions.

Owns the vocabulary. What a step consists of is a :class:`resilient.templates.schedules.graph.StepGraph`; orders are
made in :mod:`resilient.templates.schedules.generators` and :mod:`resilient.templates.schedules.unit_generator`, checked
in :mod:`resilient.templates.schedules.validator`, timed in :mod:`resilient.templates.schedules.simulator` and run by
the executor: all of them work on the same :class:`Schedule`.

A row is what one worker does. It runs one stage, or several: of one lane, or of lanes that share it. Messages go
between neighbouring stages of a lane, and from a unit's last stage to the first one of a unit that it feeds, where
these are in different rows; sends do not block, receives do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resilient.errors import ArgumentError
from resilient.templates.schedules.graph import CHAIN, UNIT_NAME, Backward, Flow, LaneName, StepGraph, chain_graph


class Op(IntEnum):
    """The kind of an action; for all but REDUCE its index is that of a cell: a chain's are its microbatches."""

    FORWARD = 0
    BACKWARD = 1  # both of the following
    BACKWARD_INPUT = 2  # the gradient of what the stage received: the stage before waits for it
    BACKWARD_WEIGHT = 3  # the gradient of the parameters: nobody waits for it before REDUCE
    SEND_F = 4  # the cell's activations to the next stage; its features to a later unit
    RECV_F = 5  # from the previous stage; from an earlier unit
    SEND_B = 6  # the gradient of what was received, to where it came from
    RECV_B = 7  # from the next stage; from a later unit
    REDUCE = 8  # wait for the sum of a layer state's gradient over all its holders; the index is the owning layer's

    @property
    def text(self) -> str:
        """Return how it is printed: F, B, I, W, SEND_F, ..."""
        return _TEXTS[self]

    @property
    def computes(self) -> bool:
        """Return whether it keeps the device busy."""
        return self <= Op.BACKWARD_WEIGHT


_TEXTS = ("F", "B", "I", "W", *(op.name for op in Op if not op.computes))
_SENDS, _FORWARDS = (Op.SEND_F, Op.SEND_B), (Op.SEND_F, Op.RECV_F)
_NUMBER = "([0-9]{1,9})"  # nine digits fit the 32 bits of a code
_LANE = rf"({UNIT_NAME})\.{_NUMBER}:"
_ACTION = re.compile(
    rf"(?:{_LANE})?{_NUMBER}({'|'.join(_TEXTS)}){_NUMBER}(?:\.{_NUMBER})?(?:([<>]){_LANE}{_NUMBER}(?:\.{_NUMBER})?)?"
)


class Peer(NamedTuple):
    """The other end of a message between units."""

    lane: LaneName
    cell: int


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a worker does.

    A chain's print as ``2F0``, ``1SEND_F0``, ``0REDUCE3``: stage, op, index. Of units they name the lane and parts of
    backwards but the first, as in ``llm.0:2B7.1``; messages between units where they go to or come from:
    ``vision.0:1SEND_F3.1>llm.0:7``, which arrives as ``llm.0:0RECV_F7<vision.0:3.1``.

    Args:
        stage: Of its lane.
        op: What is done.
        index: Of the cell, or the state.
        part: Of a cell's backward, and of the messages of its gradients. Of messages between units it is that of the
            cell that the features come from.
        lane: Of the stage.
        peer: The other end of a message between units.
    """

    stage: int
    op: Op
    index: int
    part: int = 0
    lane: LaneName = CHAIN
    peer: Peer | None = None

    def __str__(self) -> str:
        lane = f"{self.lane}:" if self.lane.unit else ""
        name = f"{lane}{self.stage}{self.op.text}{self.index}"
        part = f".{self.part}" if self.part else ""
        if self.peer is None:
            return name + part
        other = f"{'>' if self.op in _SENDS else '<'}{self.peer.lane}:{self.peer.cell}"
        return name + part + other if _has_features(self.op) else name + other + part

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` printed.

        Raises:
            ValueError: ``text`` is no action.
        """
        match = _ACTION.fullmatch(text)
        action = None if match is None else cls._of(match)
        if action is None or str(action) != text or (action.peer and (action.op.computes or action.op is Op.REDUCE)):
            raise ValueError(
                f"an action must be stage, op, index as in '2F0' or '1SEND_F0', of units as in 'llm.0:2B7.1' or "
                f"'vision.0:1SEND_F3.1>llm.0:7', got {text!r}; ops are {', '.join(_TEXTS)}"
            )
        return action

    @classmethod
    def _of(cls, match: re.Match[str]) -> Action:
        unit, number, stage, op, index, part, arrow, other, other_number, cell, other_part = match.groups()
        return cls(
            stage=int(stage),
            op=Op(_TEXTS.index(op)),
            index=int(index),
            part=int(part or other_part or 0),
            lane=LaneName(unit, int(number)) if unit else CHAIN,
            peer=Peer(LaneName(other, int(other_number)), int(cell)) if arrow else None,
        )

    def order(self, units: Sequence[str]) -> tuple[int, int, int, int, int, int]:
        """Return a key that sorts actions by lane, stage, cell and part.

        Args:
            units: In the graph's order.
        """
        return units.index(self.lane.unit), self.lane.number, self.stage, self.index, self.part, self.op

    @property
    def flow(self) -> Flow | None:
        """What a message between units is of."""
        if self.peer is None:
            return None
        if _has_features(self.op):
            return Flow(self.lane, self.index, *self.peer)
        return Flow(*self.peer, self.lane, self.index)


def _has_features(op: Op) -> bool:
    """Return whether an end of a message between units is where the features come from."""
    return (op in _SENDS) == (op in _FORWARDS)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The actions of each row, in order. Prints as one line per row.

    Args:
        graph: The step.
        codes: Op, stage, index, part and flow of every action, row after row. Stages are numbered lane after lane, the
            flow is -1 for all but messages between units. ``[num_actions, 5]``
        ends: Per row, one past the position of its last action in ``codes``.
    """

    graph: StepGraph
    codes: NDArray[np.int32]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        self.codes.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and (self.graph, self.ends) == (other.graph, other.ends)
            and np.array_equal(self.codes, other.codes)
        )

    def __hash__(self) -> int:
        return hash((self.ends, self.codes.tobytes()))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.rows)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]], graph: StepGraph | None = None) -> Schedule:
        """Return the schedule of these rows.

        Args:
            rows: The actions of each.
            graph: The step; without it, the chain that has these actions.

        Raises:
            ValueError: An action is of no stage or flow of the graph, or of so high a number that most are missing.
        """
        listed = [list(actions) for actions in rows]
        graph = _chain_of(listed) if graph is None else graph
        if len(listed) != graph.num_rows:
            raise ArgumentError("rows", f"be the {graph.num_rows} of the graph", len(listed), "add empty ones")
        codes = [_code(action, graph) for actions in listed for action in actions]
        ends = tuple(np.cumsum([len(actions) for actions in listed]).tolist())
        return cls(graph, np.array(codes, dtype=np.int32).reshape(-1, 5), ends)

    @classmethod
    def parse(cls, text: str, graph: StepGraph | None = None) -> Schedule:
        """Read what ``str`` printed.

        Raises:
            ValueError: A word of ``text`` is no action, or as for :meth:`of`.
        """
        lines = text.strip().splitlines() if graph is None else text.split("\n")
        return cls.of(([Action.parse(word) for word in line.split()] for line in lines), graph)

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each row."""
        return tuple(self.row(index) for index in range(len(self.ends)))

    def row(self, index: int) -> tuple[Action, ...]:
        """Return the actions of one row; a worker needs no other's."""
        codes = self.codes[(0, *self.ends)[index] : self.ends[index]]
        return tuple(self.named(*code) for code in codes.tolist())

    def named(self, op: int, stage: int, index: int, part: int = 0, flow: int = -1) -> Action:
        """Return the action that a code stands for."""
        lane, own = self.graph.stages[stage]
        if flow < 0:
            return Action(own, Op(op), index, part, lane)
        source, cell, target, target_cell = self.graph.flows[flow]
        peer = Peer(target, target_cell) if _has_features(Op(op)) else Peer(source, cell)
        return Action(own, Op(op), index, part, lane, peer)

    def target_row(self, send: Action) -> int:
        """Return the row that a message goes to."""
        graph, back = self.graph, send.op is Op.SEND_B
        if send.flow is not None:
            return graph.row_of[graph.end_of(graph.flow_number[send.flow], back)]
        return graph.row_of[graph.first_stage[send.lane] + send.stage + (-1 if back else 1)]


def _code(action: Action, graph: StepGraph) -> tuple[int, int, int, int, int]:
    stage = graph.first_stage.get(action.lane, graph.num_stages) + action.stage
    most = (graph.num_cells, max(graph.part_of, default=0) + 1)
    known = action.stage >= 0 and stage < graph.num_stages and graph.stages[stage][0] == action.lane
    if action.op is Op.REDUCE:
        most = (action.index + 1, 1)
    if not known or not 0 <= action.index < most[0] or not 0 <= action.part < most[1]:
        raise ArgumentError("an action", "be of a stage and a cell of the graph", action, "add it, or drop the action")
    if action.flow is None:
        return action.op, stage, action.index, action.part, -1
    flow = graph.flow_number.get(action.flow)
    if flow is None or (stage, action.part) != (graph.end_of(flow, _has_features(action.op)), graph.part_of[flow]):
        raise ArgumentError("a message between units", "be of a flow of the graph", action, "add it, or drop both ends")
    return action.op, stage, action.index, action.part, flow


def _chain_of(rows: Sequence[Sequence[Action]]) -> StepGraph:
    """Return the chain that has these actions; a stage is in the row of its first one."""
    num_actions = sum(map(len, rows))
    row_of: dict[int, int] = {}
    num_cells, backward = 0, Backward.NONE
    for row, actions in enumerate(rows):
        for action in actions:
            index = 0 if action.op is Op.REDUCE else action.index
            if action.lane != CHAIN or action.part or action.peer is not None:
                raise ArgumentError("a schedule of units", "come with its graph", f"{action} without", "give it")
            if max(action.stage, index) >= num_actions:
                limit = f"have numbers below {num_actions}, as many as there are actions"
                raise ArgumentError("an action of a chain", limit, action, "number stages and microbatches from 0")
            row_of.setdefault(action.stage, row)
            num_cells = max(num_cells, index + (action.op is not Op.REDUCE))
            if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                backward = Backward.ALL
    stages = [row_of.get(stage, -1) for stage in range(max(row_of, default=0) + 1)]
    return chain_graph(stages, len(rows), num_cells, backward)
