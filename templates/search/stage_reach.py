"""How far stages reach that fit in memory: by first layer and devices the last layer that a stage may have.

What a stage holds depends on how many rounds the schedule keeps in flight where it stands
(:mod:`resilient.templates.search.stage_cost_model`). In the tables, i is a stage's first layer and j one past its last
one, of L layers; D are the options of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.search.stage_memory import StageMemory

_UNLIMITED = 1 << 62
"""More microbatches than there can be."""


class HeldRounds(NamedTuple):
    """What stages hold of which all have equally many rounds in flight.

    Args:
        rounds: Of every stage.
        deferred: Those of them that are between the two parts of their backward, by number of stages from the last one
            to it; empty where nothing waits then.
    """

    rounds: int
    deferred: tuple[int, ...]


class StageReach:
    """The reach of stages with all choices of devices.

    Args:
        problem: The job.
        memories: What stages hold, by option.
    """

    def __init__(self, problem: PlanningProblem, memories: Sequence[StageMemory]) -> None:
        self._problem = problem
        self._memories = memories
        self._num_layers = len(problem.profile.layers)
        self._shape = (2, len(memories), self._num_layers, self._num_layers + 1)

    def ends(self, held: HeldRounds | None) -> Ints:
        """Return one past the last layer, i where not even one layer fits, by stages from the last one to it.

        ``[2, D, L, L + 1]``: with activations kept, and with those or checkpoints.

        Args:
            held: What stages hold; None: as many rounds as there are stages from the last one to it.
        """
        size = self._num_layers
        if self._problem.cluster.memory_bytes is None:
            return np.full(self._shape, size, dtype=np.int64)
        if held is not None and not held.deferred:
            ends = np.arange(size) + np.count_nonzero(self._most_held >= held.rounds, axis=-1)
            return np.repeat(ends[..., None], size + 1, axis=-1)
        counts, most = np.arange(size + 1), self._most_held
        if held is not None:
            deferred = np.array(held.deferred)
            counts, most = deferred[np.clip(counts, 1, len(deferred)) - 1], self._most_deferred(held.rounds)
        ends = np.empty(self._shape, dtype=np.int64)
        for kind, q, i in np.ndindex(self._shape[:3]):
            ends[kind, q, i] = i + np.searchsorted(-most[kind, q, i, i + 1 :], -counts, side="right")
        return ends

    @cached_property
    def _most_held(self) -> Ints:
        """How many rounds stages i .. j - 1 have memory for, -1 where j <= i. [2, D, L, L + 1]"""
        problem, memory = self._problem, self._problem.cluster.memory_bytes
        assert memory is not None
        most = np.empty(self._shape, dtype=np.int64)
        for q, each in enumerate(self._memories):
            once = each.workspace + each.deferred * (problem.schedule is ScheduleKind.SPLIT)
            most[:, q] = _times_that_fit(memory - each.held - once, each.kept)
            if problem.activation_checkpointing:
                again = _times_that_fit(memory - each.held - each.largest, each.inputs)
                most[1, q] = np.maximum(most[1, q], again)
        return self._without_none(most)

    def _most_deferred(self, rounds: int) -> Ints:
        """Of how many of so many rounds in flight gradients may wait; as for these."""
        memory = self._problem.cluster.memory_bytes
        assert memory is not None
        most = np.empty(self._shape, dtype=np.int64)
        for q, each in enumerate(self._memories):
            most[:, q] = _times_that_fit(memory - each.held - each.workspace - rounds * each.kept, each.deferred)
            if self._problem.activation_checkpointing:
                most[1, q][each.held + each.largest + rounds * each.inputs <= memory] = _UNLIMITED
        return self._without_none(most)

    def _without_none(self, most: Ints) -> Ints:
        most[:, :, np.tri(*self._shape[2:], dtype=bool)] = -1
        return most


def _times_that_fit(free: Ints, each: Ints) -> Ints:
    """Return how many times ``each`` goes into ``free`` bytes; 0 where not even nothing fits."""
    return np.where(free < 0, 0, np.where(each > 0, free // np.maximum(each, 1), _UNLIMITED))
