"""The phases of a job and the moves from one to the next: the parts of the membership machine wired together."""

from __future__ import annotations

from resilient.agent.membership.change import Change
from resilient.agent.membership.checkpoints import Checkpoints, LastCheckpoint
from resilient.agent.membership.context import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    TRAINING,
    Context,
    Phase,
    Settings,
)
from resilient.agent.membership.ending import Ending, Interruption
from resilient.agent.membership.events import Stop
from resilient.agent.membership.injections import Injections
from resilient.agent.membership.next_generation.agreement import NOTHING, Agreement, agree, share_out, uncovered
from resilient.agent.membership.next_generation.forming import (
    NextGeneration,
    describe,
    form,
    message_for,
    source_at,
    why_too_few,
)
from resilient.agent.membership.next_generation.members import Member, WorkerId, available, log_path
from resilient.agent.membership.next_generation.speeds import NodeSpeeds
from resilient.agent.membership.planned_job import PlannedJob
from resilient.agent.membership.stalls import Stalls, why_in_vain
from resilient.agent.membership.start_up import StartUp
from resilient.agent.membership.training import Participants, Progress
from resilient.errors import StateLostError
from resilient.protocol.messages import Finish, Regroup, Save, Shutdown, StepOutcome
from resilient.templates.search.template_sizes import TooFewNodes


class Lifecycle:
    """Moves the job from phase to phase; each of its parts owns what it knows, and nobody else writes it.

    A stimulus's handler tells the parts what happened, then calls :meth:`proceed` for what has become possible.
    """

    def __init__(self, settings: Settings) -> None:
        self.context = Context(settings)
        self.start_up = StartUp(self.context)
        self.job = PlannedJob(self.context)
        self.participants = Participants(self.context)
        self.progress = Progress(settings.resume[1].step if settings.resume else 0)
        self.speeds = NodeSpeeds()
        self.stalls = Stalls(self.context)
        self.checkpoints = Checkpoints(self.context)
        self.injections = Injections(self.context)
        self.ending = Ending(self.context)
        self._phase = Phase.STARTING
        self._change: Change | None = None
        self._last_checkpoint: LastCheckpoint | None = None

    # ------------------------------------------------------------ looking

    @property
    def phase(self) -> Phase:
        """Where the job is."""
        return self._phase

    @property
    def change(self) -> Change | None:
        """The change of membership under way, while agreeing."""
        return self._change

    @property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The checkpoint that the job waits for before it stops, while saving."""
        return self._last_checkpoint

    @property
    def awaiting(self) -> set[WorkerId]:
        """The workers whose report or saved part is waited for."""
        if self._last_checkpoint is not None:
            return set(self._last_checkpoint.awaiting)
        if self._change is None:
            return set()
        members = self.context.members
        standing_by = {worker for worker in self.context.ready_workers() if members[worker[0]].admitted}
        return (
            self.participants.placed() | standing_by
        ) - self._change.reports.keys()  # who stands by may hold a state

    @property
    def how_to_resume(self) -> str:
        """What to add to the reason of a stop."""
        path, step = self.checkpoints.newest_path, self.progress.step
        return self.ending.how_to_resume(path, has_job=self.job.is_known, step=step)

    def is_needed(self, node: int) -> bool:
        """Return whether others may still want what a node holds: it trains, or a change is under way."""
        changing = self._phase in (Phase.AGREEING, Phase.INSTALLING, Phase.SAVING)
        return self.participants.is_placed(node) or (changing and self.context.members[node].admitted)

    # ------------------------------------------------------------ going on

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

    # ------------------------------------------------------------ from one generation to the next

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

    # ------------------------------------------------------------ losses

    def dismiss(self, member: Member, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Let a node go; it is no loss."""
        self.context.dismiss(member, reason, exit_code)
        self._forget(member.node)

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

    def _forget(self, node: int) -> None:
        if self._change is not None:
            self._change.forget(node)

    # ------------------------------------------------------------ ends

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
