"""The table of the machine: everything that can happen is handled, ignored for a reason, or refused by name."""

from __future__ import annotations

from typing import get_args

import pytest

from resilient.agent.membership.handlers import Handlers
from resilient.agent.membership.machine import IGNORED, ROWS, TABLE, Membership, MembershipError
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import (
    ManifestFailed,
    ManifestWritten,
    NodeLost,
    Stimulus,
    Tick,
    WorkerSaid,
)
from resilient.protocol.messages import FromWorkerMessage, Suspect
from tests.agent.membership.simulated import Job, settings, started

REFUSED = {(Phase.STARTING, ManifestWritten), (Phase.STARTING, ManifestFailed)}
"""There is no checkpoint yet that could be asked for."""


def test_everything_that_can_happen_is_in_the_table() -> None:
    stimuli = {(phase, kind) for phase in Phase for kind in get_args(Stimulus)}
    live = set(Phase) - {Phase.STOPPED}
    messages = {(phase, kind) for phase in live for kind in get_args(FromWorkerMessage)}
    assert TABLE.keys() == (stimuli | messages) - REFUSED


def test_nothing_is_in_the_table_twice() -> None:
    listed = [(phase, row[0]) for row in ROWS for phase in row[2]]
    listed += [(phase, row[0]) for row in IGNORED for phase in row[1]]
    assert len(listed) == len(set(listed))


def test_every_handler_is_in_the_table() -> None:
    handlers = {name for name in vars(Handlers) if not name.startswith("_")}
    assert set(TABLE.values()) == handlers


def test_what_is_not_in_the_table_is_refused_and_the_story_is_told() -> None:
    machine = Membership(settings())
    machine.handle(Tick(), 1.5)
    with pytest.raises(MembershipError) as error:
        machine.handle(ManifestFailed(path="/x", error="full"), 2.0)
    reason = "TypeError('stimulus must be in the table of phase starting, got ManifestFailed')"
    assert error.value.reason == reason
    assert str(error.value) == (
        f"{reason}\n"
        "the last stimuli, the newest at the end:\n"
        "  1.500 s  generation 0, starting: Tick()\n"
        "  2.000 s  generation 0, starting: ManifestFailed(path='/x', error='full', node=None)"
    )


def test_story_is_of_the_last_twenty_stimuli_each_in_a_line_of_its_own() -> None:
    machine = Membership(settings())
    for second in range(30):
        machine.handle(NodeLost(node=second, cause="x" * 500), float(second))
    with pytest.raises(MembershipError) as error:
        machine.handle(ManifestFailed(path="/x", error="full"), 30.0)
    lines = str(error.value).splitlines()[2:]
    assert [line.split()[0] for line in lines] == [f"{second}.000" for second in range(11, 31)]
    assert max(map(len, lines)) < 220


def test_ignored_message_changes_nothing() -> None:
    job = Job()
    job.connect()
    before = job.machine.status()
    assert job.feed(WorkerSaid(node=0, local_rank=0, message=Suspect(generation=0, reason="early"))) == []
    assert job.machine.status() == before


def test_error_of_a_handler_names_it_in_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    job = started()
    monkeypatch.setattr(job.machine._handlers._lifecycle, "lose", None)
    with pytest.raises(MembershipError) as error:
        job.lose(2)
    cause = error.value.__cause__
    assert isinstance(cause, TypeError)
    assert cause.__traceback__ is not None
    frames = []
    frame = cause.__traceback__
    while frame is not None:
        frames.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    assert frames[-1] == "on_node_lost"
