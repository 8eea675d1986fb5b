"""What a step consists of by its graph, and which of its actions wait for which: what a schedule is checked against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Action, Op, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Requirements:
    """The actions of a step but the sums, numbered: those of each stage, then the messages between units.

    Args:
        number: Of each action of the schedule; -1 for sums.
        row: In which each belongs, -1 where the step has none such. ``[num_numbers]``
        needs: Up to two that must come before each in its row, -1 for none. ``[num_numbers, 2]``
        first_more: Where in ``more`` each one's further ones begin, and where the last one's end. ``[num_numbers + 1]``
        more: What flows between units make them wait for.
        computes: Whether each is a computation.
        shape: Stages, ops, cells and parts.
        num_flows: Between units.
    """

    number: Ints
    row: Ints
    needs: Ints
    first_more: Ints
    more: Ints
    computes: Flags
    shape: tuple[int, int, int, int]
    num_flows: int

    def action(self, schedule: Schedule, number: int) -> Action:
        """Return the action of a number."""
        num_own = int(np.prod(self.shape))
        if number < num_own:
            stage, op, index, part = np.unravel_index(number, self.shape)
            return schedule.named(int(op), int(stage), int(index), int(part))
        op, flow = divmod(number - num_own, self.num_flows)
        source, cell, part, target, target_cell = schedule.graph.tables.flows[flow].tolist()
        here = (source, cell) if op in (Op.SEND_F, Op.RECV_B) else (target, target_cell)
        return schedule.named(op, *here, part, flow)


def requirements(schedule: Schedule) -> Requirements:
    """Return what a schedule's graph asks of it; a backward that stands in two halves somewhere is to be in two."""
    tables, codes = schedule.graph.tables, schedule.codes.astype(np.int64)
    row_of, backward_of, lane_of, flows = tables.row_of, tables.backward_of, tables.lane_of, tables.flows
    of_cell = tables.parts[lane_of]
    shape = (len(row_of), int(Op.REDUCE), of_cell.shape[1], int(of_cell.max(initial=1)))
    own = np.arange(np.prod(shape)).reshape(shape)
    some, each = of_cell > 0, np.arange(shape[3]) < of_cell[:, :, None]
    wanted = np.zeros(shape, bool)
    after = np.append((lane_of[1:] == lane_of[:-1]) & (row_of[1:] != row_of[:-1]), False)
    before = np.roll(after, 1)
    trained = backward_of > Backward.NONE
    whole = each & (backward_of == Backward.ALL)[:, None, None]
    split = np.zeros(each.shape, bool)
    halves = codes[(codes[:, 0] == Op.BACKWARD_INPUT) | (codes[:, 0] == Op.BACKWARD_WEIGHT)]
    split[halves[:, 1], halves[:, 2], halves[:, 3]] = True
    wanted[:, Op.FORWARD, :, 0] = some
    wanted[:, Op.BACKWARD] = whole & ~split
    wanted[:, Op.BACKWARD_INPUT] = each & (backward_of == Backward.INPUTS)[:, None, None] | whole & split
    wanted[:, Op.BACKWARD_WEIGHT] = whole & split
    wanted[:, Op.RECV_F, :, 0] = some & before[:, None]
    wanted[:, Op.SEND_F, :, 0] = some & after[:, None]
    wanted[:, Op.RECV_B] = each & (after & trained)[:, None, None]
    wanted[:, Op.SEND_B] = each & (before & np.roll(trained, 1))[:, None, None]

    backward = np.where(wanted[:, Op.BACKWARD_INPUT], own[:, Op.BACKWARD_INPUT], own[:, Op.BACKWARD])
    forward = own[:, Op.FORWARD, :, :1]
    first, last = (np.isin(np.arange(shape[0]), each) for each in (tables.ends_of[:, 0], tables.ends_of[:, 1] - 1))
    needs = np.full((*shape, 2), -1)
    arrives = np.where(before[:, None, None], own[:, Op.RECV_F], np.roll(forward, 1, axis=0))
    needs[:, Op.FORWARD, ..., 0] = np.where(first[:, None, None], -1, arrives)
    returns = np.where(after[:, None, None], own[:, Op.RECV_B], np.roll(backward, -1, axis=0))
    for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        needs[:, op, ..., 0] = np.where(last[:, None, None], -1, returns)
        needs[:, op, ..., 1] = forward
    needs[:, Op.BACKWARD_WEIGHT, ..., 0] = own[:, Op.BACKWARD_INPUT]
    needs[:, Op.SEND_F, ..., 0] = forward
    needs[:, Op.SEND_B, ..., 0] = backward

    messages = own.size + np.arange(shape[1] * len(flows)).reshape(shape[1], len(flows))
    source, cell, part, target, target_cell = flows.T
    apart, learns = row_of[source] != row_of[target], trained[source]
    rows = np.full(messages.shape, -1)
    rows[Op.SEND_F], rows[Op.RECV_F] = np.where(apart, row_of[source], -1), np.where(apart, row_of[target], -1)
    rows[Op.SEND_B] = np.where(apart & learns, row_of[target], -1)
    rows[Op.RECV_B] = np.where(apart & learns, row_of[source], -1)
    made, used = own[source, Op.FORWARD, cell, 0], own[target, Op.FORWARD, target_cell, 0]
    flow, one = np.nonzero(each[target, target_cell] & learns[:, None])  # a gradient is whole with the last part
    gradient, given = backward[target, target_cell][flow, one], backward[source, cell, part]
    pairs = [
        (used, np.where(apart, messages[Op.RECV_F], made)),
        (messages[Op.SEND_F], made),
        (given[learns & apart], messages[Op.RECV_B][learns & apart]),
        (given[flow][~apart[flow]], gradient[~apart[flow]]),
        (messages[Op.SEND_B][flow], gradient),
    ]
    waiting, awaited = (np.concatenate(side) for side in zip(*pairs, strict=True))
    num_numbers = own.size + messages.size
    number = ((codes[:, 1] * shape[1] + codes[:, 0]) * shape[2] + codes[:, 2]) * shape[3] + codes[:, 3]
    ends = codes[:, 4] >= 0
    number[ends] = own.size + codes[ends, 0] * len(flows) + codes[ends, 4]
    return Requirements(
        number=np.where(codes[:, 0] == Op.REDUCE, -1, number),
        row=np.append(np.where(wanted, row_of[:, None, None, None], -1).ravel(), rows.ravel()),
        needs=np.append(needs.reshape(-1, 2), np.full((messages.size, 2), -1), axis=0),
        first_more=np.append(0, np.cumsum(np.bincount(waiting, minlength=num_numbers))),
        more=awaited[np.argsort(waiting, kind="stable")],
        computes=np.append(np.indices(shape)[1].ravel() < Op.SEND_F, np.zeros(messages.size, bool)),
        shape=shape,
        num_flows=len(flows),
    )
