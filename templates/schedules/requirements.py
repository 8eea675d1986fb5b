"""What a step consists of by its graph, and which of its actions wait for which: what a schedule is checked against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.schedules.graph import Backward, GraphTables
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
    shape: tuple[int, ...]
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
    wanted = _wanted(schedule)
    own = np.arange(wanted.size).reshape(wanted.shape)
    backward = np.where(wanted[:, Op.BACKWARD_INPUT], own[:, Op.BACKWARD_INPUT], own[:, Op.BACKWARD])
    rows, waiting, awaited = _between_units(tables, own, backward)
    _, num_ops, num_cells, num_parts = wanted.shape
    number = ((codes[:, 1] * num_ops + codes[:, 0]) * num_cells + codes[:, 2]) * num_parts + codes[:, 3]
    messages = codes[:, 4] >= 0
    number[messages] = own.size + codes[messages, 0] * len(tables.flows) + codes[messages, 4]
    return Requirements(
        number=np.where(codes[:, 0] == Op.REDUCE, -1, number),
        row=np.append(np.where(wanted, tables.row_of[:, None, None, None], -1).ravel(), rows.ravel()),
        needs=np.append(_needs(tables, own, backward).reshape(-1, 2), np.full((rows.size, 2), -1), axis=0),
        first_more=np.append(0, np.cumsum(np.bincount(waiting, minlength=own.size + rows.size))),
        more=awaited[np.argsort(waiting, kind="stable")],
        computes=np.append(np.indices(own.shape)[1].ravel() < Op.SEND_F, np.zeros(rows.size, bool)),
        shape=own.shape,
        num_flows=len(tables.flows),
    )


def _crossed(tables: GraphTables) -> tuple[Flags, Flags]:
    """Return whether a message comes to each stage from the one before it, and whether one goes to the one after."""
    after = (tables.lane_of[1:] == tables.lane_of[:-1]) & (tables.row_of[1:] != tables.row_of[:-1])
    return np.append(False, after), np.append(after, False)


def _wanted(schedule: Schedule) -> Flags:
    """Return which actions the step has. [num_stages, num_ops, num_cells, num_parts]"""
    tables, codes = schedule.graph.tables, schedule.codes
    num_parts = tables.parts[tables.lane_of]
    some, each = num_parts > 0, np.arange(num_parts.max(initial=1)) < num_parts[:, :, None]
    before, after = _crossed(tables)
    trained = tables.backward_of > Backward.NONE
    trained_before = np.append(False, trained[:-1])
    whole, inputs = (each & (tables.backward_of == kind)[:, None, None] for kind in (Backward.ALL, Backward.INPUTS))
    halves = codes[(codes[:, 0] == Op.BACKWARD_INPUT) | (codes[:, 0] == Op.BACKWARD_WEIGHT)]
    split = np.zeros(each.shape, bool)
    split[halves[:, 1], halves[:, 2], halves[:, 3]] = True
    wanted = np.zeros((len(each), int(Op.REDUCE), *each.shape[1:]), bool)
    wanted[:, Op.FORWARD, :, 0] = some
    wanted[:, Op.BACKWARD] = whole & ~split
    wanted[:, Op.BACKWARD_INPUT] = inputs | whole & split
    wanted[:, Op.BACKWARD_WEIGHT] = whole & split
    wanted[:, Op.RECV_F, :, 0] = some & before[:, None]
    wanted[:, Op.SEND_F, :, 0] = some & after[:, None]
    wanted[:, Op.RECV_B] = each & (after & trained)[:, None, None]
    wanted[:, Op.SEND_B] = each & (before & trained_before)[:, None, None]
    return wanted


def _needs(tables: GraphTables, own: Ints, backward: Ints) -> Ints:
    """Return what each action needs of its own lane. [num_stages, num_ops, num_cells, num_parts, 2]"""
    before, after = (each[:, None, None] for each in _crossed(tables))
    stages, forward = np.arange(len(own)), own[:, Op.FORWARD, :, :1]
    first, last = (np.isin(stages, ends)[:, None, None] for ends in (tables.ends_of[:, 0], tables.ends_of[:, 1] - 1))
    activations = np.where(before, own[:, Op.RECV_F], np.roll(forward, 1, axis=0))
    gradients = np.where(after, own[:, Op.RECV_B], np.roll(backward, -1, axis=0))
    needs = np.full((*own.shape, 2), -1)
    needs[:, Op.FORWARD, ..., 0] = np.where(first, -1, activations)
    for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        needs[:, op, ..., 0] = np.where(last, -1, gradients)
        needs[:, op, ..., 1] = forward
    needs[:, Op.BACKWARD_WEIGHT, ..., 0] = own[:, Op.BACKWARD_INPUT]
    needs[:, Op.SEND_F, ..., 0] = forward
    needs[:, Op.SEND_B, ..., 0] = backward
    return needs


def _between_units(tables: GraphTables, own: Ints, backward: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the rows of messages between units, ``[num_ops, num_flows]``; what waits for such, and what for."""
    row_of, lane_of = tables.row_of, tables.lane_of
    source, cell, part, target, target_cell = tables.flows.T
    apart, trained = row_of[source] != row_of[target], tables.backward_of[source] > Backward.NONE
    messages = own.size + np.arange(own.shape[1] * len(source)).reshape(own.shape[1], -1)
    rows = np.full(messages.shape, -1)
    rows[Op.SEND_F], rows[Op.RECV_F] = np.where(apart, row_of[source], -1), np.where(apart, row_of[target], -1)
    rows[Op.SEND_B] = np.where(apart & trained, row_of[target], -1)
    rows[Op.RECV_B] = np.where(apart & trained, row_of[source], -1)
    made, used = own[source, Op.FORWARD, cell, 0], own[target, Op.FORWARD, target_cell, 0]
    # the gradient of what a cell was given is whole with the last part of its backward
    flow, each = np.nonzero(np.arange(own.shape[3]) < (tables.parts[lane_of[target], target_cell] * trained)[:, None])
    gradient, learnt = backward[target[flow], target_cell[flow], each], backward[source, cell, part]
    here, there = ~apart[flow], trained & apart
    pairs = [
        (used, np.where(apart, messages[Op.RECV_F], made)),
        (messages[Op.SEND_F], made),
        (learnt[there], messages[Op.RECV_B, there]),
        (learnt[flow[here]], gradient[here]),
        (messages[Op.SEND_B, flow], gradient),
    ]
    return rows, np.concatenate([waiting for waiting, _ in pairs]), np.concatenate([awaited for _, awaited in pairs])
