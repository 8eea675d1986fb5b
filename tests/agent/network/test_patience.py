"""Who is given up when, on a clock of the test's own: heartbeats each second, orphans for ten minutes."""

from __future__ import annotations

import pytest

from resilient.agent.network.patience import Patience, successor_grace_s

ORPHAN_S = 600.0


def patience(*, idle: int | None = None) -> Patience:
    """Return that of a job of three nodes, which were all heard at 100 s; one may take no part."""
    made = Patience(1.0, ORPHAN_S, lambda node: node != idle)
    for node in range(3):
        made.hear(node, 100.0)
    return made


@pytest.mark.parametrize("is_silent", [False, True])
def test_node_that_others_wait_for_is_given_up(is_silent: bool) -> None:
    waits = patience()
    waits.cut_off(1, 101.5, is_silent=is_silent)
    assert not waits.is_over(1, 101.5)
    waits.hear(2, 101.6)
    assert waits.is_over(1, 101.6)


def test_node_is_not_given_up_when_nobody_else_is_heard_of_either() -> None:
    """The coordinator stood still, or its own link is down."""
    waits = patience()
    for node in range(3):
        waits.cut_off(node, 101.5, is_silent=True)
    assert not any(waits.is_over(node, 101.5 + ORPHAN_S - 1) for node in range(3))
    assert all(waits.is_over(node, 101.5 + ORPHAN_S) for node in range(3))


def test_silence_that_began_with_that_of_all_others_is_not_held_against_the_first() -> None:
    """Others were heard of a little later, but not after this one was due."""
    waits = patience()
    waits.hear(2, 100.9)
    waits.cut_off(1, 101.5, is_silent=True)
    assert not waits.is_over(1, 101.5)


def test_node_whose_steps_are_told_by_others_is_alive() -> None:
    waits = patience()
    waits.cut_off(1, 101.0, is_silent=False)
    for second in range(102, 120):
        waits.hear(2, float(second))
        waits.note_step(float(second))
        assert not waits.is_over(1, second + 0.9)
    assert waits.is_over(1, 120.0)


def test_node_that_stands_by_is_not_shown_to_live_by_the_steps_of_others() -> None:
    waits = patience(idle=1)
    waits.cut_off(1, 101.0, is_silent=False)
    waits.hear(2, 102.0)
    waits.note_step(102.0)
    assert waits.is_over(1, 102.0)


def test_node_that_is_back_or_gone_is_as_any_other() -> None:
    waits = patience()
    waits.cut_off(1, 101.0, is_silent=False)
    waits.hear(1, 102.0)
    waits.cut_off(1, 103.0, is_silent=False)
    waits.forget(2)
    assert not waits.is_over(1, 103.5), "who else was heard is gone, or silent since"


def test_successor_waits_until_all_can_have_noticed() -> None:
    assert successor_grace_s(2.0) == 6.0
