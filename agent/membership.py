"""The membership machine: who takes part, which generation is the current one, how one follows another.

Pure: events in, instructions out; the clock is an argument. Every change goes the same way: ``Regroup(g + 1)`` to all
workers, a ``Report`` from each placed one, an agreement (:mod:`resilient.agent.agreement`), a plan
(:mod:`resilient.agent.forming`), ``Generation(g + 1)``. A further loss before that shrinks the set that is waited for;
one after it begins g + 2. Messages of other generations are ignored.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import singledispatchmethod
from typing import Any

from resilient.agent.agreement import NOTHING, Agreement, agree, share_out, uncovered
from resilient.agent.events import (
    Event,
    FailureWanted,
    Instruction,
    NodeConnected,
    NodeLeaving,
    NodeLost,
    PreparePlans,
    Record,
    Send,
    Stop,
    StopWanted,
    Tell,
    Tick,
    Worker,
    WorkerEnded,
    WorkerSaid,
    WriteManifest,
)
from resilient.agent.forming import Checkpoint, Formed, describe, form, message_for, problem_of, source_at
from resilient.agent.members import Member, available
from resilient.agent.saving import Parts
from resilient.errors import StateLostError
from resilient.manifest import Manifest, folder
from resilient.messages import (
    Arm,
    Failed,
    Finish,
    Finished,
    Injection,
    Installed,
    JobSpec,
    Kill,
    Note,
    Outcome,
    Output,
    Progress,
    Ready,
    Regroup,
    Report,
    Save,
    Saved,
    Shutdown,
    StepDone,
    Suspect,
    ToWorkerMessage,
    Welcome,
)
from resilient.templates.nodespec import TooFewNodes
from resilient.templates.plan import Plan, Problem

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_RESUMABLE = 3
EXIT_LOST = 4
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job was started with.

    Args:
        num_nodes: Nodes to wait for before the first generation.
        resume: Checkpoint to begin from, and its manifest.
        injections: Failures to arm as soon as their node is up.
        heartbeat_s: Silence after which a node counts as lost.
        report_timeout_s: How long a worker may take to get out of its generation before its node is evicted.
        save_timeout_s: How long writing the last checkpoint may take.
        max_suspicions: Regroups of the same members without a step between them before the job is stopped.
    """

    script: str
    arguments: tuple[str, ...] = ()
    directory: str
    run_directory: str
    num_nodes: int
    workers_per_node: int = 1
    resume: tuple[str, Manifest] | None = None
    injections: tuple[Injection, ...] = ()
    heartbeat_s: float = 5.0
    report_timeout_s: float = 60.0
    save_timeout_s: float = 600.0
    max_suspicions: int = 3


class Phase(Enum):
    """Where the job is."""

    STARTING = "starting"
    INSTALLING = "installing"
    RUNNING = "running"
    AGREEING = "agreeing"
    SAVING = "saving"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass
class Change:
    """The change of membership under way; ``generation`` is the one being formed.

    ``step_under_way``: when it was asked for, everybody was training, so a failure costs the step.
    """

    generation: int
    at_boundary: bool
    cause: str
    deadline: float
    reports: dict[Worker, Progress]
    step_under_way: bool
    lost_nodes: bool = False


@dataclass
class Saving:
    """The last checkpoint being written before a stop."""

    step: int
    path: str
    awaiting: set[Worker]
    parts: Parts
    reason: str
    deadline: float


