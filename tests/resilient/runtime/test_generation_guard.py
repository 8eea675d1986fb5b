"""Whatever the order in which a generation connects and a newer one is announced, nobody stays in the old one."""

from __future__ import annotations

import re

import pytest

from resilient.comm import SingleProcessCommunicator
from resilient.errors import CommunicationError
from resilient.protocol.messages import Regroup
from resilient.runtime.generation_guard import GenerationGuard

ENDED = re.escape("the generation ended, 4 is being formed (generation 3)")


class Abortable(SingleProcessCommunicator):
    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


def test_newer_generation_announced_before_connecting() -> None:
    guard = GenerationGuard()
    guard.announce(Regroup(generation=4))
    with pytest.raises(CommunicationError, match=f"^{ENDED}$"):
        guard.open(3)


def test_newer_generation_announced_while_connecting_ends_the_wait() -> None:
    guard, comm = GenerationGuard(), Abortable()
    interrupted = guard.open(3)
    assert interrupted.empty()
    guard.announce(Regroup(generation=4))
    assert interrupted.get_nowait() == "membership changed"
    with pytest.raises(CommunicationError, match=f"^{ENDED}$"):
        guard.attach(3, comm)  # it was built all the same
    assert comm.num_aborts == 1
    assert guard.release() is comm, "to be closed"


def test_newer_generation_announced_while_communicating_aborts() -> None:
    guard, comm = GenerationGuard(), Abortable()
    guard.open(3)
    guard.attach(3, comm)
    assert comm.num_aborts == 0
    guard.announce(Regroup(generation=4))
    assert comm.num_aborts == 1


def test_announcement_after_release_touches_nothing() -> None:
    guard, comm = GenerationGuard(), Abortable()
    guard.open(3)
    guard.attach(3, comm)
    assert guard.release() is comm
    guard.announce(Regroup(generation=4))
    assert comm.num_aborts == 0
    assert guard.release() is None


def test_announced_generation_itself_may_connect_and_is_not_interrupted_by_what_was_before() -> None:
    guard, comm = GenerationGuard(), Abortable()
    guard.open(3)
    guard.announce(Regroup(generation=4))
    assert guard.open(4).empty()
    guard.attach(4, comm)
    assert comm.num_aborts == 0


def test_change_at_a_boundary_asks_for_a_pause_and_aborts_nothing() -> None:
    guard, comm = GenerationGuard(), Abortable()
    interrupted = guard.open(3)
    guard.attach(3, comm)
    assert not guard.pause_wanted(3)
    guard.announce(Regroup(generation=4, at_boundary=True))
    assert guard.pause_wanted(3)
    assert not guard.pause_wanted(4)
    assert comm.num_aborts == 0
    assert interrupted.empty()


def test_failure_overtakes_a_planned_change() -> None:
    guard, comm = GenerationGuard(), Abortable()
    guard.open(3)
    guard.attach(3, comm)
    guard.announce(Regroup(generation=4, at_boundary=True))
    guard.announce(Regroup(generation=5))
    assert comm.num_aborts == 1
    with pytest.raises(CommunicationError, match=r"^the generation ended, 5 is being formed \(generation 4\)$"):
        guard.open(4)
