"""Waits begin where they are said to, and their errors do not add up."""

from __future__ import annotations

import pytest

from tests.resilient.emulation.clocks import FakeClock


def test_wait_lasts_for_what_is_left_of_it() -> None:
    clock = FakeClock()
    device = clock.device()
    began = device.now()
    clock.time_s += 0.3
    device.wait(1.0, began)
    assert clock.slept_s == [0.7]
    assert device.waited_s == pytest.approx(0.7)


def test_wait_that_is_over_already_does_not_sleep() -> None:
    clock = FakeClock()
    device = clock.device()
    device.wait(1.0, device.now() - 2.0)
    assert (clock.slept_s, device.waited_s) == ([], 0.0)


def test_what_one_wait_oversleeps_the_next_makes_up_for() -> None:
    clock = FakeClock(late_s=1e-4)
    device = clock.device()
    for _ in range(50):
        device.wait(0.01, device.now())
    assert clock.slept_s == [0.01, *([0.0099] * 49)]
    assert clock.time_s == pytest.approx(100 + 50 * 0.01 + 1e-4)
    assert device.waited_s == pytest.approx(50 * 0.01)


def test_what_is_overslept_by_far_is_lost() -> None:
    clock = FakeClock(late_s=0.5)
    device = clock.device()
    for _ in range(3):
        device.wait(0.1, device.now())
    assert clock.slept_s == [0.1, 0.08, 0.08]