class Membership:
    """The machine. Feed it events with :meth:`handle`, in the order in which they happen."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.generation = 0
        self.members: dict[int, Member] = {}
        self.plan: Plan | None = None
        self.job: JobSpec | None = None
        self.outcome: Outcome | None = None
        self._problem: Problem | None = None
        self._expected = settings.num_nodes
        self._version = settings.resume[1].step if settings.resume else 0
        self._checkpoints: list[Checkpoint] = []
        if settings.resume is not None:
            self._checkpoints.append(Checkpoint(step=self._version, path=settings.resume[0]))
        self._injections = list(settings.injections)
        self._change: Change | None = None
        self._saving: Saving | None = None
        self._parts = Parts()
        self._installed: set[Worker] = set()
        self._finished: set[Worker] = set()
        self._suspicions = 0
        self._exit_code = EXIT_DONE
        self._now = 0.0
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event; return what is to be done, in this order.

        Args:
            event: What happened.
            now: Seconds on a clock that never goes back.
        """
        self._now = now
        self._out = []
        if self.phase is not Phase.STOPPED:
            self._on(event)
        return self._out

    @property
    def awaiting(self) -> set[Worker]:
        """The workers whose report or saved part the machine waits for."""
        if self._saving is not None:
            return set(self._saving.awaiting)
        if self._change is None:
            return set()
        return self._placed() - self._change.reports.keys()

    def status(self) -> dict[str, Any]:
        """Return where the job is, ready for JSON."""
        return {
            "phase": self.phase.value,
            "generation": self.generation,
            "step": self._step,
            "loss": self.outcome.loss if self.outcome else None,
            "nodes": [
                {"node": member.node, "host": member.host, "ready": member.is_ready, "leaving": member.leaving}
                for member in self.members.values()
            ],
            "pipelines": [list(pipeline.nodes) for pipeline in self.plan.pipelines] if self.plan else [],
        }

    # ------------------------------------------------------------ events

    @singledispatchmethod
    def _on(self, event: Event) -> None:
        raise TypeError(f"unknown event {event}")

    @_on.register
    def _(self, event: NodeConnected) -> None:
        settings = self.settings
        self._record("node_connected", node=event.node, host=event.host, pid=event.pid)
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
                ),
            )
        )
        self.members[event.node] = Member(
            node=event.node, host=event.host, pid=event.pid, num_workers=event.num_workers
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
        if not self._is_placed(event.node):
            self._dismiss(member, "left before it had a place")
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
            self._fail(event.node, event.error or f"a worker ended with exit code {event.exit_code}; see its log")
        else:
            member.done.add(event.local_rank)
            self._worker_is_done(event)

    @_on.register
    def _(self, event: WorkerSaid) -> None:
        if event.node in self.members:
            self._hear(event.message, (event.node, event.local_rank))

    @_on.register
    def _(self, event: FailureWanted) -> None:
        injection = event.injection
        member = self.members.get(injection.node)
        if member is None or not member.is_ready:
            self._injections.append(injection)
        elif injection.at_step is None and injection.at_phase is None:
            self._out.append(Tell(node=injection.node, message=Kill(injection=injection)))
        else:
            local_rank = 0 if injection.worker_only else None
            self._out.append(Send(node=injection.node, local_rank=local_rank, message=Arm(injection=injection)))

    @_on.register
    def _(self, event: StopWanted) -> None:
        self._stop(event.exit_code, f"{event.reason}{self._how_to_resume()}", self._newest_path())

    @_on.register
    def _(self, event: Tick) -> None:
        change, saving = self._change, self._saving
        if saving is not None and self._now >= saving.deadline:
            self._stop_resumable(f"{saving.reason}; the checkpoint of step {saving.step} was not written in time")
        elif change is not None and not change.at_boundary and self._now >= change.deadline:
            for node in sorted({node for node, _ in self.awaiting}):
                self._out.append(
                    Tell(node=node, message=Shutdown(exit_code=EXIT_FAILED, reason="evicted: no report in time"))
                )
                self._lose(node, f"no report within {self.settings.report_timeout_s:g} s")

    # ------------------------------------------------------------ messages of workers

    @singledispatchmethod
    def _hear(self, message: object, worker: Worker) -> None:
        raise TypeError(f"unknown message {message}")

    @_hear.register
    def _(self, message: Ready, worker: Worker) -> None:
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
        member.ready[worker[1]] = message
        if member.is_ready:
            pids = [member.ready[local_rank].pid for local_rank in range(member.num_workers)]
            self._record("node_ready", node=member.node, pids=pids, device=message.device)
            waiting = [injection for injection in self._injections if injection.node == member.node]
            self._injections = [injection for injection in self._injections if injection.node != member.node]
            for injection in waiting:
                self._on(FailureWanted(injection=injection))
            self._proceed()

    @_hear.register
    def _(self, message: Suspect, worker: Worker) -> None:
        if message.generation == self.generation and self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING):
            self._begin_failure([], f"communication failed: {message.reason}")

    @_hear.register
    def _(self, message: Report, worker: Worker) -> None:
        if self._change is not None and message.generation == self._change.generation:
            self._change.reports[worker] = message.progress
            self._proceed()

    @_hear.register
    def _(self, message: Installed, worker: Worker) -> None:
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
        if self.phase is Phase.INSTALLING and self._installed >= self._placed():
            self.phase = Phase.RUNNING
            self._proceed()

    @_hear.register
    def _(self, message: StepDone, worker: Worker) -> None:
        if message.generation != self.generation:
            return
        self.outcome = message.outcome
        self._suspicions = 0
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
    def _(self, message: Saved, worker: Worker) -> None:
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
    def _(self, message: Finished, worker: Worker) -> None:
        if message.generation == self.generation:
            self._finished.add(worker)
            if self._finished >= self._placed() and self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING):
                self._finish()

    @_hear.register
    def _(self, message: Failed, worker: Worker) -> None:
        self._fail(worker[0], message.error, message.traceback)

    @_hear.register
    def _(self, message: Output, worker: Worker) -> None:
        self._record("output", text=message.text)

    @_hear.register
    def _(self, message: Note, worker: Worker) -> None:
        self._record("note", name=message.name, value=message.value)

    # ------------------------------------------------------------ going on

    def _proceed(self) -> None:
        """Do what has become possible."""
        if self.phase is Phase.STARTING:
            live = list(self.members.values())
            if not live and self._expected <= 0:
                self._stop(EXIT_FAILED, "all nodes went away before the job began; see their logs", None)
            elif self.job is not None and len(live) >= self._expected and all(member.is_ready for member in live):
                self._publish_next(Agreement(version=self._version, roll_forward=None, held={}))
        elif self.phase is Phase.RUNNING and not self._finished:
            self._ask_for_boundary()
        elif self.phase is Phase.AGREEING and not self.awaiting:
            assert self._change is not None
            reports = {worker: self._change.reports.get(worker, NOTHING) for worker in self._ready_workers()}
            self._publish_next(agree(reports, self.outcome, self._version))
        elif self.phase is Phase.SAVING and not self.awaiting:
            assert self._saving is not None
            self._stop_resumable(self._saving.reason)

    def _ask_for_boundary(self) -> None:
        joining = [node for node in available(self.members.values()) if not self.members[node].admitted]
        leaving = [node for node in sorted(self.members) if self.members[node].leaving]
        if joining or leaving:
            self._record("boundary", generation=self.generation + 1, joining=joining, leaving=leaving)
            self._begin(at_boundary=True, cause="join" if joining else "leave")

    def _begin_failure(self, nodes: list[int], cause: str) -> None:
        change = self._change
        if change is None or change.at_boundary:
            self._record(
                "detected",
                generation=self.generation + 1,
                nodes=nodes,
                cause=cause,
                step=self._step,
            )
            self._begin(at_boundary=False, cause="failure")
        assert self._change is not None
        self._change.lost_nodes |= bool(nodes)

    def _begin(self, *, at_boundary: bool, cause: str) -> None:
        """Ask everybody for a new generation, or for the same one at once instead of at the boundary."""
        change = self._change
        self._change = Change(
            generation=self.generation + 1,
            at_boundary=at_boundary,
            cause=cause,
            deadline=self._now + self.settings.report_timeout_s,
            reports=change.reports if change is not None else {},
            step_under_way=change.step_under_way if change is not None else self.phase is Phase.RUNNING,
        )
        self.phase, self._saving = Phase.AGREEING, None
        self._send_all(Regroup(generation=self._change.generation, at_boundary=at_boundary))

    def _publish_next(self, agreement: Agreement) -> None:
        """Publish the generation that was agreed on, or stop if there can be none."""
        assert self._problem is not None
        change = self._change
        if change is not None and change.cause == "failure":
            self._suspicions = 0 if change.lost_nodes else self._suspicions + 1
        nodes = available(self.members.values())
        try:
            formed = form(self._problem, self.plan, nodes, agreement, self._checkpoints)
        except TooFewNodes as error:
            self._save_and_stop(agreement, f"{len(nodes)} nodes are live ({nodes}), {error.needed} are needed")
        except StateLostError as error:
            self._stop(EXIT_LOST, str(error), None)
        except ValueError as error:
            self._stop(EXIT_FAILED, str(error), self._newest_path())
        else:
            if self._suspicions > self.settings.max_suspicions:
                self._save_and_stop(agreement, "communication keeps failing between live nodes; check the network")
            else:
                self._publish(formed)

    def _publish(self, formed: Formed) -> None:
        change = self._change
        cause = change.cause if change is not None else ("resume" if self.settings.resume else "start")
        redone = (
            change is not None and change.cause == "failure" and change.step_under_way and formed.roll_forward is None
        )
        self.generation += 1
        self.phase, self._change, self.plan = Phase.INSTALLING, None, formed.plan
        self._version, self._parts = formed.version, Parts()
        self._installed, self._finished = set(), set()
        if formed.lost:
            self.outcome = None  # the job goes back behind what was seen
            text = f"nobody holds {', '.join(formed.lost)}: everybody loads {formed.source}"
            self._record("output", text=text)
        elif formed.roll_forward is not None:
            self.outcome = formed.roll_forward
        for member in [member for member in self.members.values() if member.leaving]:
            self._dismiss(member, "left")
        self._record("generation", cause=cause, lost_steps=int(redone), **describe(formed, self.members))
        for worker in self._ready_workers():
            self.members[worker[0]].admitted = True
            message = message_for(worker, self.generation, formed, self.members)
            self._out.append(Send(node=worker[0], local_rank=worker[1], message=message))
        assert self._problem is not None
        self._out.append(PreparePlans(problem=self._problem, num_nodes=len(available(self.members.values()))))

    # ------------------------------------------------------------ losses and ends

    def _lose(self, node: int, cause: str) -> None:
        if self.phase is Phase.STOPPED or self.members.pop(node, None) is None:
            return
        self._record("node_lost", node=node, cause=cause)
        if self.phase is Phase.FINISHED:
            self._stop_when_all_are_gone()
        elif self.phase is Phase.STARTING:
            self._expected -= 1
            self._proceed()
        elif not self.members:
            self._stop_resumable(f"all nodes are lost, the last one ({node}) because of: {cause}")
        elif self.phase is Phase.SAVING or self._is_placed(node):
            if self._change is not None:
                self._change.reports = {worker: p for worker, p in self._change.reports.items() if worker[0] != node}
            self._begin_failure([node], cause)
            self._proceed()
        else:
            self._proceed()

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
                generation=self.generation,
                version=step,
                roll_forward=agreement.roll_forward,
                states=states,
                path=path,
            )
            self._out.append(Send(node=node, local_rank=local_rank, message=save))

    def _complete_checkpoint(self, step: int, parts: Parts) -> None:
        assert self.job is not None
        if any(checkpoint.step == step for checkpoint in self._checkpoints):
            return
        path = str(folder(self.settings.run_directory, step))
        manifest = Manifest(step=step, digest=self.job.digest, states=parts.states(step))
        self._checkpoints.append(Checkpoint(step=step, path=path))
        self._out.append(WriteManifest(path=path, manifest=manifest))
        self._record("checkpoint", step=step, path=path)
        parts.drop(step)

    def _finish(self) -> None:
        self.phase, self._change = Phase.FINISHED, None
        step = self._step
        path = next((checkpoint.path for checkpoint in self._checkpoints if checkpoint.step == step), None)
        self._record("finished", step=step, path=path)
        for member in list(self.members.values()):
            if member.admitted:
                self._out.append(Send(node=member.node, local_rank=None, message=Finish()))
            else:
                self._dismiss(member, "the job is finished")

    def _worker_is_done(self, event: WorkerEnded) -> None:
        member = self.members[event.node]
        if self.phase is Phase.FINISHED:
            if member.is_done:
                self._dismiss(member, "the job is finished")
                self._stop_when_all_are_gone()
        elif self.phase is Phase.STARTING and not member.ready:
            if len(self.members) >= self._expected and all(other.is_done for other in self.members.values()):
                self._stop(EXIT_DONE, "the script ended without training; its output is in the logs", None)
        else:
            self._fail(
                event.node, "a worker ended before the job was finished; the script must reach Trainer.fit's end"
            )

    def _stop_when_all_are_gone(self) -> None:
        if not self.members:
            self._stop(EXIT_DONE, "the job is finished", self._newest_path())

    def _dismiss(self, member: Member, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Let a node go; it is no loss."""
        del self.members[member.node]
        self._out.append(Tell(node=member.node, message=Shutdown(exit_code=exit_code, reason=reason)))

    def _fail(self, node: int, error: str, traceback: str = "") -> None:
        self._record("failed", node=node, error=error, traceback=traceback)
        self._stop(EXIT_FAILED, f"node {node}: {error}", self._newest_path())

    def _stop_resumable(self, reason: str) -> None:
        if self._step == 0 or self._checkpoints:
            self._stop(EXIT_RESUMABLE, f"{reason}{self._how_to_resume()}", self._newest_path())
        else:
            self._stop(EXIT_LOST, f"{reason}; there is no checkpoint: start the job again", None)

    def _stop(self, exit_code: int, reason: str, path: str | None) -> None:
        if self.phase is not Phase.FINISHED or exit_code != EXIT_DONE:
            self._record("stopped", exit_code=exit_code, reason=reason, path=path)
        self.phase, self._change, self._saving = Phase.STOPPED, None, None
        self._out.append(Stop(exit_code=exit_code, reason=reason))

    def _how_to_resume(self) -> str:
        path = self._newest_path()
        if path is None and self.job is None:
            return ""
        needed = self._problem.min_nodes if self._problem else self.settings.num_nodes
        command = ["resilient", "run", "--nodes", str(needed)]
        if self.settings.workers_per_node > 1:
            command += ["--workers-per-node", str(self.settings.workers_per_node)]
        if path is not None:
            command += ["--resume", path]
        words = shlex.join([*command, self.settings.script, *self.settings.arguments])
        return f"; resume with: {words}" if path is not None else f"; start again with: {words}"

    # ------------------------------------------------------------ small things

    def _accept_job(self, job: JobSpec) -> bool:
        """Take the first worker's job as the job; False if it fits no plan or not the checkpoint."""
        settings = self.settings
        try:
            self._problem = problem_of(job, settings.workers_per_node)
        except ValueError as error:
            self._stop(EXIT_FAILED, str(error), None)
            return False
        self.job = job
        self._record(
            "job",
            script=settings.script,
            arguments=list(settings.arguments),
            num_nodes=settings.num_nodes,
            workers_per_node=settings.workers_per_node,
            max_failures=job.max_failures,
            min_pipeline_nodes=job.min_pipeline_nodes,
            global_batch=job.global_batch,
            microbatch=job.microbatch,
            num_steps=job.num_steps,
            num_layers=len(job.profile.layers),
            layers=[layer.name for layer in job.profile.layers],
        )
        lacking = uncovered(job.profile, settings.resume[1].states) if settings.resume else ()
        if settings.resume and lacking:
            reason = f"the checkpoint must hold every state of the model, {settings.resume[0]} lacks {lacking[0]!r}"
            self._stop(EXIT_FAILED, f"{reason}; resume with the script that wrote it", None)
        return not lacking

    @property
    def _step(self) -> int:
        """The last committed step known."""
        return self.outcome.step if self.outcome else self._version

    def _newest_path(self) -> str | None:
        newest = max(self._checkpoints, key=lambda checkpoint: checkpoint.step, default=None)
        return newest.path if newest is not None else None

    def _is_placed(self, node: int) -> bool:
        return self.plan is not None and node in self.plan.nodes

    def _placed(self) -> set[Worker]:
        """The live workers that have a place in the current plan."""
        if self.plan is None:
            return set()
        return {(slot.node, slot.local_rank) for slot in self.plan.slots if slot.node in self.members}

    def _ready_workers(self) -> list[Worker]:
        ready: Iterable[Member] = (self.members[node] for node in sorted(self.members))
        return [worker for member in ready if member.is_ready for worker in member.workers]

    def _send_all(self, message: ToWorkerMessage) -> None:
        for member in self.members.values():
            if member.admitted:
                self._out.append(Send(node=member.node, local_rank=None, message=message))

    def _record(self, kind: str, *, generation: int | None = None, **fields: Any) -> None:
        self._out.append(
            Record(kind=kind, generation=self.generation if generation is None else generation, fields=fields)
        )
