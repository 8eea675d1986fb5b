"""What a worker does with the coordinator's messages."""

from __future__ import annotations

from resilient.protocol.messages import (
    INIT,
    Finish,
    Generation,
    Regroup,
    Report,
    Save,
    StepOutcome,
    ToWorkerMessage,
    WorkerProgress,
)
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.jobs import SmallJob
from tests.agent.membership.checker.lineage import Disk, Lineage, Violation, damage, told
from tests.agent.membership.checker.worker import STEPPING, At, Worker, Writing


class Recovery:
    """Has workers do what they are told.

    Args:
        job: What is trained.
        disk: Where checkpoints are.
        fabrics: Of all generations, by number.
    """

    def __init__(self, job: SmallJob, disk: Disk, fabrics: dict[int, Fabric]) -> None:
        self._job, self._disk, self._fabrics = job, disk, fabrics

    def hear(self, worker: Worker, message: ToWorkerMessage) -> None:
        """Have a worker take in a message."""
        match message:
            case Regroup(generation=generation, at_boundary=at_boundary, heard_step=heard_step):
                worker.pause_for, worker.heard_step = generation, heard_step
                if not (at_boundary and worker.at in STEPPING):
                    worker.leave()
                    self.report(worker, generation)
            case Generation():
                self.install(worker, message)
            case Save():
                self.save(worker, message)
            case Finish(is_main=is_main):
                worker.leave()
                worker.at, worker.is_main = At.SCRIPT_ENDS, is_main
            case _:
                pass

    def report(self, worker: Worker, generation: int) -> None:
        """Say where a worker stands."""
        progress = WorkerProgress(
            version=worker.version,
            complete=worker.gradient is not None,
            begun=worker.begun,
            passed=worker.passed,
            current=tuple(worker.states),
            retained=tuple(worker.retained),
        )
        steps = tuple(done for done in worker.done if done.outcome.step > worker.heard_step)
        worker.say(Report(generation=generation, progress=progress, steps=steps))

    def come_to(self, worker: Worker, version: int, roll_forward: StepOutcome | None) -> dict[str, Lineage]:
        """Bring a worker to a version, by applying what it holds or by dropping it; return what it has at it."""
        if worker.version == version - 1 and worker.gradient is not None and roll_forward is not None:
            if str(roll_forward) != str(self._job.outcome(version)):  # a loss that is no number is unlike itself
                raise Violation(f"{worker.name} is to apply step {version} with {roll_forward}")
            worker.retained = {}
            worker.apply(worker.gradient, roll_forward)
        held = {**worker.retained, **worker.states} if worker.version == version else {}
        if worker.version != version:
            worker.passed = None
        worker.version, worker.gradient, worker.begun, worker.pause_for = version, None, False, 0
        return held

    def install(self, worker: Worker, message: Generation) -> None:
        """Have a worker enter a generation with what it holds and with what it can load; copies come later."""
        worker.leave()
        worker.writing.clear()
        worker.done.clear()
        held = self.come_to(worker, message.version, message.roll_forward)
        for name in worker.odd:
            held.pop(name, None)
        worker.is_damaged, worker.odd = worker.is_damaged and not worker.odd, set()
        if message.skipped != self._job.skipped(message.version):
            raise Violation(f"at step {message.version}, {message.skipped} is told to have been skipped")
        worker.states, worker.retained = {}, held
        if message.rank is None:
            return
        fabric = worker.fabric = self._fabrics[message.generation]
        worker.rank, worker.at = message.rank, At.MEETING
        fabric.joined.add(message.rank)
        if message.rank >= len(fabric.slots):
            return
        copied = {transfer.state for transfer in message.transfers if transfer.target == message.rank}
        for name in fabric.needed[message.rank]:
            if name in held:
                if name in copied:
                    raise Violation(f"{worker.name} holds {name} at step {message.version}, and is to get a copy")
                worker.states[name] = held[name]
            elif name not in copied:
                worker.states[name] = self._load(name, message)
        worker.retained = {name: lineage for name, lineage in held.items() if name not in worker.states}
        worker.is_writing_due = message.checkpoint_due

    def _load(self, name: str, message: Generation) -> Lineage:
        if message.source == INIT:
            lineage: Lineage = ()
        else:
            lineage = self._disk.load(message.source, name)
        if [applied.step for applied in lineage] != list(range(1, message.version + 1)):
            raise Violation(f"{name} at step {message.version} is to be loaded from {message.source}: {told(lineage)}")
        return lineage

    def save(self, worker: Worker, message: Save) -> None:
        """Have a worker write the states it is asked for, of the step it is told."""
        worker.leave()
        worker.writing.clear()
        held = self.come_to(worker, message.version, message.roll_forward)
        if worker.is_damaged and held:
            worker.is_damaged, state = False, worker.worst(held)
            held[state] = (*held[state], damage(worker.id))
        worker.states = held
        lacking = sorted(set(message.states) - held.keys())
        if lacking:
            raise Violation(f"{worker.name} is to save {lacking} of step {message.version}, and holds {sorted(held)}")
        if message.skipped != self._job.skipped(message.version):
            raise Violation(f"step {message.version} is to be saved with {message.skipped}")
        states = {name: held[name] for name in message.states}
        worker.writing.append(Writing(message.generation, message.version, states, message.path, is_asked=True))
