"""What the membership machine knows, and the few things that all its parts do with it. No decisions here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from resilient.agent.membership.events import Instruction, Record, Send, Tell, WorkerId
from resilient.agent.membership.forming import Checkpoint
from resilient.agent.membership.members import Member
from resilient.agent.membership.saving import Parts
from resilient.protocol.messages import Injection, JobSpec, Shutdown, StepOutcome, ToWorkerMessage, WorkerProgress
from resilient.state.manifest import Manifest
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Plan, PlanningProblem

_FIRST_NOTICE_S = 60.0

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
        options: Of `resilient run`, besides the nodes and the checkpoint, to start the job again as it was started.
        resume: Checkpoint to begin from, and its manifest.
        network: Between two nodes.
        failure_interval_s: Expected time between two failures.
        injections: Failures to arm as soon as their node is up.
        heartbeat_s: Silence after which a node counts as lost.
        grace_s: From an interruption to the end; half of it for the running step, the rest for the checkpoint.
        start_timeout_s: How long nodes may take to get ready before the job begins without them.
        report_timeout_s: How long a worker may take to get out of its generation before its node is evicted.
        save_timeout_s: How long writing the last checkpoint may take.
        trace: Steps of which workers write down when they did what; "" for none.
        max_suspicions: Regroups of the same members without a step between them before the job is stopped.
    """

    script: str
    arguments: tuple[str, ...] = ()
    directory: str
    run_directory: str
    num_nodes: int
    options: tuple[str, ...] = ()
    workers_per_node: int = 1
    resume: tuple[str, Manifest] | None = None
    network: Link = field(default_factory=Link)
    failure_interval_s: float = 3600.0
    injections: tuple[Injection, ...] = ()
    heartbeat_s: float = 5.0
    grace_s: float = 120.0
    start_timeout_s: float = 1800.0
    report_timeout_s: float = 60.0
    save_timeout_s: float = 600.0
    trace: str = ""
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
    """The change of membership under way.

    Args:
        generation: The one being formed.
        stalled_s: How long no step had been done when it began, if it began for that.
        stacks_shown: Those who have not reported were asked where they hang.
    """

    generation: int
    at_boundary: bool
    cause: str
    began: float
    deadline: float
    reports: dict[WorkerId, WorkerProgress]
    lost_nodes: bool = False
    stalled_s: float = 0.0
    stacks_shown: bool = False


@dataclass
class Saving:
    """The last checkpoint being written before a stop."""

    step: int
    path: str
    awaiting: set[WorkerId]
    parts: Parts
    reason: str
    deadline: float


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Why the job ends early, and until when the running step may end and the checkpoint may be written."""

    reason: str
    step_deadline: float
    deadline: float


class State:
    """The job as the coordinator sees it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.generation: int = 0
        self.members: dict[int, Member] = {}
        self.plan: Plan | None = None
        self.job: JobSpec | None = None
        self.outcome: StepOutcome | None = None
        self._problem: PlanningProblem | None = None
        self._needed_nodes = settings.num_nodes  # to go on, as far as it is known
        self._planned_for = 0  # plans for up to so many nodes are prepared
        self._asked_plans_for = 0
        self._expected: int = settings.num_nodes
        self._waiting_since: float | None = None  # for the nodes to get ready
        self._notice_after_s = _FIRST_NOTICE_S
        self._version = settings.resume[1].step if settings.resume else 0
        self._checkpoints: list[Checkpoint] = []
        if settings.resume is not None:
            self._checkpoints.append(Checkpoint(step=self._version, path=settings.resume[0]))
        self._injections = list(settings.injections)
        self._change: Change | None = None
        self._saving: Saving | None = None
        self._parts = Parts()
        self._installed: set[WorkerId] = set()
        self._sources: set[WorkerId] = set()  # without a place, but senders in the generation being installed
        self._slowdowns: dict[int, float] = {}  # of nodes, as observed last
        self._finished: set[WorkerId] = set()
        self._suspicions = 0
        self._advanced_at = 0.0  # when a worker last said that it got on, or was told what with
        self._failed = ""  # why the job ends as soon as its progress is saved
        self._interruption: Interruption | None = None
        self._redoing = False  # a step was begun, dropped and not committed since
        self._exit_code = EXIT_DONE
        self._now = 0.0
        self._out: list[Instruction] = []

    @property
    def awaiting(self) -> set[WorkerId]:
        """The workers whose report or saved part the machine waits for."""
        if self._saving is not None:
            return set(self._saving.awaiting)
        if self._change is None:
            return set()
        standing_by = {worker for worker in self._ready_workers() if self.members[worker[0]].admitted}
        return (self._placed() | standing_by) - self._change.reports.keys()  # who stands by may hold what is lost

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

    @property
    def _step(self) -> int:
        """The last committed step known."""
        return self.outcome.step if self.outcome else self._version

    def _newest_path(self) -> str | None:
        newest = max(self._checkpoints, key=lambda checkpoint: checkpoint.step, default=None)
        return newest.path if newest is not None else None

    def _is_placed(self, node: int) -> bool:
        return self.plan is not None and node in self.plan.nodes

    def _is_needed(self, node: int) -> bool:
        """Whether others may still want what the node holds: it trains, or a change is under way."""
        changing = self.phase in (Phase.AGREEING, Phase.INSTALLING, Phase.SAVING)
        return self._is_placed(node) or (changing and self.members[node].admitted)

    def _speaks(self, node: int) -> bool:
        return self.plan is not None and self.plan.slots[0].node == node

    def _placed(self) -> set[WorkerId]:
        """The live workers that have a place in the current plan."""
        if self.plan is None:
            return set()
        return {(slot.node, slot.local_rank) for slot in self.plan.slots if slot.node in self.members}

    def _ready_workers(self) -> list[WorkerId]:
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

    def _dismiss(self, member: Member, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Let a node go; it is no loss."""
        del self.members[member.node]
        self._out.append(Tell(node=member.node, message=Shutdown(exit_code=exit_code, reason=reason)))

    def _how_to_resume(self) -> str:
        path = self._newest_path()
        if path is None and self.job is None:
            return ""
        command = ["resilient", "run", "--nodes", str(self._needed_nodes), *self.settings.options]
        if path is not None:
            command += ["--resume", path]
        words = shlex.join([*command, self.settings.script, *self.settings.arguments])
        if path is not None:
            return f"; resume with: {words}"
        return f"{'; there is no checkpoint' if self._step else ''}; start again with: {words}"
