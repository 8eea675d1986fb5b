"""Whatever the order in which a generation connects and a newer one is announced, nobody stays in the old one."""

from __future__ import annotations

import re

import pytest

from resilient.comm import SoloCommunicator
from resilient.errors import CommunicationError
from resilient.fence import Fence
from resilient.messages import Regroup

ENDED = re.escape("generation 3 ended, 4 is being formed")


class Abortable(SoloCommunicator):
    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


def test_newer_generation_announced_before_connecting() -> None:
    fence = Fence()
    fence.announce(Regroup(generation=4))
    with pytest.raises(CommunicationError, match=f"^{ENDED}$"):
        fence.open(3)


def test_newer_generation_announced_while_connecting_ends_the_wait() -> None:
    fence, comm = Fence(), Abortable()
    interrupted = fence.open(3)
    assert interrupted.empty()
    fence.announce(Regroup(generation=4))
    assert interrupted.get_nowait() == "membership changed"
    with pytest.raises(CommunicationError, match=f"^{ENDED}$"):
        fence.attach(3, comm)  # it was built all the same
    assert comm.num_aborts == 1
    assert fence.release() is comm, "to be closed"


def test_newer_generation_announced_while_communicating_aborts() -> None:
    fence, comm = Fence(), Abortable()
    fence.open(3)
    fence.attach(3, comm)
    assert comm.num_aborts == 0
    fence.announce(Regroup(generation=4))
    assert comm.num_aborts == 1


def test_announcement_after_release_touches_nothing() -> None:
    fence, comm = Fence(), Abortable()
    fence.open(3)
    fence.attach(3, comm)
    assert fence.release() is comm
    fence.announce(Regroup(generation=4))
    assert comm.num_aborts == 0
    assert fence.release() is None


def test_announced_generation_itself_may_connect_and_is_not_interrupted_by_what_was_before() -> None:
    fence, comm = Fence(), Abortable()
    fence.open(3)
    fence.announce(Regroup(generation=4))
    assert fence.open(4).empty()
    fence.attach(4, comm)
    assert comm.num_aborts == 0


def test_change_at_a_boundary_asks_for_a_pause_and_aborts_nothing() -> None:
    fence, comm = Fence(), Abortable()
    interrupted = fence.open(3)
    fence.attach(3, comm)
    assert not fence.pause_wanted(3)
    fence.announce(Regroup(generation=4, at_boundary=True))
    assert fence.pause_wanted(3)
    assert not fence.pause_wanted(4)
    assert comm.num_aborts == 0
    assert interrupted.empty()


def test_failure_overtakes_a_planned_change() -> None:
    fence, comm = Fence(), Abortable()
    fence.open(3)
    fence.attach(3, comm)
    fence.announce(Regroup(generation=4, at_boundary=True))
    fence.announce(Regroup(generation=5))
    assert comm.num_aborts == 1
    with pytest.raises(CommunicationError, match=r"^generation 4 ended, 5 is being formed$"):
        fence.open(4)
