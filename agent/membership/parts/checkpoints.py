"""Checkpoints: the whole ones, and the parts of those to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from resilient.agent.membership.next_generation.checkpoint_risk import CheckpointRisk
from resilient.agent.membership.next_generation.forming import Checkpoint, source_at
from resilient.agent.membership.parts.context import Context
from resilient.agent.membership.parts.events import WriteManifest
from resilient.protocol.checkpoint_pace import AUTO_CHECKPOINTS, CheckpointPace
from resilient.protocol.messages import JobSpec, Saved, StepOutcome
from resilient.state.manifest import Manifest, SavedState, SavedStates, folder, is_beside, step_of_folder
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.profile import LayerProfile, ModelProfile

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
"""Between two tries to write a manifest."""


class Parts:
    """What workers have saved so far, by step."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, dict[ByteIntervals | None, tuple[SavedState, int]]]] = {}

    def add(self, message: Saved, node: int) -> None:
        """Take in the part of one of a node's workers."""
        states = self._states.setdefault(message.step, {})
        for name, files in message.states.items():
            states.setdefault(name, {}).update({saved.intervals: (saved, node) for saved in files})

    def states(self, step: int) -> SavedStates:
        """Return what is saved of a step."""
        states = self._states.get(step, {})
        return {name: tuple(saved for saved, _ in files.values()) for name, files in states.items()}

    def nodes(self, step: int) -> dict[str, int]:
        """Return who has saved the files of a step."""
        files = (file for of in self._states.get(step, {}).values() for file in of.values())
        return {saved.file: node for saved, node in files}

    def lacking(self, step: int, profile: ModelProfile) -> tuple[str, ...]:
        """Return the states of which not every byte is saved, in layer order."""
        states = self.states(step)
        return tuple(layer.name for layer in profile.layers if _lacks(layer, states.get(layer.name, ())))

    def take_back(self, step: int, state: str) -> None:
        """Forget what was saved of a state."""
        self._states[step].pop(state, None)

    def drop(self, step: int) -> None:
        """Forget a step that is whole, and those before it that never will be."""
        self._states = {later: states for later, states in self._states.items() if later > step}


def _lacks(layer: LayerProfile, files: Iterable[SavedState]) -> bool:
    left = layer.whole
    for saved in files:
        left -= layer.whole if saved.intervals is None else saved.intervals
    return bool(left)


@dataclass(kw_only=True)
class _Unwritten:
    """A manifest, since when it could not be written, and when it is tried once more; None while it is tried."""

    write: WriteManifest
    failed_at: float | None = None
    try_at: float | None = None
    pause_s: float = _FIRST_PAUSE_S


