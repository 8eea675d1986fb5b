"""When cells are done by lanes that come to the same rows several times (virtual stages): in parts of turns.

A round is the stages from one that comes back to its row to the next that does. Groups of as many cells go through the
first round one after the other, then through the next, as under interleaved 1F1B. What feeds such a lane goes on
evenly: it begins earlier with those that the group takes faster, and their gradients wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.schedules.graph import StepGraph, UnitLane


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """The rounds of all lanes, in parts of turns.

    Args:
        parts: Of a turn: all lanes' numbers of rounds divide them.
        later: How much later each stage's forward comes than the lane's first one. [num_stages]
        delays: How much later each stage's backward comes than the lane's last one. [num_stages]
        begins: The first forward of each cell, where a lane sets the pace. [num_lanes, num_cells]
        early: How much earlier that is than with cells that begin evenly. [num_lanes, num_cells]
    """

    parts: int
    later: Ints
    delays: Ints
    begins: Ints
    early: Ints

    @classmethod
    def of(cls, graph: StepGraph) -> Rounds:
        """Return those of a graph's lanes."""
        again = {lane: _rounds(each) for lane, each in enumerate(graph.lanes) if len(set(each.rows)) < len(each.rows)}
        parts, cells = math.lcm(*(each[-1] + 1 for each in again.values())), np.arange(graph.num_cells)
        # of the lanes that have one round: one cell after the other, the next stage a turn later
        ends = graph.tables.ends_of[graph.tables.lane_of, 1]
        later, delays = np.zeros_like(ends), (ends - 1 - np.arange(graph.num_stages)) * parts
        begins = np.tile(cells * parts, (len(graph.lanes), 1))
        early = np.zeros_like(begins)
        for lane, each in again.items():
            own, step, size = slice(*graph.tables.ends_of[lane]), parts // (each[-1] + 1), np.bincount(each).max()
            place = cells % size
            begins[lane] = (cells - place) * parts + place * step
            early[lane] = place * (parts - step)
            position = each * size + np.arange(len(each)) - np.searchsorted(each, each)
            later[own] = position * step
            delays[own] = (position[-1] - position) * step
        return cls(parts=parts, later=later, delays=delays, begins=begins, early=early)


def _rounds(lane: UnitLane) -> Ints:
    """Return the round of each stage."""
    found, here = list[int](), set[int]()
    for row in lane.rows:
        again = row in here
        here = {row} if again else here | {row}
        found.append(found[-1] + again if found else 0)
    return np.array(found)
