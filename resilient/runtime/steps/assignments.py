"""Rank 0 has the assignments of steps made ahead of time, and tells them to all.

The assignment of step k + 2, or of a later one where samples are read further ahead, is made in a thread while step k
computes, and travels in the barrier of step k, so nobody begins a step with another one than its peers, and its samples
are read while earlier steps compute. The first two of a generation are made and told before it begins. One that is not
made in time travels in a later barrier; only the one before its own step waits for it. If rank 0 is lost, the next
generation's makes its own: another assignment gives the same result.
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
"""Steps from the one in whose barrier an assignment travels to the one that it is of, where samples are read one step
ahead; so many are told before a generation begins."""
_AT_ONCE = 2
"""The most that travel in one barrier: where some were late, or more are to be known than at the beginning."""

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
        ahead: In the barrier of a step all learn that of the step so many later; at least :data:`AHEAD`.

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
        ahead: int = AHEAD,
    ) -> None:
        self._comm = comm
        self._units = units
        self._size = StepAssignment.encoded_size(len(units), num_samples)
        self._num_steps = num_steps
        self._prepared = prepared
        self._ahead = ahead
        self.learning = learning
        self._told = 0  # all ranks know those up to this step
        self._known: dict[int, StepAssignment] = {}
        self._thread = ThreadPoolExecutor(1, "assignments") if comm.rank == 0 else None
        self._coming: dict[int, Future[StepAssignment]] = {}
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
            if version + 1 + place <= self._num_steps:
                self._keep(version + 1 + place, numbers)

    def of(self, step: int) -> StepAssignment | None:
        """Return the assignment of a step; None while it is not known."""
        return self._known.get(step)

    def bring(self, step: int) -> Tensor:
        """Return what travels in the barrier of a step: what was seen, on rank 0 with later ones' assignments."""
        return torch.cat((*self._brought(step), self.learning.bring()))

    def take(self, step: int, total: Tensor) -> None:
        """Take in what the barrier of a step gave."""
        coming = self._travelling(step)
        *told, seen = total.split([1 + self._size] * len(coming) + [self.learning.size])
        for later, numbers in zip(coming, told, strict=True):
            if numbers[0]:
                self._keep(later, numbers[1:])
        self.learning.take(seen)
        self._known.pop(step, None)

    def start(self, step: int) -> None:
        """Begin to make what is to travel in the barrier of a step; call this when it begins."""
        if self._thread is None:
            return
        for later in self._travelling(step):
            if later not in self._coming:
                self._coming[later] = self._thread.submit(self._prepared(later, self.learning.correction))

    def close(self) -> None:
        """End the thread, without waiting for what it does."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _travelling(self, step: int) -> range:
        """Return the steps for whose assignments there is room in the barrier of a step, alike on all ranks."""
        last = min(self._told + _AT_ONCE, step + self._ahead, self._num_steps)
        return range(self._told + 1, last + 1)

    def _brought(self, step: int) -> list[Tensor]:
        """Return of each of these steps whether its assignment is there, and it; only the next step's is waited for."""
        coming = self._travelling(step)
        brought = [torch.zeros(1 + self._size, dtype=torch.float64) for _ in coming]
        self.waited_s = 0.0
        for later, numbers in zip(coming, brought, strict=True):
            making = self._coming.get(later)
            if making is None or (later > step + 1 and not making.done()):
                break
            started = time.perf_counter()
            made = making.result()
            self.waited_s += time.perf_counter() - started
            numbers[0], numbers[1:] = 1.0, made.encoded()
        return brought

    def _keep(self, step: int, numbers: Tensor) -> None:
        self._known[step] = StepAssignment.decoded(self._units, numbers)
        self._coming.pop(step, None)
        self._told = step