class Checkpoints:
    """Knows the checkpoints there are, and makes one of the parts that workers save on the way."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._whole: list[Checkpoint] = []
        self._parts = Parts()
        self._missed: set[int] = set()
        self._unwritten: dict[int, _Unwritten] = {}
        self._chosen: set[int] = set()
        self._cost_s: float | None = None
        self._newest_at: float | None = None
        if context.settings.resume is not None:
            path, manifest = context.settings.resume
            self._whole.append(Checkpoint(step=manifest.step, path=path, skipped=manifest.skipped))

    @property
    def whole(self) -> tuple[Checkpoint, ...]:
        """Those that states can be loaded from."""
        return tuple(self._whole)

    @property
    def newest_path(self) -> str | None:
        """Folder of the one with the most steps."""
        newest = max(self._whole, key=lambda checkpoint: checkpoint.step, default=None)
        return newest.path if newest is not None else None

    def path(self, step: int) -> str:
        """Return the folder of this run's checkpoint of a step."""
        return str(folder(self._context.settings.run_directory, step))

    def has(self, step: int) -> bool:
        """Return whether this run's checkpoint of a step is whole."""
        return any(checkpoint.path == self.path(step) for checkpoint in self._whole)

    def is_due(self, step: int, job: JobSpec) -> bool:
        """Return whether there is to be a checkpoint of a step, on the way, and is none."""
        is_wanted = job.saves_after(step, is_chosen=step in self._chosen)
        return is_wanted and 0 < step < job.num_steps and not source_at(step, self._whole)

    def note_outcome(self, outcome: StepOutcome) -> None:
        """Take in that a step was committed, after which a checkpoint may have been chosen to follow."""
        if outcome.saves:
            self._chosen.add(outcome.step)

    def note_cost(self, cost_s: float | None) -> None:
        """Take in what a checkpoint was measured to cost."""
        self._cost_s = self._cost_s if cost_s is None else cost_s

    def pace(self, risk: CheckpointRisk, job: JobSpec) -> CheckpointPace | None:
        """Return by what a generation that begins chooses its checkpoints; None where it does not choose."""
        if job.checkpoint_every != AUTO_CHECKPOINTS:
            return None
        now = self._context.now
        self._newest_at = now if self._newest_at is None else self._newest_at
        return CheckpointPace(
            risk_s=risk.interval_s(now, job.max_failures), cost_s=self._cost_s, since_s=now - self._newest_at
        )

    def enter_generation(self, before: int, version: int, job: JobSpec) -> None:
        """Forget the parts of those that are not whole: the next generation writes that of its first step again.

        Args:
            before: The step that the generation before began from.
            version: The step that the next one begins from; there will be no checkpoint of steps between the two.
            job: What is trained.
        """
        self._parts = Parts()
        for step in range(before, version):
            if step not in self._missed and step not in self._unwritten and self.is_due(step, job):
                self.note_missed(step, None, "the job was regrouped before all parts were written")

    def add(self, message: Saved, node: int, job: JobSpec) -> None:
        """Take in what a node has written on the way; complete what it completes."""
        self._parts.add(message, node)
        if not self._parts.lacking(message.step, job.profile):
            self.complete(message.step, message.skipped, self._parts, job)

    def complete(self, step: int, skipped: SkippedSteps, parts: Parts, job: JobSpec) -> None:
        """Have a checkpoint made of parts that are all there, unless there is one, or will be."""
        if self.has(step) or self.is_unwritten(step):
            return
        manifest = Manifest(step=step, recipe=job.recipe, states=parts.states(step), skipped=skipped)
        write = WriteManifest(path=self.path(step), manifest=manifest, nodes=parts.nodes(step))
        self._unwritten[step] = _Unwritten(write=write)
        self._context.do(write)
        parts.drop(step)

    def is_unwritten(self, step: int) -> bool:
        """Return whether a checkpoint lacks only its manifest."""
        return step in self._unwritten

    def note_written(self, path: str) -> None:
        """Take in that a manifest is written, and record that: it counts from now on."""
        step = step_of_folder(path)
        unwritten = self._unwritten.pop(step, None)
        if unwritten is not None:  # otherwise another generation had it written, too
            skipped = unwritten.write.manifest.skipped
            self._whole.append(Checkpoint(step=step, path=path, skipped=skipped))
            self._newest_at = self._context.now
            self._context.record("checkpoint", step=step, path=path)

    def give_up(self, step: int) -> None:
        """Do without a checkpoint whose manifest cannot be written."""
        self._unwritten.pop(step, None)

    def put_off(self, step: int, limit_s: float) -> bool:
        """Have a manifest written once more, later; return whether the time that this may take is not over yet."""
        unwritten, now = self._unwritten[step], self._context.now
        if unwritten.failed_at is None:
            unwritten.failed_at = now
        if now - unwritten.failed_at >= limit_s:
            return False
        unwritten.try_at = now + unwritten.pause_s
        unwritten.pause_s = min(2 * unwritten.pause_s, _LONGEST_PAUSE_S)
        return True

    def try_again(self) -> None:
        """Have the manifests written whose time has come."""
        for unwritten in self._unwritten.values():
            if unwritten.try_at is not None and self._context.now >= unwritten.try_at:
                unwritten.try_at = None
                self._context.do(unwritten.write)

    def note_damaged(self, path: str, instead: str) -> None:
        """Count no longer on a checkpoint that is not what was written; ``instead``: the newest sound one beside it."""
        if path not in (checkpoint.path for checkpoint in self._whole):
            return  # another worker has told of it before
        self._whole = [checkpoint for checkpoint in self._whole if checkpoint.path not in (path, instead)]
        if instead and is_beside(instead, path):
            self._whole.append(Checkpoint(step=step_of_folder(instead), path=instead, skipped=NONE_SKIPPED))

    def note_missed(self, step: int, node: int | None, error: str) -> None:
        """Record that there will be no checkpoint of a step, because of a node or, None, of its manifest."""
        self._missed.add(step)
        self._context.record("checkpoint_failed", step=step, node=node, error=error, newest=self.newest_path)
