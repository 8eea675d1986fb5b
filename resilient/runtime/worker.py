"""Lives a worker's life: reports ready, enters generations, trains until something changes, finishes.

Owns the main loop. Every message of the coordinator is answered here, between steps; only the abort of communication
happens in the reader thread (:mod:`resilient.runtime.generation_guard`).
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from resilient.comm import Communicator, StoreClient, StoreHost
from resilient.common.processes import allow_many_files
from resilient.data.processes import DataProcesses
from resilient.errors import (
    CheckpointError,
    CommunicationError,
    NonFiniteError,
    ReplicaError,
    ResilientError,
    place_text,
)
from resilient.models.summed_loss import loss_units
from resilient.observability.step_trace import TracedStep
from resilient.optim import learning_rate
from resilient.protocol.alike import Alike
from resilient.protocol.checkpoint_pace import CheckpointClock
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import (
    Arm,
    Dropped,
    Failed,
    Finish,
    Finished,
    FromWorkerMessage,
    Generation,
    Ready,
    Regroup,
    Report,
    Save,
    StepDone,
    StepOutcome,
    Suspect,
    ToWorkerMessage,
)
from resilient.runtime.batches import Batches
from resilient.runtime.commit import Ballot, Ledger
from resilient.runtime.generation_guard import GenerationGuard
from resilient.runtime.install import Session, WorkerContext, install, supply
from resilient.runtime.job import Job
from resilient.runtime.nonfinite import find_nonfinite
from resilient.runtime.own_errors import error_kind
from resilient.runtime.saver import Saver
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.planning import UnitPlanning
from resilient.state import manifest
from resilient.state.checkpoint import HeldPart
from resilient.state.fingerprint import fingerprint
from resilient.state.replicas import OddCopiesError
from resilient.state.skipped import MOST_IN_A_ROW
from resilient.state.witnesses import HeldCopy, piece_name
from resilient.templates.inputs.profile import ModelProfile

logger = logging.getLogger(__name__)


_KEPT_STEPS = 4096
"""More than are done until it is noticed that who tells of them is cut off."""


class Client(Protocol):
    """The worker's way to the coordinator: the agent's client, or a stand-in in one process."""

    run_directory: str
    on_regroup: Callable[[Regroup], None] | None
    on_arm: Callable[[Arm], None] | None

    def send(self, message: FromWorkerMessage) -> None: ...

    def receive(self) -> ToWorkerMessage: ...


class Worker:
    """One worker process of a job.

    Args:
        job: What to train.
        profile: Of its model, on its device.
        client: The connection to the coordinator.
        host: This machine's address for its peers.
        traced_steps: Steps of which it writes down when it did what.
        processes: What reads samples ahead of time; None to read them when they are needed.
        alike: What must be equal on all workers of a job of several.
        planning: What assigns samples to the cells of units; None for a chain.
        ports: The range to listen in there, "" for any port.
    """

    def __init__(
        self,
        job: Job,
        profile: ModelProfile,
        client: Client,
        host: str,
        secret: bytes,
        traced_steps: range = range(0),
        processes: DataProcesses | None = None,
        alike: Alike | None = None,
        planning: UnitPlanning | None = None,
        ports: str = "",
    ) -> None:
        job.use_device()
        self._job = job
        self._client = client
        self._traced_steps = traced_steps
        self._spec = job.spec(profile, alike or {}, () if planning is None else planning.templates)
        self._guard = GenerationGuard()
        self._faults = Faults(client.run_directory)
        self._ledger = Ledger(job.optimizer, job.clip_grad_norm)
        self._saver = Saver(client.send, self._ledger, job.comm_timeout_s, self._faults)
        self._checkpoint_clock = CheckpointClock()
        self._batches = Batches(job, processes)
        allow_many_files()  # some may be taken by strangers, who connect where its store and groups listen
        self._store = StoreHost(host, secret, ports)
        self._context = WorkerContext(
            job=job,
            profile=profile,
            layouts=job.layouts(),
            ledger=self._ledger,
            guard=self._guard,
            faults=self._faults,
            host=host,
            ports=ports,
            store_client=StoreClient(secret),
            planning=planning,
            learning=None if planning is None else Learning(planning.units, planning.degrees),
        )
        units = loss_units(job.model)
        self._loss_units = units if len(units) > 1 else ()
        self._session: Session | None = None
        self._left: Communicator | None = None
        self._failure: Exception | None = None
        self._stage_ms = 0.0  # measured in the generation that ended last
        self._steps: deque[StepDone] = deque(maxlen=_KEPT_STEPS)
        self.is_main = False

    def run(self) -> None:
        """Train the job to its end.

        Raises:
            Exception: What was raised here; the coordinator was told, and does without this node, or ends the job.
        """
        self._client.on_regroup = self._guard.announce
        self._client.on_arm = lambda message: self._faults.arm(message.injection)
        device = f"{self._job.device} {self._job.device_name}"
        self._client.send(Ready(job=self._spec, store_address=self._store.address, pid=os.getpid(), device=device))
        while True:
            message = self._client.receive()
            if isinstance(message, Finish):
                self._leave()
                if self._failure is not None:
                    raise self._failure
                self.is_main = message.is_main
                return
            if isinstance(message, Regroup):
                self._leave(broken=not message.at_boundary)
                progress = msgspec.structs.replace(self._ledger.progress(), stage_ms=self._stage_ms)
                while self._steps and self._steps[0].outcome.step <= message.heard_step:
                    self._steps.popleft()
                steps = tuple(self._steps)
                self._client.send(Report(generation=message.generation, progress=progress, steps=steps))
            elif isinstance(message, Save):
                self._save_and_stop(message)
            elif isinstance(message, Generation):
                self._enter(message)

    def _enter(self, message: Generation) -> None:
        self._leave()
        self._stage_ms = 0.0
        self.is_main = message.rank == 0
        while self._steps and self._steps[-1].outcome.step > message.version:
            self._steps.pop()  # the job goes back behind them
        if message.rank is None:  # stand by; a failure before the others' next commit may need the states held here
            self._ledger.begin_install(message.version, message.roll_forward, message.skipped)
            return
        try:
            if message.rank >= len(message.plan.slots):
                installed = supply(self._context, message)
                self._close_left()
                self._client.send(installed)
                return
            self._session, installed = install(self._context, message)
            self._close_left()
            self._client.send(installed)
            steps = self._session.steps
            self._batches.enter(steps.cells, self._session.sample_agreement.reads, steps.lengths)
            self._checkpoint_clock.enter(message.pace if message.rank == 0 else None)
            self._train(self._session, checkpoint_due=message.checkpoint_due)
        except CommunicationError as error:
            node = self._session.slot.node if self._session is not None else None
            error.locate(node=node, generation=message.generation)
            logger.info("left a generation: %s", error)
            # not left before all are asked to leave: to its peers, that would look like a further connection that broke
            self._client.send(Suspect(generation=message.generation, reason=str(error), peer=error.peer))
        except OddCopiesError as found:
            self._leave()  # in good order: a peer may still be in the comparison
            self._drop(found, message.generation)
        except Exception as error:  # the job's own code, or this node's disk, memory, device
            told, is_sound = self._told(error, message), not isinstance(error, ReplicaError)
            self._failure = error  # raised once the job's progress, of which this worker may hold a part, is saved
            where = "" if isinstance(error, NonFiniteError) else traceback.format_exc()  # it came from no line of code
            failed = Failed(error=told, traceback=where, is_sound=is_sound, kind=error_kind(error))
            if isinstance(error, CheckpointError):
                failed = msgspec.structs.replace(failed, damaged=error.damaged, instead=error.sound)
            self._client.send(failed)
            self._leave(broken=is_sound)

    def _drop(self, found: OddCopiesError, generation: int) -> None:
        """Drop the odd copies; the next generation, which whoever drops some asks for, copies them anew."""
        if found.own:
            self._ledger.drop(found.own)
            self._client.send(Dropped(generation=generation, step=self._ledger.version, odd=found.odd))

    def _told(self, error: Exception, message: Generation) -> str:
        """Return what ended this worker, and where in the job it was."""
        action = self._session.executor.failed_action if self._session is not None else None
        step = self._ledger.version + 1 if self._session is not None else None
        what = f"{type(error).__name__}: {error}"
        if not isinstance(error, ResilientError):
            return what + place_text(generation=message.generation, step=step, action=action)
        error.locate(generation=message.generation, step=step, action=action)
        return f"{type(error).__name__}: {error}"

    def _leave(self, *, broken: bool = False) -> None:
        """End the communication of the generation, if any is running."""
        comm = self._guard.release()
        if comm is not None:
            self._close_left()
            self._left = comm
            if broken:
                comm.abort()
                self._close_left()
        if self._session is not None:
            self._stage_ms = self._session.stage_timer.stage_ms
            self._session.gradient_sync.close()
            self._session.steps.close()
            self._session = None

    def _close_left(self) -> None:
        """Close the groups left in good order, once all have met again: a peer may have been in their last barrier."""
        if self._left is not None:
            self._left.close()
            self._left = None

    def _train(self, session: Session, *, checkpoint_due: bool) -> None:
        self._faults.reach("assign", self._ledger.version + 1)
        session.steps.begin(self._ledger.version)
        if checkpoint_due:
            self._try_checkpoint(session)
        while self._ledger.version < self._job.num_steps:
            done = self._ledger.version
            paused = self._traced_step(session)
            if self._ledger.version == done:
                return  # another rank says why
            passed = self._ledger.passed
            is_chosen = passed is not None and passed.saves
            if self._ledger.version < self._job.num_steps and self._job.saves_after(done + 1, is_chosen=is_chosen):
                self._try_checkpoint(session)
            if paused and self._ledger.version < self._job.num_steps:
                return
        session.replicas.check(self._ledger.version)
        self._saver.write_last(session.generation, *self._part(session), check=session.comm.check)
        self._client.send(Finished(generation=session.generation))

    def _traced_step(self, session: Session) -> bool:
        """Train one step, and write down how if that was asked for; return whether to stop at the boundary after it."""
        step, slot, recorder = self._ledger.version + 1, session.slot, session.executor.span_recorder
        recorder.with_processor_time = step in self._traced_steps
        if step not in self._traced_steps:
            return self._step(session)
        planned = session.steps.planned(step)
        started_ns, started_busy_ns = time.time_ns(), time.thread_time_ns()
        try:
            return self._step(session)
        finally:
            TracedStep(
                step=step,
                generation=session.generation,
                node=slot.node,
                local_rank=slot.local_rank,
                pipeline=slot.pipeline_index,
                row=slot.row_index,
                start_ns=started_ns,
                end_ns=time.time_ns(),
                busy_us=(time.thread_time_ns() - started_busy_ns) // 1000,
                spans=recorder.spans(),
                planned=planned,
            ).write(self._client.run_directory)

    def _step(self, session: Session) -> bool:
        started = time.perf_counter()
        ledger, step = self._ledger, self._ledger.version + 1
        self._faults.reach("step", step)
        session.comm.check()  # a step that is given up before it begins is not lost
        ledger.begin_step()
        num_targets = self._batches.num_targets(step)
        work = session.steps.work(step, num_targets, partial(self._batches.batch, step))
        losses = session.executor.run(work, reads_here=self._batches.reads_here)
        self._faults.reach("prepare", step)
        pause = self._guard.pause_wanted(session.generation)
        with session.executor.span_recorder.during("prepare"):
            session.replicas.check_in_step(step)
            squares, readings = session.gradient_sync.squares, self._batches.readings(step)
            samples = session.sample_agreement.share(readings)
            ballot = Ballot(
                losses=losses,
                squares=squares,
                num_targets=num_targets,
                units=self._loss_units,
                pause=pause,
                saves=self._checkpoint_clock.is_due(),
                samples=samples,
                carried=session.steps.bring(step),
            )
            verdict = ledger.prepare(session.comm, ballot)
            if not verdict.samples_agree:
                raise session.sample_agreement.difference(session.comm, step, readings)
        if self._ends_with(verdict.outcome):
            ledger.begin_step()  # it is done once more, and not committed
            error = find_nonfinite(session, work, verdict.outcome, self._job, self._batches)
            if error is not None:
                raise error
            return verdict.pause
        self._checkpoint_clock.note_step(is_saved=verdict.outcome.saves)
        self._faults.reach("commit", step)
        with session.executor.span_recorder.during("commit"):
            ledger.apply(verdict.outcome)
            session.steps.learn(step, session.stage_timer.end_step(session.steps.num_microbatches(step)))
            session.steps.take(step, verdict.carried)
        self._steps.append(
            StepDone(
                generation=session.generation,
                outcome=verdict.outcome,
                num_samples=self._job.global_batch,
                step_ms=1000 * (time.perf_counter() - started),
                learning_rate=learning_rate(self._job.optimizer, step),
                at=time.time(),
                waited_ms=1000 * session.steps.waited_s,
                checkpoint_s=self._checkpoint_clock.cost_s,
            )
        )
        if session.slot.rank == 0:
            self._client.send(self._steps[-1])
        return verdict.pause

    def _ends_with(self, outcome: StepOutcome) -> bool:
        """Return whether a step ends the job, rather than being committed, be it to be skipped."""
        is_last_straw = self._job.on_nonfinite == "stop" or outcome.skipped.in_a_row >= MOST_IN_A_ROW
        return is_last_straw and not outcome.is_finite

    def _try_checkpoint(self, session: Session) -> None:
        """Write this rank's part of a checkpoint on the way, of which all copies are equal."""
        session.replicas.check(self._ledger.version)
        self._saver.try_write(session.generation, *self._part(session))

    def _part(self, session: Session) -> tuple[list[HeldPart], Path]:
        """Return what this rank writes of a checkpoint, and where."""
        chosen = manifest.writers(session.plan, self._spec.profile)
        rank, current = session.slot.rank, self._ledger.current
        mine = [(state, chosen[name][rank]) for name, state in current.items() if rank in chosen[name]]
        return mine, manifest.folder(self._client.run_directory, self._ledger.version)

    def _save_and_stop(self, message: Save) -> None:
        self._leave()
        self._ledger.begin_install(message.version, message.roll_forward, message.skipped)
        retained, kind = self._ledger.retained, self._job.device_name
        held: dict[str, HeldCopy] = {}
        for name, state in retained.items():
            pieces = [piece for piece in message.compared.get(name, ()) if piece & state.held]
            for piece in pieces or [None]:
                data = state.bytes if piece is None else state.held_bytes(piece)
                held[piece_name(name, piece)] = HeldCopy(
                    fingerprint=fingerprint(data), origin=state.origin, device=kind
                )
        parts = [(retained[name], message.parts.get(name, retained[name].whole)) for name in message.states]
        self._saver.write_last(message.generation, parts, Path(message.path), held=held)
        if self._failure is not None:
            raise self._failure
