"""What a coordinator leaves to the next: its machine as it was, and what it has said to whom.

Everything that the machine was told is on disk before anything follows from it (``stimuli.jsonl``), and the machine is
pure. So a fresh one that is told the same is in the same state and says the same again, to each node in the same order;
by the numbers of messages that both ends have heard, conversations go on where they were. What was not written yet was
not confirmed either: its agent says it again. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts.events import (
    Instruction,
    ManifestFailed,
    ManifestWritten,
    NodeConnected,
    NodeLost,
    PlansPrepared,
    PreparePlans,
    Record,
    Send,
    Stimulus,
    Stop,
    Tell,
    WriteManifest,
)
from resilient.errors import ArgumentError


class EndedJobError(ArgumentError):
    """The job that was to be taken over has ended.

    Args:
        run: Its folder.
        ended: How.
    """

    def __init__(self, run: Path, ended: Stop) -> None:
        fix = "it has ended; go on from its newest checkpoint with --resume"
        super().__init__("attach", "be a run whose job goes on", str(run), fix)
        self.exit_code, self.reason = ended.exit_code, ended.reason


class Addressees(Protocol):
    """Those that the machine speaks to."""

    def expect_back(self, connected: NodeConnected) -> None:
        """Take in that there was a node, which is to come back."""
        ...

    def forget(self, node: int) -> None:
        """Take in that a node was gone."""
        ...

    def tell(self, instruction: Send | Tell) -> None:
        """Have a message sent when its node is back, if it has not heard it."""
        ...


@dataclass(kw_only=True)
class Inheritance:
    """What is known and to be done once the machine is as it was.

    Args:
        at: Time on the machine's clock, which stands still while nobody is in office.
        records: Lines for the event log, all from the beginning.
        unanswered: What was to be done, and of which nobody knows whether it was.
        ended: How the job has ended, if it has.
    """

    at: float = 0.0
    records: list[Record] = field(default_factory=list[Record])
    unanswered: list[WriteManifest | PreparePlans] = field(default_factory=list[WriteManifest | PreparePlans])
    ended: Stop | None = None

    def take(self, instruction: Instruction) -> None:
        """Take in what the machine wanted."""
        if isinstance(instruction, Record):
            self.records.append(instruction)
        elif isinstance(instruction, WriteManifest | PreparePlans):
            self.unanswered.append(instruction)
        elif isinstance(instruction, Stop):
            self.ended = instruction

    def answer(self, stimulus: Stimulus) -> None:
        """Take in what became of something that the machine wanted."""
        if isinstance(stimulus, ManifestWritten | ManifestFailed | PlansPrepared):
            self.unanswered = [wanted for wanted in self.unanswered if not _answers(stimulus, wanted)]


def _answers(stimulus: ManifestWritten | ManifestFailed | PlansPrepared, wanted: WriteManifest | PreparePlans) -> bool:
    if isinstance(stimulus, PlansPrepared):
        return isinstance(wanted, PreparePlans) and wanted.num_nodes == stimulus.num_nodes
    return isinstance(wanted, WriteManifest) and wanted.path == stimulus.path


def inherit(machine: Membership, told: Iterable[tuple[float, Stimulus]], addressees: Addressees) -> Inheritance:
    """Bring a fresh machine to where another one was.

    Args:
        machine: With the same settings.
        told: What the other was told, and when.
        addressees: Who is to hear what they have not heard yet.

    Raises:
        MembershipError: The machine is broken; it was for the coordinator before.
        ValueError: What was told cannot be read.
    """
    inherited = Inheritance()
    for at, stimulus in told:
        inherited.at = at
        inherited.answer(stimulus)
        if isinstance(stimulus, NodeConnected):
            addressees.expect_back(stimulus)
        elif isinstance(stimulus, NodeLost):
            addressees.forget(stimulus.node)
        for instruction in machine.handle(stimulus, at):
            inherited.take(instruction)
            if isinstance(instruction, Send | Tell):
                addressees.tell(instruction)
        if machine.settings.validate:
            machine.validate()
    return inherited
