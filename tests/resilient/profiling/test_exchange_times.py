"""What a message takes is measured between two ranks; where there can be none, a job goes on without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resilient.profiling import exchange_times
from resilient.profiling.exchange_times import measured_link
from resilient.templates.inputs.cluster import Link
from tests.resilient.small import CPU


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Have nothing be known of before, nor afterwards."""
    measured_link.cache_clear()
    yield
    measured_link.cache_clear()


def test_messages_take_time_and_are_measured_once() -> None:
    link = measured_link(CPU)
    assert 0 < link.transfer_ms(1) <= link.transfer_ms(10**6)
    assert measured_link(CPU) is link


def test_ranks_that_cannot_meet_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(exchange_times, "_HOST", "192.0.2.1")  # nobody's
    assert measured_link(CPU) == Link()
    (message,) = caplog.messages
    assert message.startswith("exchanges are not measured, planners take them to need no time: ")
