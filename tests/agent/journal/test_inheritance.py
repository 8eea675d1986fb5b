"""A machine made again of the log of another; the model checker (``succeed``) has it go on in random histories."""

from __future__ import annotations

from pathlib import Path

from resilient.agent.journal.inheritance import inherit
from resilient.agent.journal.stimulus_log import heard_counts, read_stimuli
from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts.events import NodeConnected, PreparePlans, Send, Tell, WriteManifest
from tests.agent.logged_job import LoggedJob, eventful
from tests.agent.membership.simulated import settings


class Addressees:
    """Remembers what nodes are told."""

    def __init__(self) -> None:
        self.told: dict[int, list[Send | Tell]] = {}

    def expect_back(self, connected: NodeConnected) -> None:
        self.told[connected.node] = []

    def forget(self, node: int) -> None:
        del self.told[node]

    def tell(self, instruction: Send | Tell) -> None:
        if instruction.node in self.told:
            self.told[instruction.node].append(instruction)


def test_machine_is_as_the_other_was_and_says_the_same_to_those_who_are_left(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path)
    job.start()
    job.step(1)
    job.now = 5.0
    job.lose(2)
    job.answer()
    job.step(2)
    job.leave()
    told, lines = read_stimuli(tmp_path / "stimuli.jsonl")
    machine, addressees = Membership(told), Addressees()
    inherited = inherit(machine, lines, addressees)
    assert machine.status() == job.machine.status()
    assert addressees.told.keys() == job.machine.members.keys()
    assert (inherited.at, inherited.ended) == (job.now, None)
    assert [record.kind for record in inherited.records] == [record.kind for record in job.records]


def test_what_was_wanted_and_not_done_is_to_be_done(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path)
    job.start()
    job.leave()
    _, lines = read_stimuli(tmp_path / "stimuli.jsonl")
    machine = Membership(settings())
    inherited = inherit(machine, lines, Addressees())
    assert not [each for each in inherited.unanswered if isinstance(each, WriteManifest)]
    assert {type(each) for each in inherited.unanswered} <= {PreparePlans}


def test_job_that_has_ended_is_over(tmp_path: Path) -> None:
    job = eventful(tmp_path)
    job.leave()
    told, lines = read_stimuli(tmp_path / "stimuli.jsonl")
    assert inherit(Membership(told), lines, Addressees()).ended == job.stop


def test_messages_heard_are_counted_by_node(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path)
    for number, connected in enumerate((NodeConnected(node=0, host="h", pid=1, num_workers=1),) * 3):
        job.log.write(connected, 1.0, (number % 2, 10 + number))
    job.log.flush()
    assert heard_counts(tmp_path / "stimuli.jsonl") == {0: 12, 1: 11}
