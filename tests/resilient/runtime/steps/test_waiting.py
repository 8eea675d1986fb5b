"""Assignments are made while steps compute; what rank 0 waits for one is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from resilient.comm import SingleProcessCommunicator
from resilient.planners.costs.correction import Correction
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import AHEAD, Assignments
from resilient.runtime.steps.learning import Learning


def made(step: int) -> StepAssignment:
    """Return one that is known by its tokens."""
    return StepAssignment(
        units=("llm",),
        places=torch.zeros(1, 1, 3),
        tokens=torch.tensor([[step]]),
        squares=torch.tensor([[0]]),
        longest=torch.tensor([[0]]),
    )


def test_wait_is_that_of_the_newest_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, time_s = threading.Event(), [0.0]

    def now() -> float:
        value = time_s[0]
        asked.set()
        return value

    def prepared(step: int, correction: Correction) -> Callable[[], StepAssignment]:
        def make() -> StepAssignment:
            if step > AHEAD:  # begins to be waited for before it is made
                asked.wait()
                time_s[0] += 1.5
            return made(step)

        return make

    monkeypatch.setattr(time, "perf_counter", now)
    assignments = Assignments(SingleProcessCommunicator(), ("llm",), 1, AHEAD + 1, prepared, Learning(("llm",)))
    assignments.begin(0)
    assignments.start(1)
    brought = assignments.bring(1)
    assert assignments.waited_s == 0.0, "the second step knows its own"
    assignments.take(1, brought)
    assert assignments.of(AHEAD + 1) is None
    assignments.start(2)
    brought = assignments.bring(2)
    assert assignments.waited_s == 1.5
    assignments.take(2, brought)
    third = assignments.of(AHEAD + 1)
    assert third is not None
    assert third.tokens.tolist() == [[AHEAD + 1]]
    assignments.start(3)  # the last one is known: none is made
    assert assignments.bring(3).tolist() == [0.0] * assignments.learning.size
    assert assignments.waited_s == 0.0
    assignments.close()
