"""The parts of the membership machine, wired together, and what can be seen of them."""

from __future__ import annotations

from resilient.agent.membership.next_generation.checkpoint_risk import CheckpointRisk
from resilient.agent.membership.next_generation.members import Member, Outstanding, WorkerId
from resilient.agent.membership.next_generation.speeds import NodeSpeeds
from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.checkpoints import Checkpoints
from resilient.agent.membership.parts.context import (
    EXIT_DONE,
    EXIT_FAILED,
    Context,
    Phase,
    Settings,
)
from resilient.agent.membership.parts.ending import Ending
from resilient.agent.membership.parts.injections import Injections
from resilient.agent.membership.parts.last_checkpoint import LastCheckpoint
from resilient.agent.membership.parts.likeness import Likeness
from resilient.agent.membership.parts.own_errors import OwnErrors
from resilient.agent.membership.parts.planned_job import PlannedJob
from resilient.agent.membership.parts.stalls import Stalls
from resilient.agent.membership.parts.start_up import StartUp
from resilient.agent.membership.parts.suspicions import Suspicions
from resilient.agent.membership.parts.training import Participants, Progress, step_fields
from resilient.protocol.messages import StepDone


class JobParts:
    """The parts, each of which alone writes what it knows, and where the job is.

    Attributes:
        phase: Where the job is.
        change: The change of membership under way, while agreeing.
        last_checkpoint: The checkpoint that the job waits for before it stops, while saving.
    """

    def __init__(self, settings: Settings) -> None:
        self.context = Context(settings)
        self.start_up = StartUp(self.context)
        self.likeness = Likeness(self.context)
        self.job = PlannedJob(self.context)
        self.participants = Participants(self.context)
        self.progress = Progress(settings.resume[1] if settings.resume else None)
        self.speeds = NodeSpeeds()
        self.risk = CheckpointRisk(failure_interval_s=settings.failure_interval_s)
        self.stalls = Stalls(self.context)
        self.suspicions = Suspicions(self.context)
        self.own_errors = OwnErrors()
        self.checkpoints = Checkpoints(self.context)
        self.injections = Injections(self.context)
        self.ending = Ending(self.context)
        self._reporting = Outstanding()
        self.phase = Phase.STARTING
        self.change: Change | None = None
        self.last_checkpoint: LastCheckpoint | None = None

    @property
    def awaiting(self) -> set[WorkerId]:
        """The workers whose report or saved part is waited for."""
        if self.last_checkpoint is not None:
            return set(self.last_checkpoint.awaiting)
        if self.change is None:
            return set()
        members = self.context.members
        standing_by = {worker for worker in self.context.ready_workers() if members[worker[0]].admitted}
        return (self.participants.placed() | standing_by) - self.change.reports.keys()  # who stands by may hold a state

    @property
    def awaits_anybody(self) -> bool:
        """Whether anybody's report or saved part is waited for."""
        if self.last_checkpoint is not None or self.change is None:
            return bool(self.awaiting)
        return self._reporting.has_any(self._is_awaited, lambda: self.awaiting)

    def _is_awaited(self, worker: WorkerId) -> bool:
        """Return whether a worker's report is waited for, in a change."""
        member = self.context.members.get(worker[0])
        if self.change is None or self.change.has_heard(worker) or member is None:
            return False
        return self.participants.has_place(worker) or (member.is_ready and member.admitted)

    @property
    def how_to_resume(self) -> str:
        """What to add to the reason of a stop."""
        path, step = self.checkpoints.newest_path, self.progress.step
        return self.ending.how_to_resume(path, has_job=self.job.is_known, step=step, is_complete=self.is_complete)

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint of the last step is whole."""
        return self.job.is_known and self.checkpoints.has(self.job.spec.num_steps)

    def is_too_early(self, member: Member) -> bool:
        """Return whether a guest has to wait: the launcher's own nodes have not said yet what the job is."""
        return member.is_guest and not self.job.is_known and self.start_up.has_own

    def is_needed(self, node: int) -> bool:
        """Return whether others may still want what a node holds: it trains, or a change is under way."""
        changing = self.phase in (Phase.AGREEING, Phase.INSTALLING, Phase.SAVING)
        if self.phase is Phase.FINISHED and self.participants.main[0] == node:
            return True
        return self.participants.is_placed(node) or (changing and self.context.members[node].admitted)

    def note_step(self, done: StepDone) -> None:
        """Take in that a step was committed, and record it."""
        self.progress.commit(done.outcome)
        self.checkpoints.note_outcome(done.outcome)
        self.checkpoints.note_cost(done.checkpoint_s)
        self.context.record(
            "step",
            generation=done.generation,
            time=done.at,
            **step_fields(done.outcome),
            num_samples=done.num_samples,
            step_ms=done.step_ms,
            waited_ms=done.waited_ms,
            **({} if done.checkpoint_s is None else {"checkpoint_s": done.checkpoint_s}),
            learning_rate=done.learning_rate,
        )

    def dismiss(self, member: Member, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Let a node go; it is no loss."""
        self.context.dismiss(member, reason, exit_code)
        self.forget(member)

    def refuse(self, member: Member, why: str) -> None:
        """Let a node go that cannot take part; it is no loss, as it was never of the job."""
        self.context.record("not_joined", node=member.node, cause=why)
        self.dismiss(member, f"cannot join: {why}", EXIT_FAILED)

    def forget(self, member: Member) -> None:
        """Drop what a node that is gone has said of the change under way."""
        if self.change is not None:
            self.change.forget(member.workers)
