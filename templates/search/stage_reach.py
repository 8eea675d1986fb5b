"""How far stages reach that fit in memory: by first layer and devices the last layer that a stage may have.

What a stage holds depends on how many rounds the schedule keeps where it stands
(:mod:`resilient.templates.search.stage_cost_model`). In the tables, i is a stage's first layer and j one past its last
one, of L layers; D are the options of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import Held
from resilient.templates.search.stage_memory import StageMemory

HeldRounds = tuple[tuple[Held, ...], ...]
"""What stages hold, by number of stages from the last one to it, beginning with one: at the moments at one of which
that is most."""


def falls(held: HeldRounds) -> bool:
    """Return whether some stages may hold less the more stages follow."""
    return any(moment.waiting for moments in held for moment in moments)


class StageReach:
    """The reach of stages with all choices of devices.

    Args:
        problem: The job.
        memories: What stages hold, by option.
    """

    def __init__(self, problem: PlanningProblem, memories: Sequence[StageMemory]) -> None:
        self._problem = problem
        self._memories = memories

    def ends(self, held: HeldRounds | None) -> Ints:
        """Return one past the last layer, i where not even one layer fits, by stages from the last one to it.

        ``[2, D, L, L + 1]``: with activations kept, and with those or checkpoints.

        Args:
            held: What stages hold; None where memory is not limited.
        """
        size, memory = len(self._problem.profile.layers), self._problem.cluster.memory_bytes
        ends = np.full((2, len(self._memories), size, size + 1), size, dtype=np.int64)
        if held is None or memory is None:
            return ends
        moments = np.array([(each[0], each[-1]) for each in held], dtype=np.int64)
        kinds = (False, True) if self._problem.activation_checkpointing else (False,)
        for q, each in enumerate(self._memories):
            for again in kinds:
                once, kept, waiting = each.of_rounds(checkpointing=again)
                compiled(_fill_ends)(memory - once, kept, waiting, moments, ends[int(again), q])
        ends[1] = ends.max(axis=0) if len(kinds) > 1 else ends[0]
        return ends


def _fill_ends(free: Ints, kept: Ints, waiting: Ints, moments: Ints, ends: Ints) -> None:
    """Fill in the ends of stages by number of stages from the last one to them.

    Args:
        free: Bytes that stages i .. j - 1 have for rounds. [L, L + 1]
        kept: Of each round that is not differentiated; no stage has room for more of them than one that ends before it,
            from one round on. [L, L + 1]
        waiting: Of each between the parts of its backward. [L, L + 1]
        moments: By number of stages less one, at two moments the rounds of both. [counts, 2, 2]
        ends: To be filled in; that of no stage as that of one. [L, L + 1]
    """
    num_layers = len(kept)

    def fits(i: int, j: int, number: int) -> bool:
        one, two = moments[number]
        most = max(one[0] * kept[i, j] + one[1] * waiting[i, j], two[0] * kept[i, j] + two[1] * waiting[i, j])
        return most <= free[i, j]

    for i in range(num_layers):
        end = i
        for number in range(len(moments)):  # it is near that of one stage less
            while end > i and not fits(i, end, number):
                end -= 1
            while end < num_layers and fits(i, end + 1, number):
                end += 1
            ends[i, number + 1] = end
        ends[i, 0] = ends[i, 1]
