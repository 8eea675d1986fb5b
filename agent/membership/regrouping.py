"""From one generation to the next: everybody is asked to regroup, reports, and is given its place."""

from __future__ import annotations

from collections.abc import Collection

from resilient.agent.membership.ends import Ends
from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.agreement import Agreement, uncovered
from resilient.agent.membership.next_generation.forming import (
    NextGeneration,
    describe,
    form,
    message_for,
    why_so_many,
    why_too_few,
)
from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.context import (
    EXIT_FAILED,
    Phase,
)
from resilient.errors import StateLostError
from resilient.protocol.messages import Regroup
from resilient.templates.search.template_sizes import TooFewNodes


class Regrouping:
    """Begins changes of membership and publishes what was agreed on; ends the job where no generation can follow.

    Args:
        parts: What the machine knows.
        ends: How the job ends.
    """

    def __init__(self, parts: JobParts, ends: Ends) -> None:
        self._parts = parts
        self._ends = ends

    def begin_failure(self, nodes: list[int], cause: str) -> None:
        """Leave the step under way at once, unless that is being done; for nodes that were lost, or for none."""
        parts = self._parts
        if parts.change is None or parts.change.at_boundary:
            number, step = parts.context.generation + 1, parts.progress.step
            parts.context.record("detected", generation=number, nodes=nodes, cause=cause, step=step)
            self.begin(at_boundary=False, cause="failure")
        assert parts.change is not None
        parts.change.note_losses(nodes)

    def begin_stall(self) -> None:
        """Have all workers report when none has advanced for too long: who hangs does not."""
        parts = self._parts
        if parts.change is not None and parts.change.waits_for_nodes:
            return
        for_step = parts.change.at_boundary if parts.change else parts.phase in (Phase.INSTALLING, Phase.RUNNING)
        if not for_step:
            return
        assert parts.participants.plan is not None
        comm_timeout_s = parts.job.spec.comm_timeout_s
        stalled_s = parts.stalls.stalled_s(parts.participants.plan, comm_timeout_s)
        if stalled_s:
            self.begin_failure([], f"no step done for {stalled_s:.0f} s")
            assert parts.change is not None
            parts.change.note_stall(stalled_s, parts.context.now + comm_timeout_s)

    def begin(self, *, at_boundary: bool, cause: str) -> None:
        """Ask everybody for a new generation, or for the same one at once instead of at the boundary."""
        parts = self._parts
        patience_s, interruption = parts.context.settings.report_timeout_s, parts.ending.interruption
        if interruption is not None:  # who does not report must leave the others time for the checkpoint
            patience_s = min(patience_s, (interruption.deadline - parts.context.now) / 2)
        deadline = parts.context.now + patience_s
        parts.change = Change(
            parts.context, at_boundary=at_boundary, cause=cause, deadline=deadline, before=parts.change
        )
        parts.phase, parts.last_checkpoint = Phase.AGREEING, None
        parts.participants.stop_sending()
        heard_step = parts.progress.step
        message = Regroup(generation=parts.change.generation, at_boundary=at_boundary, heard_step=heard_step)
        for member in parts.context.members.values():
            if member.admitted:
                parts.context.send_node(member.node, message)

    def publish_next(self, agreement: Agreement) -> None:
        """Publish the generation that was agreed on, or stop if there can be none."""
        parts = self._parts
        change, members = parts.change, parts.context.members
        if not parts.ending.reason:
            agreement = self._without_erring(agreement)
        if parts.ending.reason:
            self._ends.save_and_stop(agreement, parts.ending.reason)
            return
        if change is not None and parts.is_complete and not any(member.admitted for member in members.values()):
            self._ends.stop_without_script()
            return
        if change is not None and self._is_last(agreement):
            self._ends.save_and_finish(agreement)
            return
        if change is not None and self._waits_for_nodes(change):
            return
        if change is not None and change.cause == "failure":
            parts.suspicions.note_failure(change)
            agreement = self._without_suspect(agreement)
        plan, problem = parts.participants.plan, parts.job.problem
        if plan is not None and change is not None:
            parts.speeds.observe(problem.profile, plan, change.reports)
        try:
            formed = form(
                problem,
                plan,
                members,
                agreement,
                parts.checkpoints.whole,
                parts.speeds.slowdowns,
                parts.context.settings.most_nodes,
            )
        except TooFewNodes as error:
            parts.ending.need(error.needed)
            if change is None and parts.start_up.waits_for(error.needed - error.live):
                return
            why = why_too_few(parts.context.available(), error.needed)
            if change is None:  # whoever has just started it may have meant another number, or another job
                why += why_so_many(problem, error.needed)
            self._ends.save_and_stop(agreement, why)
        except StateLostError as error:
            self._ends.save_and_stop(agreement, str(error))
        except ValueError as error:
            self._ends.stop(EXIT_FAILED, str(error), parts.checkpoints.newest_path)
        else:
            if parts.suspicions.is_in_vain:
                self._ends.save_and_stop(agreement, parts.suspicions.why_in_vain(change))
            else:
                self._publish(formed, agreement.begun)

    def _without_erring(self, agreement: Agreement) -> Agreement:
        """Let the nodes go that had errors of their own; the job has failed if it cannot go on without them."""
        parts = self._parts
        erring = parts.own_errors.erring
        if erring and not self._can_spare(erring, agreement):
            node, error = next(iter(erring.items()))
            parts.context.record("failed", node=node, error=error, traceback="")
            parts.ending.note_failure(f"node {node}: {error}")
            return agreement
        for node, error in erring.items():
            self.send_away(node, error)
        return agreement.without(erring)

    def _without_suspect(self, agreement: Agreement) -> Agreement:
        """Let the node go whose links end one generation after the other, if there is one that can be spared."""
        parts = self._parts
        suspect = parts.suspicions.worst(parts.context.members)
        if suspect is None or parts.suspicions.is_in_vain or not self._can_spare([suspect], agreement):
            return agreement
        cause = f"its connections to {parts.suspicions.links_of(suspect)} keep failing, and no step is done"
        self.send_away(suspect, cause)
        return agreement.without([suspect])

    def _can_spare(self, nodes: Collection[int], agreement: Agreement) -> bool:
        """Return whether the job can go on without some nodes, and loses no state with them."""
        parts, profile = self._parts, self._parts.job.spec.profile
        left = [node for node in parts.context.available() if node not in nodes]
        lost = uncovered(profile, agreement.without(nodes).held.values())
        return len(left) >= parts.ending.needed_nodes and lost == uncovered(profile, agreement.held.values())

    def send_away(self, node: int, cause: str) -> None:
        """Let a node go that is of no use to the others, and that nothing is waited for of."""
        parts = self._parts
        if node in parts.context.members:
            parts.context.record("node_lost", node=node, cause=cause)
            parts.dismiss(parts.context.members[node], cause, EXIT_FAILED)

    def _is_last(self, agreement: Agreement) -> bool:
        """Return whether all steps are done, and their result is saved or can be: nobody has to train for it."""
        parts, job = self._parts, self._parts.job.spec
        if agreement.version != job.num_steps:
            return False
        return parts.is_complete or not uncovered(job.profile, agreement.held.values())

    def _waits_for_nodes(self, change: Change) -> bool:
        """Return whether too few nodes are there and more may come in time; record once who is waited for.

        The survivors hold the states meanwhile, out of all communication.
        """
        parts, wait_s = self._parts, self._parts.context.settings.wait_for_nodes_s
        members = parts.context.members.values()
        num_missing = parts.ending.needed_nodes - len(parts.context.available())
        if num_missing <= 0 or not wait_s:
            return False
        coming = [member.node for member in members if not member.is_ready and not member.leaving]
        if not change.waits_for_nodes:
            change.wait_for_nodes(parts.context.now + wait_s)
            parts.context.record("too_few", num_missing=num_missing, coming=coming, wait_s=wait_s)
        return not change.has_waited or len(coming) >= num_missing

    def note_untold_steps(self, agreement: Agreement) -> None:
        """Record the steps, up to the one agreed on, whose reporter was lost before it could tell."""
        parts, outcome = self._parts, agreement.outcome
        assert parts.change is not None
        for step in range(parts.progress.step + 1, agreement.version + 1):
            done = parts.change.done(step)
            if done is not None:
                parts.note_step(done)
        if outcome is not None and outcome.step > parts.progress.step:  # who did it failed before it noted when
            parts.progress.commit(outcome)
            parts.checkpoints.note_outcome(outcome)

    def _publish(self, formed: NextGeneration, begun: bool) -> None:
        parts = self._parts
        cause = parts.change.cause if parts.change else ("resume" if parts.context.settings.resume else "start")
        number = parts.context.next_generation()
        if parts.risk.since is None:
            parts.risk.since = parts.context.now
        if cause == "failure":
            parts.risk.note_failure(goes_back=bool(formed.lost))
        parts.phase, parts.change = Phase.INSTALLING, None
        parts.checkpoints.enter_generation(parts.progress.version, formed.version, parts.job.spec)
        parts.progress.enter(formed, begun=begun)
        parts.participants.enter(formed)
        parts.own_errors.enter_generation()
        parts.stalls.advance()
        parts.ending.need(formed.needed_nodes)
        if formed.lost:
            parts.context.record(
                "output", text=f"nobody holds {', '.join(formed.lost)}: everybody loads {formed.source}"
            )
        if not formed.transfers:
            self.let_go()
        members, checkpoint_due = parts.context.members, parts.checkpoints.is_due(formed.version, parts.job.spec)
        description = describe(formed, members, parts.speeds.slowdowns)
        pace = parts.checkpoints.pace(parts.risk, parts.job.spec)
        if pace is not None:
            description["checkpoint_pace"] = {"risk_s": pace.risk_s, "cost_s": pace.cost_s}
        parts.context.record("generation", cause=cause, lost_steps=int(parts.progress.redoing), **description)
        for worker in parts.context.ready_workers():
            members[worker[0]].admitted = True
            message = message_for(worker, number, formed, members, checkpoint_due=checkpoint_due, pace=pace)
            parts.context.send(worker, message)
        parts.job.ask(len(parts.context.available()))

    def let_go(self) -> None:
        """Dismiss the nodes that leave: once all copies have arrived, for until then what they hold may be the last."""
        parts = self._parts
        for member in list(parts.context.members.values()):
            node = member.node
            if member.leaving and not parts.participants.sends(node) and not parts.participants.is_placed(node):
                parts.dismiss(member, "left")
