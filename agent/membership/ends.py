"""The phases in which a job ends: with its last step, after a last checkpoint, or at once."""

from __future__ import annotations

from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.agreement import Agreement, share_out, uncovered
from resilient.agent.membership.next_generation.forming import (
    source_at,
)
from resilient.agent.membership.parts.checkpoints import LastCheckpoint
from resilient.agent.membership.parts.context import (
    EXIT_DONE,
    EXIT_FAILED,
    Phase,
)
from resilient.agent.membership.parts.events import Stop
from resilient.protocol.messages import Finish, Save


class JobEnds(JobParts):
    """Ends the job, from whatever phase it is in."""

    def _save_and_stop(self, agreement: Agreement, reason: str) -> None:
        """Have every state saved once by one of its holders, and stop when that is done; at once if it need not be."""
        step, job = agreement.version, self.job.spec
        if source_at(step, self.checkpoints.whole):
            self.stop_resumable(reason)
            return
        lost = uncovered(job.profile, agreement.holders())
        if lost:
            self.stop_resumable(f"{reason}, and nobody holds {', '.join(lost)} at step {step}")
            return
        shares, path = share_out(agreement, job.profile), self.checkpoints.path(step)
        number = self.context.next_generation()
        self._phase, self._change = Phase.SAVING, None
        self.progress.settle(step, agreement.roll_forward)
        self.participants.leave()
        deadline = self.context.now + self.context.settings.save_timeout_s
        self._last_checkpoint = LastCheckpoint(step=step, path=path, reason=reason, deadline=deadline, shares=shares)
        for worker, states in shares.items():
            roll_forward = agreement.roll_forward
            save = Save(generation=number, version=step, roll_forward=roll_forward, states=states, path=path)
            self.context.send(worker, save)

    def finish(self) -> None:
        """Let all scripts go on after the last step."""
        if self.ending.interruption is not None:
            self.stop_resumable(self.ending.interruption.reason)
            return
        self._phase, self._change = Phase.FINISHED, None
        step = self.progress.step
        self.context.record("finished", step=step, path=self.checkpoints.path(step))
        for member in list(self.context.members.values()):
            if member.admitted:
                self.context.send_node(member.node, Finish())
            else:
                self.dismiss(member, "the job is finished")

    def stop_when_all_are_gone(self) -> None:
        """Stop if nobody is left after the last step."""
        if not self.context.members:
            failure = self.ending.failure
            code, reason = (EXIT_FAILED, failure) if failure else (EXIT_DONE, "the job is finished")
            self.stop(code, reason, self.checkpoints.newest_path)

    def stop_resumable(self, reason: str) -> None:
        """Stop before the last step; the exit code tells whether the job can go on."""
        is_saved = self.progress.step == 0 or bool(self.checkpoints.whole)
        exit_code, reason = self.ending.resumable(reason, is_saved=is_saved)
        self.stop(exit_code, f"{reason}{self.how_to_resume}", self.checkpoints.newest_path)

    def stop(self, exit_code: int, reason: str, path: str | None) -> None:
        """Stop at once; ``path``: the checkpoint to go on from."""
        if self._phase is not Phase.FINISHED or exit_code != EXIT_DONE:
            self.context.record("stopped", exit_code=exit_code, reason=reason, path=path)
        self._phase, self._change, self._last_checkpoint = Phase.STOPPED, None, None
        self.context.do(Stop(exit_code=exit_code, reason=reason))
