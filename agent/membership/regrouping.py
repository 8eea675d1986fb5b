"""From one generation to the next: everybody is asked to regroup, reports, and is given its place."""

from __future__ import annotations

from resilient.agent.membership.ends import JobEnds
from resilient.agent.membership.next_generation.agreement import Agreement
from resilient.agent.membership.next_generation.forming import (
    NextGeneration,
    describe,
    form,
    message_for,
    why_too_few,
)
from resilient.agent.membership.next_generation.members import available
from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.context import (
    EXIT_FAILED,
    Phase,
)
from resilient.agent.membership.parts.stalls import why_in_vain
from resilient.errors import StateLostError
from resilient.protocol.messages import Regroup, StepOutcome
from resilient.templates.search.template_sizes import TooFewNodes


class Regrouping(JobEnds):
    """Begins changes of membership and publishes what was agreed on; ends the job where no generation can follow."""

    def begin_failure(self, nodes: list[int], cause: str) -> None:
        """Leave the step under way at once, unless that is being done; for nodes that were lost, or for none."""
        if self._change is None or self._change.at_boundary:
            number, step = self.context.generation + 1, self.progress.step
            self.context.record("detected", generation=number, nodes=nodes, cause=cause, step=step)
            self._begin(at_boundary=False, cause="failure")
        assert self._change is not None
        self._change.note_losses(nodes)

    def begin_stall(self) -> None:
        """Have all workers report when none has advanced for too long: who hangs does not."""
        for_step = self._change.at_boundary if self._change else self._phase in (Phase.INSTALLING, Phase.RUNNING)
        if not for_step:
            return
        assert self.participants.plan is not None
        comm_timeout_s = self.job.spec.comm_timeout_s
        stalled_s = self.stalls.stalled_s(self.participants.plan, comm_timeout_s)
        if stalled_s:
            self.begin_failure([], f"no step done for {stalled_s:.0f} s")
            assert self._change is not None
            self._change.note_stall(stalled_s, self.context.now + comm_timeout_s)

    def _begin(self, *, at_boundary: bool, cause: str) -> None:
        """Ask everybody for a new generation, or for the same one at once instead of at the boundary."""
        patience_s, interruption = self.context.settings.report_timeout_s, self.ending.interruption
        if interruption is not None:  # who does not report must leave the others time for the checkpoint
            patience_s = min(patience_s, (interruption.deadline - self.context.now) / 2)
        deadline = self.context.now + patience_s
        self._change = Change(
            self.context, at_boundary=at_boundary, cause=cause, deadline=deadline, before=self._change
        )
        self._phase, self._last_checkpoint = Phase.AGREEING, None
        self.participants.stop_sending()
        message = Regroup(generation=self._change.generation, at_boundary=at_boundary)
        for member in self.context.members.values():
            if member.admitted:
                self.context.send_node(member.node, message)

    def _publish_next(self, agreement: Agreement) -> None:
        """Publish the generation that was agreed on, or stop if there can be none."""
        change, members = self._change, self.context.members
        if self.ending.reason:
            self._save_and_stop(agreement, self.ending.reason)
            return
        if change is not None and change.cause == "failure":
            self.stalls.note_failure(change)
        plan, problem = self.participants.plan, self.job.problem
        if plan is not None and change is not None:
            self.speeds.observe(problem.profile, plan, change.reports)
        try:
            formed = form(problem, plan, members, agreement, self.checkpoints.whole, self.speeds.slowdowns)
        except TooFewNodes as error:
            self.ending.need(error.needed)
            self._save_and_stop(agreement, why_too_few(available(members.values()), error.needed))
        except StateLostError as error:
            self._save_and_stop(agreement, str(error))
        except ValueError as error:
            self.stop(EXIT_FAILED, str(error), self.checkpoints.newest_path)
        else:
            if self.stalls.is_in_vain:
                self._save_and_stop(agreement, why_in_vain(change))
            else:
                self._publish(formed, agreement.begun)

    def _note_unreported_step(self, outcome: StepOutcome | None) -> None:
        """Record a step whose reporter died between committing it and saying so."""
        if outcome is None or outcome.step <= self.progress.step:
            return
        self.progress.learn(outcome)
        self.context.record(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            num_samples=self.job.spec.global_batch,
            step_ms=None,
            learning_rate=None,
        )

    def _publish(self, formed: NextGeneration, begun: bool) -> None:
        cause = self._change.cause if self._change else ("resume" if self.context.settings.resume else "start")
        number = self.context.next_generation()
        self._phase, self._change = Phase.INSTALLING, None
        self.progress.enter(formed, begun=begun)
        self.participants.enter(formed)
        self.checkpoints.enter_generation()
        self.stalls.advance()
        self.ending.need(formed.needed_nodes)
        if formed.lost:
            self.context.record(
                "output", text=f"nobody holds {', '.join(formed.lost)}: everybody loads {formed.source}"
            )
        self._let_go()
        members = self.context.members
        description = describe(formed, members, self.speeds.slowdowns)
        self.context.record("generation", cause=cause, lost_steps=int(self.progress.redoing), **description)
        for worker in self.context.ready_workers():
            members[worker[0]].admitted = True
            self.context.send(worker, message_for(worker, number, formed, members))
        self.job.ask(len(available(members.values())))

    def _let_go(self) -> None:
        """Dismiss the nodes that leave, once nothing is taken from them any more."""
        for member in list(self.context.members.values()):
            node = member.node
            if member.leaving and not self.participants.sends(node) and not self.participants.is_placed(node):
                self.dismiss(member, "left")
