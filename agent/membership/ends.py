"""The phases in which a job ends: with its last step, after a last checkpoint, or at once."""

from __future__ import annotations

from collections.abc import Mapping

from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.agreement import (
    Agreement,
    HeldStates,
    compared_pieces,
    share_out,
    uncovered,
)
from resilient.agent.membership.next_generation.forming import (
    source_at,
)
from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.context import (
    EXIT_DONE,
    EXIT_FAILED,
    Phase,
)
from resilient.agent.membership.parts.events import ManifestFailed, Stop
from resilient.agent.membership.parts.last_checkpoint import LastCheckpoint
from resilient.protocol.messages import Finish, Save
from resilient.state.manifest import step_of_folder
from resilient.state.witnesses import why_undecided


class Ends:
    """Ends the job, from whatever phase it is in.

    Args:
        parts: What the machine knows.
    """

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts

    def save_and_stop(self, agreement: Agreement, reason: str) -> None:
        """Have every state saved once by one of its holders, and stop when that is done; at once if it is not to be."""
        parts = self._parts
        step, job = agreement.version, parts.job.spec
        if parts.ending.is_damaged or source_at(step, parts.checkpoints.whole):
            self.stop_resumable(reason)
            return
        lost = uncovered(job.profile, agreement.held.values())
        if lost:
            self.stop_resumable(f"{reason}, and nobody holds {', '.join(lost)} at step {step}")
            return
        self._save(agreement, reason)

    def save_and_finish(self, agreement: Agreement) -> None:
        """Finish the job, whose last step is agreed on, once that is saved; no further generation is needed for it."""
        parts = self._parts
        if parts.is_complete:
            parts.progress.settle(agreement.version, agreement.roll_forward)
            self.finish()
        else:
            self._save(agreement, "all steps are done")

    def end_saved(self) -> None:
        """Have the last checkpoint's manifest written, if what was saved is right.

        What was written of a damaged copy is written again, of one of the others.
        """
        parts, last, job = self._parts, self._parts.last_checkpoint, self._parts.job.spec
        assert last is not None
        if parts.checkpoints.is_unwritten(last.step):
            return  # it is being done
        differences = last.differences()
        undecided = [difference for difference in differences if not difference.odd]
        if undecided:
            why = why_undecided(undecided, last.step)
            self.stop_resumable(f"{last.reason}, and there is no checkpoint of step {last.step}: {why}")
            return
        for (node, local_rank), states in last.drop(differences).items():
            parts.context.record("replica_dropped", node=node, local_rank=local_rank, states=states, step=last.step)
        lacking = last.parts.lacking(last.step, job.profile)
        holders = last.holders(lacking, parts.context.ready_workers())
        if holders:
            self._ask({worker: states for worker, states in share_out(holders, job.profile).items() if states})
        elif lacking:
            self.stop_resumable(f"{last.reason}, and nobody holds {', '.join(lacking)} at step {last.step}")
        else:
            parts.checkpoints.complete(last.step, last.save.skipped, last.parts, job)

    def end_written(self) -> None:
        """End the job, with its last step or before it, if it waits for a checkpoint that is whole now."""
        parts, last = self._parts, self._parts.last_checkpoint
        if last is None or not parts.checkpoints.has(last.step):
            return
        if last.step == parts.job.spec.num_steps:
            self.finish()
        else:
            self.stop_resumable(last.reason)

    def _save(self, agreement: Agreement, reason: str) -> None:
        """Have every state saved once by one of its holders, and all of them tell what they hold."""
        parts, step = self._parts, agreement.version
        save = Save(
            generation=parts.context.next_generation(),
            version=step,
            roll_forward=agreement.roll_forward,
            states=(),
            path=parts.checkpoints.path(step),
            skipped=agreement.skipped,
            compared=compared_pieces(agreement.held, parts.job.spec.profile),
        )
        parts.phase, parts.change = Phase.SAVING, None
        parts.progress.settle(step, agreement.roll_forward)
        parts.participants.leave()
        parts.checkpoints.give_up(step)  # what was saved of it on the way
        deadline = parts.context.now + parts.context.settings.save_timeout_s
        parts.last_checkpoint = LastCheckpoint(save=save, reason=reason, deadline=deadline)
        self._ask(share_out(agreement.held, parts.job.spec.profile))

    def _ask(self, shares: Mapping[WorkerId, HeldStates]) -> None:
        assert self._parts.last_checkpoint is not None
        for worker, save in self._parts.last_checkpoint.ask(shares).items():
            self._parts.context.send(worker, save)

    def finish(self) -> None:
        """Let all scripts go on after the last step, each knowing whether it speaks for the job."""
        parts = self._parts
        if parts.ending.reason:
            self.stop_resumable(parts.ending.reason)
            return
        parts.phase, parts.change, parts.last_checkpoint = Phase.FINISHED, None, None
        parts.participants.choose_main()
        step = parts.progress.step
        parts.context.record("finished", step=step, path=parts.checkpoints.path(step))
        for member in list(parts.context.members.values()):
            if member.admitted:
                for worker in member.workers:
                    parts.context.send(worker, Finish(is_main=worker == parts.participants.main))
            else:
                parts.dismiss(member, "the job is finished")

    def stop_when_all_are_gone(self) -> None:
        """Stop if nobody is left after the last step."""
        parts = self._parts
        if not parts.context.members:
            failure = parts.ending.failure
            if failure:
                self.stop(EXIT_FAILED, f"{failure}{parts.how_to_resume}", parts.checkpoints.newest_path)
            else:
                self.stop(EXIT_DONE, "the job is finished", parts.checkpoints.newest_path)

    def stop_without_script(self) -> None:
        """Stop after the last step: it is saved, but nobody is left to run the end of the script."""
        parts = self._parts
        reason = f"all nodes were lost before the script ended{parts.how_to_resume}"
        self.stop(EXIT_FAILED, reason, parts.checkpoints.newest_path)

    def stop_resumable(self, reason: str) -> None:
        """Stop before the last step; the exit code tells whether the job can go on."""
        parts = self._parts
        is_saved = parts.progress.step == 0 or bool(parts.checkpoints.whole)
        exit_code, reason = parts.ending.resumable(reason, is_saved=is_saved)
        self.stop(exit_code, f"{reason}{parts.how_to_resume}", parts.checkpoints.newest_path)

    def do_without_manifest(self, failed: ManifestFailed) -> None:
        """Try again, later, and go on without it; not where a node's files are not there, nor at the end for ever."""
        checkpoints, job, last = self._parts.checkpoints, self._parts.job.spec, self._parts.last_checkpoint
        step = step_of_folder(failed.path)
        if not checkpoints.is_unwritten(step):
            return  # it was written since, or is given up
        is_put_off = failed.node is None and checkpoints.put_off(step, job.comm_timeout_s)
        if not is_put_off:
            checkpoints.give_up(step)
        if is_put_off or step != (job.num_steps if last is None else last.step):
            checkpoints.note_missed(step, failed.node, failed.error)
        else:
            self.stop_unsaved(failed.error)

    def stop_unsaved(self, error: str) -> None:
        """Stop because the last checkpoint cannot be written."""
        parts, last = self._parts, self._parts.last_checkpoint
        before = f"{last.reason}, and there is no checkpoint of step {last.step}: " if last is not None else ""
        self.stop(EXIT_FAILED, f"{before}{error}{parts.how_to_resume}", parts.checkpoints.newest_path)

    def stop(self, exit_code: int, reason: str, path: str | None) -> None:
        """Stop at once; ``path``: the checkpoint to go on from."""
        parts = self._parts
        parts.context.record("stopped", exit_code=exit_code, reason=reason, path=path)
        parts.phase, parts.change, parts.last_checkpoint = Phase.STOPPED, None, None
        parts.context.do(Stop(exit_code=exit_code, reason=reason))
