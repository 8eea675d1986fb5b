"""What the workers of a pipeline do in a step, in which order: immutable, printable actions.

Owns the vocabulary. Orders are made in :mod:`resilient.templates.schedules.generators`, checked in
:mod:`resilient.templates.schedules.validator`, timed in :mod:`resilient.templates.schedules.simulator` and run by the
executor: all of them work on the same :class:`Schedule`.

A row is what one worker does. It runs one stage, or several (chunks) that are not neighbours: then stages are numbered
along the model, whatever rows they are in. Messages go between neighbouring stages of different rows; sends do not
block, receives do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class Op(IntEnum):
    """The kind of an action; for all but REDUCE its index is that of a microbatch within the pipeline's share."""

    FORWARD = 0
    BACKWARD = 1  # both of the following
    BACKWARD_INPUT = 2  # the gradient of what the stage received: the stage before waits for it
    BACKWARD_WEIGHT = 3  # the gradient of the parameters: nobody waits for it before REDUCE
    SEND_F = 4  # the microbatch's activations, to the next stage
    RECV_F = 5  # from the previous stage
    SEND_B = 6  # the gradient of the received activations, to the previous stage
    RECV_B = 7  # from the next stage
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
# Nine digits fit the 32 bits of a code.
_ACTION = re.compile(rf"([0-9]{{1,9}})({'|'.join(_TEXTS)})([0-9]{{1,9}})")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a worker does. Prints as ``2F0``, ``1SEND_F0``, ``0REDUCE3``: stage, op, index."""

    stage: int
    op: Op
    index: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.text}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` printed.

        Raises:
            ValueError: ``text`` is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"an action must be stage, op, index as in '2F0' or '1SEND_F0', got {text!r}; ops are "
                f"{', '.join(_TEXTS)}"
            )
        return cls(int(match[1]), Op(_TEXTS.index(match[2])), int(match[3]))


@dataclass(frozen=True, eq=False)
class Schedule:
    """The actions of each row, in order. Prints as one line per row.

    Args:
        codes: Op, stage and index of every action, row after row ``[num_actions, 3]``.
        ends: Per row, one past the position of its last action in ``codes``.
    """

    codes: NDArray[np.int32]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        self.codes.flags.writeable = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.ends == other.ends and np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.ends, self.codes.tobytes()))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.rows)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]]) -> Schedule:
        """Return the schedule of these rows."""
        codes = [[(action.op, action.stage, action.index) for action in actions] for actions in rows]
        flat = np.array([code for row in codes for code in row], dtype=np.int32).reshape(-1, 3)
        return cls(flat, tuple(np.cumsum([len(row) for row in codes]).tolist()))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str`` printed.

        Raises:
            ValueError: A word of ``text`` is no action.
        """
        return cls.of([Action.parse(word) for word in line.split()] for line in text.strip().splitlines())

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each row."""
        return tuple(self.row(index) for index in range(len(self.ends)))

    def row(self, index: int) -> tuple[Action, ...]:
        """Return the actions of one row; a worker needs no other's."""
        ops = tuple(Op)
        codes = self.codes[(0, *self.ends)[index] : self.ends[index]].tolist()
        return tuple(Action(stage, ops[op], index) for op, stage, index in codes)

    @cached_property
    def row_of(self) -> tuple[int, ...]:
        """The row of each stage: of its first action, or -1 where it has none."""
        stages = self.codes[:, 1]
        found = np.full(int(stages.max(initial=-1)) + 1, -1)
        # numpy keeps the last value of an index that comes again
        found[stages[::-1]] = np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))[::-1]
        return tuple(found.tolist())

    @property
    def num_microbatches(self) -> int:
        """The pipeline's share of the step."""
        return int(self.codes[self.codes[:, 0] != Op.REDUCE, 2].max(initial=-1)) + 1
