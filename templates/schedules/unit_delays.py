"""How long stages keep their cells, where memory does not hold as many as hide most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.schedules.graph import Backward
from resilient.templates.schedules.schedule import Op, Schedule


def less_and_less(kept: Ints, least: Ints) -> Ints:
    """Return what stages of a lane keep at a time, if each keeps no more beyond the least than the one before it.

    One that did would wait for forwards that wait for its own backwards. Nor does any keep more than one before it.

    Args:
        kept: What they could keep.
        least: What each needs to keep so that it never waits for the next ones, as under 1F1B.
    """
    beyond = np.minimum.accumulate(np.maximum(kept - least, 0))
    return np.minimum(np.minimum.accumulate(kept), least + beyond)


def shorten(schedule: Schedule, kept: Ints, max_in_flight: Sequence[int], parts: int) -> bool:
    """Have rows that keep more cells than they may keep them shorter; return whether there are any.

    Args:
        schedule: Made with these delays.
        kept: By how much each stage's last backward comes later than the lane's first one; changed here.
        max_in_flight: What each row may keep.
        parts: Of a turn, that delays count.

    Raises:
        ArgumentError: A row keeps more although neither it nor a lane that it feeds could keep any shorter.
    """
    tables = schedule.graph.tables
    found = False
    np.minimum(kept, parts * schedule.graph.num_cells, out=kept)  # later than all forwards is as late as can be
    for row, (most, peak) in enumerate(zip(max_in_flight, _most_kept(schedule), strict=True)):
        if peak <= most:
            continue
        found = True
        mine = (tables.row_of == row) & (tables.backward_of > Backward.NONE)
        stages = np.flatnonzero(mine & (kept > 0))
        if len(stages):
            kept[stages] -= np.minimum(kept[stages], max(1, (peak - most) // len(stages)))
            continue
        fed = np.isin(tables.lane_of, tables.lane_of[mine])
        for source, target in tables.flows[:, [0, 3]]:  # sorted: what feeds another lane comes before it
            fed |= fed[source] & (tables.lane_of == tables.lane_of[target])
        stages = np.flatnonzero(fed & (kept > 0))
        if not len(stages):
            fix = "a cell stays until the gradients of all its samples are back"
            raise ArgumentError("max_in_flight", f"be >= {peak} for row {row}", most, fix)
        kept[stages] -= 1
    return found


def _most_kept(schedule: Schedule) -> list[int]:
    """Return, per row, how many cells it keeps for their backwards at most."""
    tables, (op, stage, index, _, _) = schedule.graph.tables, schedule.codes.T
    changes = ((op == Op.FORWARD) & (tables.backward_of[stage] > Backward.NONE)).astype(np.int64)
    ends = np.where(tables.backward_of == Backward.ALL, Op.BACKWARD_WEIGHT, Op.BACKWARD_INPUT)[stage]
    completing = np.flatnonzero((op == Op.BACKWARD) | (op == ends))
    cell = stage[completing].astype(np.int64) * schedule.graph.num_cells + index[completing]
    _, last = np.unique(cell[::-1], return_index=True)
    changes[completing[::-1][last]] -= 1
    kept = np.cumsum(changes)
    return [int(kept[start:end].max(initial=0)) for start, end in pairwise((0, *schedule.ends))]
