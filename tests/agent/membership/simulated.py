"""A job of obedient simulated workers around the membership machine: no sockets, no clock, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from resilient.agent.membership.machine import Membership
from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.context import Phase, Settings
from resilient.agent.membership.parts.events import (
    Instruction,
    ManifestFailed,
    ManifestWritten,
    NodeConnected,
    NodeLost,
    PlansPrepared,
    PreparePlans,
    Record,
    Send,
    Stimulus,
    Stop,
    Tell,
    WorkerEnded,
    WorkerSaid,
    WriteManifest,
)
from resilient.protocol.alike import Alike
from resilient.protocol.messages import (
    Finish,
    Finished,
    FromWorkerMessage,
    Generation,
    Installed,
    JobSpec,
    Ready,
    Regroup,
    Report,
    Save,
    Saved,
    Shutdown,
    StepDone,
    StepOutcome,
    WorkerProgress,
)
from resilient.state.manifest import SavedState
from resilient.state.recipe import Recipe
from resilient.state.skipped import NONE_SKIPPED
from resilient.state.witnesses import HeldCopy, witness
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import Plan

NUM_LAYERS = 4
PROFILE = ModelProfile(
    layers=tuple(
        LayerProfile(
            name=f"layer.{i}",
            costs=(LayerCost(forward_ms=1.0, backward_input_ms=1.0, backward_weight_ms=1.0),),
            parameter_bytes=40,
            optimizer_bytes=60,
        )
        for i in range(NUM_LAYERS)
    )
)
RECIPE = Recipe(
    model="m",
    num_layers=NUM_LAYERS,
    num_parameters=40,
    dataset="Data",
    num_samples=100,
    global_batch=24,
    optimizer="SGD(lr=0.1)",
    seed=0,
    precision="fp32",
    clip_grad_norm=None,
)
STATES = tuple(layer.name for layer in PROFILE.layers)


def job_spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "profile": PROFILE,
        "recipe": RECIPE,
        "global_batch": 24,
        "microbatch": 2,
        "max_failures": 1,
        "min_pipeline_nodes": 2,
        "num_steps": 10,
        "comm_timeout_s": 120.0,
        "alike": {"job": {"model": "m"}},
    }
    return JobSpec(**{**fields, **changes})


def settings(**changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "script": "train.py",
        "directory": "/work",
        "run_directory": "/runs/x",
        "num_nodes": 5,
        "wait_for_nodes_s": 0.0,
    }
    return Settings(**{**fields, **changes})


def outcome(step: int, skipping: Collection[int] = ()) -> StepOutcome:
    skipped = NONE_SKIPPED
    for number in range(1, step + 1):
        skipped = skipped.after(is_finite=number not in skipping)
    loss = float("nan") if step in skipping else 1.0 / step
    return StepOutcome(step=step, loss=loss, grad_norm=1.0, skipped=skipped)


@dataclass
class SimulatedWorker:
    """What a worker remembers; ``damaged`` are fingerprints that are not 0, ``made_of`` nodes whose copies it got."""

    version: int = -1
    begun: bool = False
    complete: bool = False
    passed: StepOutcome | None = None
    current: tuple[str, ...] = ()
    retained: tuple[str, ...] = ()
    generation: int = 0
    stage_ms: float = 0.0
    device: str = "abacus"
    damaged: dict[str, int] = field(default_factory=dict[str, int])
    made_of: dict[str, int] = field(default_factory=dict[str, int])
    inbox: list[Any] = field(default_factory=list)

    def progress(self) -> WorkerProgress:
        return WorkerProgress(
            version=self.version,
            complete=self.complete,
            begun=self.begun,
            passed=self.passed,
            current=self.current,
            retained=self.retained,
            stage_ms=self.stage_ms,
        )


def copy_of(worker: WorkerId, state: SimulatedWorker, name: str) -> HeldCopy:
    """Return what a worker tells of its copy of a state."""
    origin = witness(state.made_of.get(name, worker[0]), worker[1])
    return HeldCopy(fingerprint=state.damaged.get(name, 0), origin=origin, device=state.device)


class Job:
    """Feeds the machine and plays the nodes. Workers act when told to, through :meth:`answer` and :meth:`step`.

    Args:
        plans_at_once: Plans are prepared as soon as they are asked for; otherwise by :meth:`prepare_plans`.
        skipping: Steps whose loss is not finite.

    Attributes:
        manifest_error: Why manifests cannot be written; "" while they can.
        lacking_node: Whose file is not there, if that is why.
    """

    def __init__(
        self,
        spec: JobSpec | None = None,
        *,
        plans_at_once: bool = True,
        skipping: Collection[int] = (),
        **changes: Any,
    ) -> None:
        self.skipping = skipping
        self.spec = spec or job_spec()
        self.machine = Membership(settings(**changes))
        self.now = 0.0
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.history: list[tuple[Stimulus, float, list[Instruction]]] = []
        self.records: list[Record] = []
        self.told: list[Tell] = []
        self.manifests: list[WriteManifest] = []
        self.manifest_error = ""
        self.lacking_node: int | None = None
        self.stop: Stop | None = None
        self.next_node = 0
        self.plans_at_once = plans_at_once
        self.plans_wanted: list[int] = []

    # ------------------------------------------------------------ driving

    def feed(self, event: Stimulus) -> list[Instruction]:
        instructions = self.machine.handle(event, self.now)
        self.history.append((event, self.now, instructions))
        for instruction in instructions:
            self._obey(instruction)
        self.machine.validate()
        for instruction in instructions:
            if isinstance(instruction, WriteManifest):
                self._write(instruction.path)
        if self.plans_at_once:
            self.prepare_plans()
        return instructions

    def _write(self, path: str) -> None:
        if self.manifest_error:
            self.feed(ManifestFailed(path=path, error=self.manifest_error, node=self.lacking_node))
        else:
            self.feed(ManifestWritten(path=path))

    def prepare_plans(self) -> None:
        while self.plans_wanted:
            self.feed(PlansPrepared(num_nodes=self.plans_wanted.pop(0)))

    def say(self, worker: WorkerId, message: FromWorkerMessage) -> list[Instruction]:
        return self.feed(WorkerSaid(node=worker[0], local_rank=worker[1], message=message))

    def connect(self, domain: str = "", alike: Alike | None = None, *, pid: int | None = None, **told: Any) -> int:
        """Have a node connect; return its number. ``pid``: of its agent, which was another node before."""
        node = self.next_node
        self.next_node += 1
        num_workers = self.machine.settings.workers_per_node
        for local_rank in range(num_workers):
            self.workers[node, local_rank] = SimulatedWorker()
        told |= {"pid": node if pid is None else pid, "domain": domain, "alike": alike or {}}
        self.feed(NodeConnected(node=node, host="h", num_workers=num_workers, **told))
        return node

    def ready(self, node: int, spec: JobSpec | None = None) -> list[Instruction]:
        """Return what came of the last of the node's workers."""
        out: list[Instruction] = []
        for worker in [worker for worker in self.workers if worker[0] == node]:
            message = Ready(job=spec or self.spec, store_address=f"h:{node}", pid=1000 + node, device="cpu")
            out = self.say(worker, message)
        return out

    def start(self) -> None:
        for _ in range(self.machine.settings.num_nodes):
            self.connect()
        for node in range(self.next_node):
            self.ready(node)
        self.answer()

    def lose(self, *nodes: int) -> None:
        for node in nodes:
            self.workers = {worker: state for worker, state in self.workers.items() if worker[0] != node}
            self.feed(NodeLost(node=node, cause="node lost"))

    def end_worker(self, worker: WorkerId, exit_code: int, error: str = "") -> None:
        self.feed(WorkerEnded(node=worker[0], local_rank=worker[1], exit_code=exit_code, error=error))

    def step(self, number: int, *, reported: bool = True) -> None:
        """All placed workers commit a step; ``reported``: the coordinator hears of it."""
        for worker in self.placed():
            state = self.workers[worker]
            state.version, state.passed = number, outcome(number, self.skipping)
            state.complete, state.retained = False, ()
            state.begun = number < job_spec().num_steps
        if reported:
            self.report_step(number)

    def report_step(self, number: int) -> None:
        slot = self.plan.slots[0]
        self.say((slot.node, slot.local_rank), self.done(number, self.machine.generation))

    def done(self, number: int, generation: int) -> StepDone:
        return StepDone(
            generation=generation,
            outcome=outcome(number, self.skipping),
            num_samples=24,
            step_ms=1.0,
            learning_rate=0.1,
            at=float(number),
        )

    def answer(self, workers: Iterable[WorkerId] | None = None) -> None:
        """Have workers (all by default) act on everything that was sent to them, until nothing is left to do."""
        busy = True
        while busy and self.stop is None:
            busy = False
            for worker in list(self.workers if workers is None else workers):
                while worker in self.workers and self.workers[worker].inbox:
                    busy = True
                    self._act(worker, self.workers[worker].inbox.pop(0))

    # ------------------------------------------------------------ looking

    @property
    def plan(self) -> Plan:
        assert self.machine.plan is not None
        return self.machine.plan

    def placed(self) -> list[WorkerId]:
        slots = self.plan.slots
        return [(slot.node, slot.local_rank) for slot in slots if (slot.node, slot.local_rank) in self.workers]

    def last(self, kind: str) -> dict[str, Any]:
        return next(record.fields for record in reversed(self.records) if record.kind == kind)

    def kinds(self) -> list[str]:
        return [record.kind for record in self.records]

    # ------------------------------------------------------------ playing

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, Record):
            self.records.append(instruction)
        elif isinstance(instruction, Stop):
            self.stop = instruction
        elif isinstance(instruction, WriteManifest):
            self.manifests.append(instruction)
        elif isinstance(instruction, PreparePlans):
            self.plans_wanted.append(instruction.num_nodes)
        elif isinstance(instruction, Tell):
            self.told.append(instruction)
            if isinstance(instruction.message, Shutdown):
                node = instruction.node
                self.workers = {worker: state for worker, state in self.workers.items() if worker[0] != node}
        elif isinstance(instruction, Send):
            for worker in self.workers:
                if worker[0] == instruction.node and instruction.local_rank in (None, worker[1]):
                    self.workers[worker].inbox.append(instruction.message)

    def _act(self, worker: WorkerId, message: Any) -> None:
        state = self.workers[worker]
        if isinstance(message, Regroup):
            state.begun = state.begun and not message.at_boundary
            newest = state.passed.step if state.passed is not None else 0
            steps = [self.done(number, state.generation) for number in range(message.heard_step + 1, newest + 1)]
            self.say(worker, Report(generation=message.generation, progress=state.progress(), steps=tuple(steps)))
        elif isinstance(message, Generation):
            self._install(worker, message)
        elif isinstance(message, Save):
            state.version = message.version
            saved = self.saved(message.generation, message.version, message.states)
            held = {name: copy_of(worker, state, name) for name in (*state.current, *state.retained)}
            self.say(worker, msgspec.structs.replace(saved, held=held))
        elif isinstance(message, Finish):
            self.end_worker(worker, 0)

    def saved(self, generation: int, step: int, states: Iterable[str]) -> Saved:
        saved = {name: (SavedState(file=f"{name}.safetensors", num_bytes=1, sha256="f"),) for name in states}
        skipped = outcome(step, self.skipping).skipped
        return Saved(generation=generation, step=step, states=saved, skipped=skipped)

    def _install(self, worker: WorkerId, message: Generation) -> None:
        state = self.workers[worker]
        state.generation, state.stage_ms = message.generation, 0.0
        if state.version == message.version:
            has = (*state.current, *state.retained)
        elif state.version == message.version - 1 and state.complete and message.roll_forward is not None:
            has = state.current
        else:
            has, state.passed = (), None
        state.version, state.begun, state.complete = message.version, False, False
        state.current, state.retained = (), has
        if message.rank is None:
            return
        asked = {transfer.state for transfer in message.transfers if transfer.source == message.rank}
        assert asked <= set(has), "a worker is to send what it does not hold"
        if message.rank < len(message.plan.slots):
            slot = message.plan.slots[message.rank]
            needed = tuple(slot.intervals(PROFILE))
            copied = {transfer.state for transfer in message.transfers if transfer.target == message.rank}
            assert message.source or set(needed) <= {*has, *copied}, "a state comes from nowhere"
            state.current, state.retained = needed, tuple(name for name in has if name not in needed)
        else:
            assert message.rank < len(message.plan.slots) + message.num_sources
            assert asked, "a worker without a place takes part for what it sends"
        self.say(
            worker,
            Installed(
                generation=message.generation, started_at=0.0, regrouped_at=0.0, installed_at=0.0, bytes_copied=0
            ),
        )

    def finish(self) -> None:
        """Every placed worker saves its states and says that it is done."""
        generation, step = self.machine.generation, self.workers[self.placed()[0]].version
        for worker in self.placed():
            self.say(worker, self.saved(generation, step, self.workers[worker].current))
            self.say(worker, Finished(generation=generation))


def started(num_nodes: int = 5, **changes: Any) -> Job:
    """Return a job whose nodes are all in training."""
    job = Job(num_nodes=num_nodes, **changes)
    job.start()
    assert job.machine.phase is Phase.RUNNING
    return job


def regroups(job: Job, node: int) -> list[Regroup]:
    """Return the wishes for a new generation that a worker has not answered."""
    return [message for message in job.workers[node, 0].inbox if isinstance(message, Regroup)]
