"""The phases of a job and the moves from one to the next.

In layers, of which each calls only those before it: the parts and what is seen of them (``job_parts.py``), how a job
ends (``ends.py``), how one generation follows another (``regrouping.py``), and here what leads to either.
"""

from __future__ import annotations

from resilient.agent.membership.next_generation.agreement import NOTHING, Agreement, agree
from resilient.agent.membership.next_generation.members import available, log_path
from resilient.agent.membership.parts.context import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    TRAINING,
    Phase,
)
from resilient.agent.membership.parts.ending import Interruption
from resilient.agent.membership.regrouping import Regrouping
from resilient.protocol.messages import Shutdown


class Lifecycle(Regrouping):
    """Moves the job from phase to phase as nodes and workers come, go on, are lost and fail.

    A stimulus's handler tells the parts what happened, then calls :meth:`proceed` for what has become possible.
    """

    def proceed(self) -> None:
        """Do what has become possible."""
        if self._phase is Phase.STARTING:
            self._begin_when_complete()
        elif self._phase is Phase.INSTALLING and self.participants.is_installed:
            self._phase = Phase.RUNNING
            self.participants.stop_sending()
            self._let_go()
            self.proceed()
        elif self._phase is Phase.RUNNING and not self.participants.finished:
            self._ask_for_boundary()
        elif self._phase is Phase.AGREEING and not self.awaiting:
            assert self._change is not None
            reports = {w: self._change.reports.get(w, NOTHING) for w in self.context.ready_workers()}
            agreement = agree(reports, self.progress.outcome, self.progress.version)
            self._note_unreported_step(agreement.outcome)
            self._publish_next(agreement)
        elif self._phase is Phase.SAVING and not self.awaiting:
            assert self._last_checkpoint is not None
            self.stop_resumable(self._last_checkpoint.reason)

    def _begin_when_complete(self) -> None:
        """Publish the first generation once all expected nodes can be given a place, or stop if they never can."""
        live, run_directory = list(self.context.members.values()), self.context.settings.run_directory
        done = [member.node for member in live if member.is_done]
        log = log_path(run_directory, (done[0], 0)) if done else None
        if not live and self.start_up.expected <= 0:
            reason = f"all nodes went away, or did not come, before the job began; see {run_directory}/logs"
            self.stop(EXIT_FAILED, reason, None)
        elif done and any(member.ready for member in live):
            self.fail(done[0], f"the script ended without training, while it trains on other nodes; see {log}")
        elif self.start_up.all_came and len(done) == len(live):
            self.stop(EXIT_DONE, f"the script ended without Trainer.fit, so nothing is trained; see {log}", None)
        elif self.job.is_known and self.start_up.all_came and all(member.is_ready for member in live):
            self._publish_next(Agreement(version=self.progress.version, outcome=None, roll_forward=None, held={}))

    def _ask_for_boundary(self) -> None:
        """Begin a change at the next step boundary for an interruption, for nodes that join or that leave."""
        if self.ending.interruption is not None:
            self._begin(at_boundary=True, cause="interruption")
            return
        members = self.context.members
        joining = [node for node in available(members.values()) if not members[node].admitted]
        leaving = [node for node in sorted(members) if members[node].leaving]
        if joining or leaving:
            number = self.context.generation + 1
            self.context.record("boundary", generation=number, joining=joining, leaving=leaving)
            self._begin(at_boundary=True, cause="join" if joining else "leave")

    def evict(self, node: int, cause: str) -> None:
        """Send away a node that does not do its part, and do without it."""
        self.context.tell(node, Shutdown(exit_code=EXIT_FAILED, reason=f"evicted: {cause}"))
        self.lose(node, cause)

    def lose(self, node: int, cause: str) -> None:
        """Do without a node from now on."""
        members = self.context.members
        if self._phase is Phase.STOPPED or (member := members.pop(node, None)) is None:
            return
        self.context.record("node_lost", node=node, cause=cause)
        self._forget(node)
        if self._phase is Phase.FINISHED:
            if self.participants.speaks(node) and not member.is_done:
                text = f"node {node}, which speaks for the job, was lost before its script ended ({cause})"
                self.ending.note_failure(text)
            self.stop_when_all_are_gone()
            return
        if self._phase is Phase.STARTING:
            self.start_up.expect_one_less()
        elif not members:
            self.stop_resumable(f"all nodes are lost, the last one ({node}) because of: {cause}")
        elif self._takes_part(node):
            self.begin_failure([node], cause)
        self.proceed()

    def _takes_part(self, node: int) -> bool:
        """Return whether the job cannot go on as it does without a node."""
        if self._phase is Phase.SAVING:
            return node in {waited for waited, _ in self.awaiting}  # otherwise it has done its part
        return self.participants.is_placed(node) or self.participants.sends(node)

    def fail(self, node: int, error: str, traceback: str = "") -> None:
        """End the job because its own code failed, after saving what it has done so far."""
        if self.ending.failure:
            return  # others fail of the same, or end because they were told to
        member = self.context.members.get(node)
        if self.participants.plan is not None and member is not None and not member.admitted:
            self.context.record("node_lost", node=node, cause=f"cannot join: {error}")
            self.dismiss(member, f"cannot join: {error}", exit_code=EXIT_FAILED)
            return
        self.context.record("failed", node=node, error=error, traceback=traceback)
        self.ending.note_failure(f"node {node}: {error}")
        if self._phase in TRAINING and self.participants.placed():
            self._begin(at_boundary=False, cause="failure")
        elif self._phase is not Phase.SAVING:
            self.stop(EXIT_FAILED, self.ending.failure, self.checkpoints.newest_path)

    def interrupt(self, reason: str) -> None:
        """End the job after the running step, with a checkpoint; at once when that is asked for again."""
        is_second = self.ending.interruption is not None
        if is_second or self._phase not in (*TRAINING, Phase.SAVING):
            text = f"interrupted {'twice ' if is_second else ''}({reason})"
            self.stop(EXIT_INTERRUPTED, f"{text}{self.how_to_resume}", self.checkpoints.newest_path)
            return
        interruption = self.ending.interrupt(reason)
        if self._change is not None:
            self._change.hurry(interruption.step_deadline)

    def end_interrupted_in_time(self, interruption: Interruption) -> None:
        """Give up the running step, and later the checkpoint, when they take too long."""
        now = self.context.now
        if now >= interruption.deadline:
            grace_s = self.context.settings.grace_s
            reason = f"{interruption.reason}; the checkpoint was not written within {grace_s:g} s"
            self.stop(EXIT_INTERRUPTED, f"{reason}{self.how_to_resume}", self.checkpoints.newest_path)
        elif self._change is not None and self._change.at_boundary and now >= interruption.step_deadline:
            self._begin(at_boundary=False, cause="interruption")
