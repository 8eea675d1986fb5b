"""The membership machine: who takes part, which generation is the current one, how one follows another.

Pure: events in, instructions out; the clock is an argument. Every change goes the same way: ``Regroup(g + 1)`` to all
workers, a ``Report`` from each placed one, an agreement (:mod:`resilient.agent.membership.agreement`), a plan
(:mod:`resilient.agent.membership.forming`), ``Generation(g + 1)``. A further loss before that shrinks the set that is
waited for; one after it begins g + 2. Messages of other generations are ignored.
"""

from __future__ import annotations

from functools import singledispatchmethod

from resilient.agent.membership.agreement import NOTHING, agree, uncovered
from resilient.agent.membership.events import (
    FailureWanted,
    Instruction,
    Interrupted,
    ManifestFailed,
    NodeConnected,
    NodeLeaving,
    NodeLost,
    PlansPrepared,
    Send,
    Stimulus,
    StopWanted,
    Tell,
    Tick,
    WorkerEnded,
    WorkerId,
    WorkerSaid,
)
from resilient.agent.membership.members import Member, log_path
from resilient.agent.membership.state import EXIT_DONE, EXIT_FAILED, Phase
from resilient.agent.membership.waiting import ADVANCES, Waiting
from resilient.protocol.messages import (
    Arm,
    Failed,
    Finished,
    Installed,
    Kill,
    Note,
    NotSaved,
    Output,
    Ready,
    Report,
    Saved,
    Shutdown,
    StepDone,
    StepOutcome,
    Suspect,
    Welcome,
)
from resilient.state.manifest import folder


