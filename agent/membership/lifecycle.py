"""The phases of a job and the moves from one to the next.

Each file calls only those before it: what the machine knows (``job_parts.py``), how a job ends (``ends.py``), how one
generation follows another (``regrouping.py``), and here what leads to either.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilient.agent.membership.ends import Ends
from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.agreement import NOTHING, Agreement, agree
from resilient.agent.membership.next_generation.members import Member, WorkerId, log_path
from resilient.agent.membership.parts.context import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    TRAINING,
    Phase,
)
from resilient.agent.membership.parts.ending import Interruption
from resilient.agent.membership.parts.events import Interrupted
from resilient.agent.membership.regrouping import Regrouping
from resilient.protocol.messages import Shutdown

_ONE_WISH_S = 1.0
"""Supervisors send a signal to each process of a group, and some twice: what comes so soon is the same wish."""
_LEAST_COLLECTED_S, _MOST_COLLECTED_S = 1.0, 60.0
"""For so long who could join waits for others who are about to, in between as long as it took to get ready itself."""
_QUIET_S = 0.25
"""For so long nobody must have got ready before several are taken in who did not come as one queue: more may follow."""


class Lifecycle:
    """Moves the job from phase to phase as nodes and workers come, go on, are lost and fail.

    A stimulus's handler tells the parts what happened, then calls :meth:`proceed` for what has become possible.

    Args:
        parts: What the machine knows.
        ends: How the job ends.
        regrouping: How one generation follows another.
    """

    def __init__(self, parts: JobParts, ends: Ends, regrouping: Regrouping) -> None:
        self._parts = parts
        self._ends = ends
        self._regrouping = regrouping

    def proceed(self) -> None:
        """Do what has become possible."""
        parts = self._parts
        if parts.phase is Phase.STARTING:
            self._begin_when_complete()
        elif parts.phase is Phase.INSTALLING and parts.participants.is_installed:
            parts.phase = Phase.RUNNING
            parts.participants.stop_sending()
            self._regrouping.let_go()
            self.proceed()
        elif parts.phase is Phase.RUNNING and not parts.participants.finished:
            self._ask_for_boundary()
        elif parts.phase is Phase.AGREEING and not parts.awaits_anybody:
            assert parts.change is not None
            heard = parts.change.reports
            reports = {worker: heard.get(worker, NOTHING) for worker in parts.context.ready_workers()}
            progress = parts.progress
            agreement = agree(reports, progress.outcome, progress.version, progress.skipped)
            self._regrouping.note_untold_steps(agreement)
            self._regrouping.publish_next(agreement)
        elif parts.phase is Phase.SAVING and not parts.awaits_anybody:
            self._ends.end_saved()
        elif parts.phase is Phase.FINISHED:
            self._ends.stop_when_all_are_gone()

    def _begin_when_complete(self) -> None:
        """Publish the first generation once all expected nodes can be given a place, or stop if they never can."""
        parts = self._parts
        if parts.context.members and parts.start_up.waits_for_workers:
            return
        live, run_directory = list(parts.context.members.values()), parts.context.settings.run_directory
        done = [member.node for member in live if member.is_done]
        log = log_path(run_directory, (done[0], 0)) if done else None
        if not live and parts.start_up.expected <= 0:
            reason = f"all nodes went away, or did not come, before the job began; see {run_directory}/logs"
            self._ends.stop(EXIT_FAILED, reason, None)
        elif done and any(member.ready for member in live):
            self.fail(done[0], f"the script ended without training, while it trains on other nodes; see {log}")
        elif parts.start_up.all_came and len(done) == len(live):
            self._ends.stop(EXIT_DONE, f"the script ended without Trainer.fit, so nothing is trained; see {log}", None)
        elif parts.job.is_known and parts.start_up.all_came and all(member.is_ready for member in live):
            self._regrouping.publish_next(Agreement.of_the_start(parts.progress.version, parts.progress.skipped))

    def _ask_for_boundary(self) -> None:
        """Begin a change at the next step boundary for an interruption, for nodes that join or that leave."""
        parts = self._parts
        if parts.ending.interruption is not None:
            self._regrouping.begin(at_boundary=True, cause="interruption")
            return
        concerned = parts.context.unsettled()
        if not concerned:
            return
        members, joining = parts.context.members, parts.context.joining(concerned)
        leaving = sorted(member.node for member in concerned if member.leaving)
        if leaving or (joining and not self._awaits_others([members[node] for node in joining], concerned)):
            number = parts.context.generation + 1
            parts.context.record("boundary", generation=number, joining=joining, leaving=leaving)
            self._regrouping.begin(at_boundary=True, cause="join" if joining else "leave")

    def _awaits_others(self, joining: Sequence[Member], concerned: Sequence[Member]) -> bool:
        """Return whether others are about to be able to join, too: a change costs as much for many as for one."""
        context = self._parts.context
        first, last = (choose(joining, key=lambda member: member.up_at) for choose in (min, max))
        patience_s = min(max(first.up_at - first.connected_at, _LEAST_COLLECTED_S), _MOST_COLLECTED_S)
        waits_since = self._parts.participants.installed_at  # a change may have kept others from being heard
        if context.now - max(first.up_at, waits_since) >= patience_s:
            return False
        if not _are_all(joining) and context.now - max(last.up_at, waits_since) < _QUIET_S:
            return True
        return any(not (other.admitted or other.leaving or other.is_ready) for other in concerned)

    def evict(self, node: int, cause: str) -> None:
        """Send away a node that does not do its part, and do without it."""
        self._parts.context.tell(node, Shutdown(exit_code=EXIT_FAILED, reason=f"evicted: {cause}"))
        self.lose(node, cause)

    def lose(self, node: int, cause: str) -> None:
        """Do without a node from now on."""
        parts = self._parts
        members = parts.context.members
        if parts.phase is Phase.STOPPED or (member := members.pop(node, None)) is None:
            return
        parts.context.record("node_lost", node=node, cause=cause)
        parts.forget(member)
        if parts.phase is Phase.FINISHED:
            main_node, main_rank = parts.participants.main
            if node == main_node and main_rank not in member.done:  # the others' scripts know that they are not main
                text = f"node {node}, which speaks for the job, was lost before its script ended ({cause})"
                parts.ending.note_failure(text)
            self._ends.stop_when_all_are_gone()
            return
        if parts.phase is Phase.STARTING:
            parts.start_up.expect_one_less(member)
        elif not members and parts.is_complete and not parts.ending.reason:
            self._ends.stop_without_script()
        elif not members:
            self._ends.stop_resumable(f"all nodes are lost, the last one ({node}) because of: {cause}")
        elif self._takes_part(node):
            self._regrouping.begin_failure([node], cause)
        self.proceed()

    def _takes_part(self, node: int) -> bool:
        """Return whether the job cannot go on as it does without a node."""
        parts = self._parts
        if parts.phase is Phase.SAVING:
            return node in {waited for waited, _ in parts.awaiting}  # otherwise it has done its part
        return parts.participants.is_placed(node) or parts.participants.sends(node)

    def err(self, node: int, error: str, kind: str, traceback: str = "") -> None:
        """Do without a node that had an error, as soon as all have reported; end the job if it can only be the job's.

        Args:
            node: Whose error it is.
            error: What happened.
            kind: What tells it from others.
            traceback: Where in the code.
        """
        parts = self._parts
        if node in parts.own_errors.erring:
            return  # another of its workers, or the end of the one
        why = parts.own_errors.why_of_the_job(node, kind) if self._trains_on(node) else ""
        if why is None and not self._may_spare(node):
            why = ""
        if why is not None:
            self.fail(node, f"{error}{why}", traceback)
            return
        parts.own_errors.take(node, kind, error)
        parts.context.record("node_failed", node=node, error=error, traceback=traceback)
        self._regrouping.begin_failure([node], error)

    def crash(self, worker: WorkerId, number: int, cause: str) -> None:
        """End the job if a worker was killed by a signal that can only be of the job's own code.

        Args:
            worker: It is about to be lost.
            number: The signal.
            cause: What is said of it.
        """
        parts, member = self._parts, self._parts.context.members[worker[0]]
        is_outside = parts.participants.plan is not None and not self._is_of_the_job(member)
        if is_outside or parts.phase not in (Phase.STARTING, *TRAINING):
            return
        why = parts.own_errors.take_crash(member, number)
        if why:
            log = log_path(parts.context.settings.run_directory, worker)
            self.fail(worker[0], f"a {cause}{why}; see {log}")

    def _trains_on(self, node: int) -> bool:
        """Return whether the job trains, and that node, too."""
        member = self._parts.context.members.get(node)
        return self._parts.phase in TRAINING and member is not None and self._is_of_the_job(member)

    def _is_of_the_job(self, member: Member) -> bool:
        """Return whether the job may fail of what a node says: not of one that joins, or that stands by."""
        return member.admitted and (self._parts.phase not in TRAINING or self._takes_part(member.node))

    def _may_spare(self, node: int) -> bool:
        """Return whether enough others are left without a node, as far as is known."""
        parts = self._parts
        if parts.ending.failure:
            return False
        left = set(parts.context.available()) - {node, *parts.own_errors.erring}
        return parts.ending.interruption is not None or len(left) >= parts.ending.needed_nodes

    def fail(self, node: int, error: str, traceback: str = "") -> None:
        """End the job because its own code failed, after saving what it has done so far."""
        parts = self._parts
        if parts.ending.failure:
            return  # others fail of the same, or end because they were told to
        member = parts.context.members.get(node)
        others_know = parts.participants.plan is not None or parts.job.is_known or parts.start_up.has_own
        is_late = parts.participants.plan is not None or (member is not None and member.is_guest)
        if member is not None and others_know and is_late and not self._is_of_the_job(member):
            if member.admitted:
                self._regrouping.send_away(node, f"stood by and failed: {error}")
            else:
                parts.refuse(member, error)
            if parts.phase in (Phase.STARTING, *TRAINING):
                self.proceed()
            return
        parts.context.record("failed", node=node, error=error, traceback=traceback)
        parts.ending.note_failure(f"node {node}: {error}")
        if parts.phase in TRAINING and parts.participants.placed():
            self._regrouping.begin(at_boundary=False, cause="failure")
        elif parts.phase is not Phase.SAVING:
            how = parts.how_to_resume if parts.phase is Phase.FINISHED else ""
            self._ends.stop(EXIT_FAILED, f"{parts.ending.failure}{how}", parts.checkpoints.newest_path)

    def interrupt(self, event: Interrupted) -> None:
        """End the job after the running step, with a checkpoint; at once when that is asked for again, later."""
        parts, reason = self._parts, event.reason
        exit_code = EXIT_RESUMABLE if event.is_orphaned else EXIT_INTERRUPTED
        before = parts.ending.interruption
        if before is not None and parts.context.now - before.at < _ONE_WISH_S:
            return
        is_second = before is not None
        if is_second or parts.phase not in (*TRAINING, Phase.SAVING):
            text = f"interrupted {'twice ' if is_second else ''}({reason})"
            self._ends.stop(exit_code, f"{text}{parts.how_to_resume}", parts.checkpoints.newest_path)
            return
        interruption = parts.ending.interrupt(reason, exit_code)
        if parts.change is not None:
            parts.change.hurry(interruption.step_deadline)

    def end_interrupted_in_time(self, interruption: Interruption) -> None:
        """Give up the running step, and later the checkpoint, when they take too long."""
        parts = self._parts
        now = parts.context.now
        if now >= interruption.deadline:
            grace_s = parts.context.settings.grace_s
            reason = f"{interruption.reason}; the checkpoint was not written within {grace_s:g} s"
            self._ends.stop(interruption.exit_code, f"{reason}{parts.how_to_resume}", parts.checkpoints.newest_path)
        elif parts.change is not None and parts.change.at_boundary and now >= interruption.step_deadline:
            self._regrouping.begin(at_boundary=False, cause="interruption")


def _are_all(joining: Sequence[Member]) -> bool:
    """Return whether nobody is to be expected after these: each but the last had others behind it, or one came alone.

    Args:
        joining: In the order in which they came.
    """
    return not joining[-1].num_behind and all(member.num_behind for member in joining[:-1])
