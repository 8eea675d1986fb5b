"""Rank 0 has the assignments of steps made ahead of time, and tells them to all.

The assignment of step k + 2 is made in a thread while step k computes, and travels in the barrier of step k, so nobody
begins a step with another one than its peers, and its samples are read while step k + 1 computes. The first two of a
generation are made and told before it begins. If rank 0 is lost, the next generation's makes its own: another
assignment gives the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from resilient.comm import Communicator
from resilient.planners.costs.correction import Correction
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.learning import Learning

AHEAD = 2
"""Steps from the one in whose barrier an assignment travels to the one that it is of."""

Make = Callable[[], StepAssignment]


class Assignments:
    """The assignments of one generation's steps.

    Args:
        comm: The generation's groups.
        units: Their names, in order.
        num_samples: Of a step.
        num_steps: Of the job.
        prepared: Called on rank 0 with a step and what was learnt, in this thread; what it returns makes the
            assignment, in another.
        learning: What is learnt travels beside the assignments.

    Attributes:
        learning: As given.
        waited_s: How long rank 0 has waited, at the newest barrier, for one to be made.
    """

    def __init__(
        self,
        comm: Communicator,
        units: tuple[str, ...],
        num_samples: int,
        num_steps: int,
        prepared: Callable[[int, Correction], Make],
        learning: Learning,
    ) -> None:
        self._comm = comm
        self._units = units
        self._size = StepAssignment.encoded_size(len(units), num_samples)
        self._num_steps = num_steps
        self._prepared = prepared
        self.learning = learning
        self._known: dict[int, StepAssignment] = {}
        self._thread = ThreadPoolExecutor(1, "assignments") if comm.rank == 0 else None
        self._coming: Future[StepAssignment] | None = None
        self.waited_s = 0.0

    def begin(self, version: int) -> None:
        """Make and share those of the first steps after ``version``; all ranks call this.

        Raises:
            CommunicationError: A peer is gone.
        """
        self.learning.meet(self._comm)
        first = torch.zeros(AHEAD, self._size, dtype=torch.float64)
        if self._comm.rank == 0:
            for place in range(AHEAD):
                if version + 1 + place <= self._num_steps:
                    first[place] = self._prepared(version + 1 + place, self.learning.correction)().encoded()
        self._comm.all_reduce(first, tuple(range(self._comm.size))).wait()
        for place, numbers in enumerate(first):
            self._keep(version + 1 + place, numbers)

    def of(self, step: int) -> StepAssignment | None:
        """Return the assignment of a step; None while it is not known."""
        return self._known.get(step)

    def bring(self, step: int) -> Tensor:
        """Return what travels in the barrier of a step: what was seen, on rank 0 with a later one's assignment."""
        return torch.cat((self._assigned(), self.learning.bring()))

    def take(self, step: int, total: Tensor) -> None:
        """Take in what the barrier of a step gave."""
        self._keep(step + AHEAD, total[: self._size])
        self.learning.take(total[self._size :])
        self._known.pop(step, None)

    def start(self, step: int) -> None:
        """Begin to make what is to travel in the barrier of a step; call this when it begins."""
        self._coming = None
        if self._thread is not None and step + AHEAD <= self._num_steps:
            self._coming = self._thread.submit(self._prepared(step + AHEAD, self.learning.correction))

    def close(self) -> None:
        """End the thread, without waiting for what it does."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _assigned(self) -> Tensor:
        self.waited_s = 0.0
        if self._coming is None:
            return torch.zeros(self._size, dtype=torch.float64)
        started = time.perf_counter()
        made = self._coming.result()
        self.waited_s = time.perf_counter() - started
        return made.encoded()

    def _keep(self, step: int, numbers: Tensor) -> None:
        if step <= self._num_steps:
            self._known[step] = StepAssignment.decoded(self._units, numbers)