class Membership(Waiting):
    """The machine. Feed it events with :meth:`handle`, in the order in which they happen."""

    def handle(self, event: Stimulus, now: float) -> list[Instruction]:
        """Take in one event; return what is to be done, in this order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        self._now = now
        self._out = []
        if self.phase is not Phase.STOPPED or isinstance(event, ManifestFailed):
            self._on(event)
        elif isinstance(event, NodeConnected):  # it was on its way when the job stopped
            self._out.append(Tell(node=event.node, message=Shutdown(exit_code=EXIT_DONE, reason="the job is over")))
        return self._out

    # ------------------------------------------------------------ events

    @singledispatchmethod
    def _on(self, event: Stimulus) -> None:
        raise TypeError(f"unknown event {event}")

    @_on.register
    def _(self, event: NodeConnected) -> None:
        settings = self.settings
        self._record("node_connected", node=event.node, host=event.host, pid=event.pid, domain=event.domain)
        self._out.append(
            Tell(
                node=event.node,
                message=Welcome(
                    node=event.node,
                    fresh=True,
                    script=settings.script,
                    arguments=settings.arguments,
                    directory=settings.directory,
                    run_directory=settings.run_directory,
                    heartbeat_s=settings.heartbeat_s,
                    num_nodes=settings.num_nodes,
                    trace=settings.trace,
                ),
            )
        )
        self.members[event.node] = Member(
            node=event.node, host=event.host, pid=event.pid, num_workers=event.num_workers, domain=event.domain
        )
        if event.num_workers != settings.workers_per_node:
            reason = f"workers per node must be {settings.workers_per_node} in this job, got {event.num_workers}"
            self._dismiss(self.members[event.node], reason, exit_code=EXIT_FAILED)
        elif self.phase in (Phase.FINISHED, Phase.SAVING):
            self._dismiss(self.members[event.node], "the job is over")

    @_on.register
    def _(self, event: NodeLost) -> None:
        self._lose(event.node, event.cause)

    @_on.register
    def _(self, event: NodeLeaving) -> None:
        member = self.members.get(event.node)
        if member is None or member.leaving:
            return
        self._record("node_leaving", node=event.node, reason=event.reason)
        member.leaving = True
        if self.phase is Phase.STARTING:
            self._expected -= 1
        if not self._is_needed(event.node):
            self._dismiss(member, "left")
        self._proceed()

    @_on.register
    def _(self, event: WorkerEnded) -> None:
        member = self.members.get(event.node)
        if member is None:
            return
        if event.exit_code < 0:
            if self.phase is Phase.FINISHED:
                member.done.add(event.local_rank)
            self._lose(event.node, f"worker killed by signal {-event.exit_code}")
        elif event.exit_code > 0:
            log = log_path(self.settings.run_directory, (event.node, event.local_rank))
            self._fail(event.node, event.error or f"a worker ended with exit code {event.exit_code}; see {log}")
            self._lose(event.node, f"worker ended with exit code {event.exit_code}")
        else:
            member.done.add(event.local_rank)
            self._worker_is_done(event)

    @_on.register
    def _(self, event: WorkerSaid) -> None:
        if event.node in self.members:
            if isinstance(event.message, ADVANCES):
                self._advanced_at = self._now
            self._hear(event.message, (event.node, event.local_rank))

    @_on.register
    def _(self, event: FailureWanted) -> None:
        injection = event.injection
        member = self.members.get(injection.node)
        if member is None or not member.is_up:
            self._injections.append(injection)
        elif injection.at_step is None and injection.at_phase is None:
            self._out.append(Tell(node=injection.node, message=Kill(injection=injection)))
        else:
            local_rank = 0 if injection.worker_only else None
            self._out.append(Send(node=injection.node, local_rank=local_rank, message=Arm(injection=injection)))

    @_on.register
    def _(self, event: PlansPrepared) -> None:
        self._take_plans(event.num_nodes)
        self._proceed()

    @_on.register
    def _(self, event: Interrupted) -> None:
        self._interrupt(event.reason)
        self._proceed()

    @_on.register
    def _(self, event: ManifestFailed) -> None:
        self._miss_checkpoint(event.path, event.error)

    @_on.register
    def _(self, event: StopWanted) -> None:
        self._stop(event.exit_code, f"{event.reason}{self._how_to_resume()}", self._newest_path())

    @_on.register
    def _(self, event: Tick) -> None:
        if self.phase is Phase.STARTING:
            for node in self._too_late():
                self._evict(node, f"not ready within {self.settings.start_timeout_s:g} s; see its log")
            self._proceed()
        elif self._interruption is not None:
            self._end_interrupted_in_time(self._interruption)
        self._notice_stall()
        change, saving = self._change, self._saving
        if saving is not None and self._now >= saving.deadline:
            self._stop_resumable(f"{saving.reason}; the checkpoint of step {saving.step} was not written in time")
        elif change is not None and not change.at_boundary:
            for node, cause in self._silent(change).items():
                self._evict(node, cause)

    # ------------------------------------------------------------ messages of workers

    @singledispatchmethod
    def _hear(self, message: object, worker: WorkerId) -> None:
        raise TypeError(f"unknown message {message}")

    @_hear.register
    def _(self, message: Ready, worker: WorkerId) -> None:
        member = self.members[worker[0]]
        if self.job is None and not self._accept_job(message.job):
            return
        assert self.job is not None
        if message.job.digest != self.job.digest:
            self._fail(
                member.node,
                "all workers must build the same job, got another model, batch or number of steps than on the first "
                "worker; start the same script with the same arguments and code on all nodes",
            )
            return
        needed, own = self.job.memory_bytes, message.job.memory_bytes
        if needed is not None and own is not None and own < needed:
            self._fail(
                member.node,
                f"devices must have at least {needed} bytes of memory, those of the first worker, got {own}; "
                f"start with a node of the least memory, or use equal nodes",
            )
            return
        member.ready[worker[1]] = message
        if member.is_up:
            self._await_plans(member)
            pids = [member.ready[local_rank].pid for local_rank in range(member.num_workers)]
            self._record("node_ready", node=member.node, pids=pids, device=message.device)
            waiting = [injection for injection in self._injections if injection.node == member.node]
            self._injections = [injection for injection in self._injections if injection.node != member.node]
            for injection in waiting:
                self._on(FailureWanted(injection=injection))
            self._proceed()

    @_hear.register
    def _(self, message: Suspect, worker: WorkerId) -> None:
        if message.generation == self.generation and self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING):
            self._begin_failure([], f"communication failed: {message.reason}")

    @_hear.register
    def _(self, message: Report, worker: WorkerId) -> None:
        if self._change is not None and message.generation == self._change.generation:
            self._change.reports[worker] = message.progress
            self._proceed()

    @_hear.register
    def _(self, message: Installed, worker: WorkerId) -> None:
        if message.generation != self.generation:
            return
        self._record(
            "installed",
            node=worker[0],
            local_rank=worker[1],
            started_at=message.started_at,
            regrouped_at=message.regrouped_at,
            installed_at=message.installed_at,
            bytes_copied=message.bytes_copied,
        )
        self._installed.add(worker)
        if self.phase is Phase.INSTALLING and self._installed >= self._placed() | self._sources:
            self.phase, self._sources = Phase.RUNNING, set()
            self._let_go()
            self._proceed()

    @_hear.register
    def _(self, message: StepDone, worker: WorkerId) -> None:
        if message.generation != self.generation:
            return
        self.outcome = message.outcome
        self._suspicions = 0
        self._redoing = False
        self._record(
            "step",
            time=message.at,
            step=message.outcome.step,
            loss=message.outcome.loss,
            grad_norm=message.outcome.grad_norm,
            num_samples=message.num_samples,
            step_ms=message.step_ms,
            learning_rate=message.learning_rate,
        )

    @_hear.register
    def _(self, message: Saved, worker: WorkerId) -> None:
        if message.generation < self.generation or self.job is None:
            return
        saving = self._saving
        parts = self._parts if saving is None else saving.parts
        parts.add(message)
        if not uncovered(self.job.profile, parts.states(message.step)):
            self._complete_checkpoint(message.step, parts)
        if saving is not None:
            saving.awaiting.discard(worker)
            self._proceed()

    @_hear.register
    def _(self, message: NotSaved, worker: WorkerId) -> None:
        self._note_missed_checkpoint(message.step, worker[0], message.error)

    @_hear.register
    def _(self, message: Finished, worker: WorkerId) -> None:
        if message.generation == self.generation:
            self._finished.add(worker)
            path = str(folder(self.settings.run_directory, self._step))
            saved = any(checkpoint.path == path for checkpoint in self._checkpoints)
            training = self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING)
            if saved and training and self._finished >= self._placed():
                self._finish()  # otherwise a part died with its writer: the next generation writes it again

    @_hear.register
    def _(self, message: Failed, worker: WorkerId) -> None:
        self._fail(worker[0], message.error, message.traceback)

    @_hear.register
    def _(self, message: Output, worker: WorkerId) -> None:
        self._record("output", text=message.text)

    @_hear.register
    def _(self, message: Note, worker: WorkerId) -> None:
        self._record("note", name=message.name, value=message.value)

    # ------------------------------------------------------------ going on

    def _proceed(self) -> None:
        """Do what has become possible."""
        if self.phase is Phase.STARTING:
            self._begin_when_complete()
        elif self.phase is Phase.RUNNING and not self._finished:
            self._ask_for_boundary()
        elif self.phase is Phase.AGREEING and not self.awaiting:
            assert self._change is not None
            reports = {worker: self._change.reports.get(worker, NOTHING) for worker in self._ready_workers()}
            agreement = agree(reports, self.outcome, self._version)
            self._note_unreported_step(agreement.outcome)
            self._publish_next(agreement)
        elif self.phase is Phase.SAVING and not self.awaiting:
            assert self._saving is not None
            self._stop_resumable(self._saving.reason)

    def _note_unreported_step(self, outcome: StepOutcome | None) -> None:
        """Record a step whose reporter died between committing it and saying so."""
        if outcome is None or outcome.step <= self._step:
            return
        assert self.job is not None
        self.outcome = outcome
        self._record(
            "step",
            step=outcome.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            num_samples=self.job.global_batch,
            step_ms=None,
            learning_rate=None,
        )

    # ------------------------------------------------------------ losses and ends

    def _evict(self, node: int, cause: str) -> None:
        self._out.append(Tell(node=node, message=Shutdown(exit_code=EXIT_FAILED, reason=f"evicted: {cause}")))
        self._lose(node, cause)

    def _lose(self, node: int, cause: str) -> None:
        if self.phase is Phase.STOPPED or (member := self.members.pop(node, None)) is None:
            return
        self._record("node_lost", node=node, cause=cause)
        if self.phase is Phase.FINISHED:
            if self._speaks(node) and not member.is_done:
                self._failed = f"node {node}, which speaks for the job, was lost before its script ended ({cause})"
            self._stop_when_all_are_gone()
        elif self.phase is Phase.STARTING:
            self._expected -= 1
            self._proceed()
        elif not self.members:
            self._stop_resumable(f"all nodes are lost, the last one ({node}) because of: {cause}")
        elif self.phase is Phase.SAVING and node not in {waited for waited, _ in self.awaiting}:
            self._proceed()  # it has done its part
        elif self.phase is Phase.SAVING or self._is_placed(node) or node in {sender for sender, _ in self._sources}:
            if self._change is not None:
                self._change.reports = {worker: p for worker, p in self._change.reports.items() if worker[0] != node}
            self._begin_failure([node], cause)
            self._proceed()
        else:
            self._proceed()

    def _worker_is_done(self, event: WorkerEnded) -> None:
        member = self.members[event.node]
        if self.phase is Phase.FINISHED:
            if member.is_done:
                self._dismiss(member, "the job is finished")
                self._stop_when_all_are_gone()
        elif self.phase is Phase.STARTING and not member.ready:
            self._proceed()
        else:
            reason = "a worker ended before the job was finished"
            self._fail(event.node, f"{reason}; the script must reach Trainer.fit's end")
            self._lose(event.node, reason)
