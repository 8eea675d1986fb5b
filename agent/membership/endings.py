"""How a job ends: finished, failed, stopped to be resumed, or lost. Part of the membership machine."""

from __future__ import annotations

from resilient.agent.membership.agreement import Agreement, share_out, uncovered
from resilient.agent.membership.events import Send, Stop, WriteManifest
from resilient.agent.membership.forming import Checkpoint, source_at
from resilient.agent.membership.saving import Parts
from resilient.agent.membership.state import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_RESUMABLE,
    Phase,
    Saving,
    State,
)
from resilient.protocol.messages import Finish, Save
from resilient.state.manifest import Manifest, folder


class Endings(State):
    """Ends the job; the last checkpoint is written on the way."""

    def _save_and_stop(self, agreement: Agreement, reason: str) -> None:
        assert self.job is not None
        step = agreement.version
        if source_at(step, self._checkpoints):
            self._stop_resumable(reason)
            return
        lost = uncovered(self.job.profile, agreement.holders())
        if lost:
            self._stop_resumable(f"{reason}, and nobody holds {', '.join(lost)} at step {step}")
            return
        assert self._change is not None
        shares = share_out(agreement, self.job.profile)
        path = str(folder(self.settings.run_directory, step))
        self.generation, self._change, self.phase = self._change.generation, None, Phase.SAVING
        self._version, self._installed = step, set()
        self.outcome = agreement.roll_forward or self.outcome
        deadline = self._now + self.settings.save_timeout_s
        self._saving = Saving(
            step=step, path=path, awaiting=set(shares), parts=Parts(), reason=reason, deadline=deadline
        )
        for (node, local_rank), states in shares.items():
            save = Save(
                generation=self.generation, version=step, roll_forward=agreement.roll_forward, states=states, path=path
            )
            self._out.append(Send(node=node, local_rank=local_rank, message=save))

    def _complete_checkpoint(self, step: int, parts: Parts) -> None:
        assert self.job is not None
        path = str(folder(self.settings.run_directory, step))
        if any(checkpoint.path == path for checkpoint in self._checkpoints):
            return
        manifest = Manifest(step=step, recipe=self.job.recipe, states=parts.states(step))
        self._checkpoints.append(Checkpoint(step=step, path=path))
        self._out.append(WriteManifest(path=path, manifest=manifest))
        self._record("checkpoint", step=step, path=path)
        parts.drop(step)

    def _miss_checkpoint(self, path: str, error: str) -> None:
        """Take back a checkpoint without a manifest; the job goes on unless it was the last."""
        missed = next(checkpoint for checkpoint in self._checkpoints if checkpoint.path == path)
        self._checkpoints.remove(missed)
        training = self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING)
        if training and self.job is not None and missed.step < self.job.num_steps:
            self._note_missed_checkpoint(missed.step, None, error)
        else:
            self._stop(EXIT_FAILED, f"{error}{self._how_to_resume()}", self._newest_path())

    def _note_missed_checkpoint(self, step: int, node: int | None, error: str) -> None:
        self._record("checkpoint_failed", step=step, node=node, error=error, newest=self._newest_path())

    def _finish(self) -> None:
        if self._interruption is not None:
            self._stop_resumable(self._interruption.reason)
            return
        self.phase, self._change = Phase.FINISHED, None
        step = self._step
        path = str(folder(self.settings.run_directory, step))
        self._record("finished", step=step, path=path)
        for member in list(self.members.values()):
            if member.admitted:
                self._out.append(Send(node=member.node, local_rank=None, message=Finish()))
            else:
                self._dismiss(member, "the job is finished")

    def _stop_when_all_are_gone(self) -> None:
        if not self.members:
            code, reason = (EXIT_FAILED, self._failed) if self._failed else (EXIT_DONE, "the job is finished")
            self._stop(code, reason, self._newest_path())

    def _stop_resumable(self, reason: str) -> None:
        why = ""
        if self._failed:
            exit_code, why = EXIT_FAILED, self._failed
        elif self._interruption is not None:
            exit_code, why = EXIT_INTERRUPTED, self._interruption.reason
        else:
            exit_code = EXIT_RESUMABLE if self._step == 0 or self._checkpoints else EXIT_LOST
        if not reason.startswith(why):
            reason = f"{why}; {reason}"
        self._stop(exit_code, f"{reason}{self._how_to_resume()}", self._newest_path())

    def _stop(self, exit_code: int, reason: str, path: str | None) -> None:
        if self.phase is not Phase.FINISHED or exit_code != EXIT_DONE:
            self._record("stopped", exit_code=exit_code, reason=reason, path=path)
        self.phase, self._change, self._saving = Phase.STOPPED, None, None
        self._out.append(Stop(exit_code=exit_code, reason=reason))
