"""What the survivors of a generation agree on: the version to go on from, and who holds which state at it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from resilient.agent.membership.next_generation.members import WorkerId
from resilient.protocol.messages import StepOutcome, WorkerProgress
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.inputs.profile import ModelProfile

NOTHING = WorkerProgress(version=-1, complete=False)
"""The progress of a worker that holds no state yet."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The result.

    Args:
        version: Committed steps to go on from.
        skipped: Those of them that were skipped.
        outcome: Of step ``version``, if anybody alive or the coordinator knows it.
        roll_forward: Outcome of step ``version``, for workers still at ``version - 1``; None when there are none.
        held: Per worker, the states it holds at ``version`` (after rolling forward).
        begun: Somebody alive has begun step ``version + 1``, which is to be done again.
    """

    version: int
    outcome: StepOutcome | None
    roll_forward: StepOutcome | None
    held: Mapping[WorkerId, tuple[str, ...]]
    begun: bool = False
    skipped: SkippedSteps = NONE_SKIPPED

    @classmethod
    def of_the_start(cls, version: int, skipped: SkippedSteps) -> Agreement:
        """Return what there is to agree on before the first generation: nobody holds anything."""
        return cls(version=version, outcome=None, roll_forward=None, held={}, skipped=skipped)

    def without(self, nodes: Collection[int]) -> Agreement:
        """Return what is left of it without what some nodes hold."""
        held = {worker: states for worker, states in self.held.items() if worker[0] not in nodes}
        return replace(self, held=held)

    def holders(self) -> dict[str, list[WorkerId]]:
        """Return, per state, the workers that hold it."""
        holders: dict[str, list[WorkerId]] = {}
        for worker in sorted(self.held):
            for state in self.held[worker]:
                holders.setdefault(state, []).append(worker)
        return holders


def agree(
    reports: Mapping[WorkerId, WorkerProgress],
    newest: StepOutcome | None,
    version: int,
    skipped: SkippedSteps = NONE_SKIPPED,
) -> Agreement:
    """Decide where to go on.

    If anybody, dead or alive, is known to have passed the prepare barrier of step V, everybody was complete when it
    entered it, so all roll forward to V. Otherwise the step under way is dropped and redone.

    Args:
        reports: The survivors' progress.
        newest: The newest outcome the coordinator heard of; its sender may be dead.
        version: The version the current generation began from: nobody goes back behind it.
        skipped: Steps that were skipped up to it.
    """
    outcomes = {outcome.step: outcome for outcome in (p.passed for p in reports.values()) if outcome is not None}
    if newest is not None:
        outcomes.setdefault(newest.step, newest)
    agreed = max([version, *outcomes, *(progress.version for progress in reports.values())])
    held: dict[WorkerId, tuple[str, ...]] = {}
    behind = False
    for worker, progress in reports.items():
        if progress.version == agreed:
            held[worker] = tuple(dict.fromkeys((*progress.current, *progress.retained)))
        elif progress.version == agreed - 1 and progress.complete and agreed in outcomes:
            held[worker] = progress.current
            behind = True
    outcome = outcomes.get(agreed)
    return Agreement(
        version=agreed,
        outcome=outcome,
        roll_forward=outcome if behind else None,
        held=held,
        begun=any(progress.begun and progress.version == agreed for progress in reports.values()),
        skipped=skipped if outcome is None else outcome.skipped,
    )


def share_out(held: Mapping[WorkerId, tuple[str, ...]], profile: ModelProfile) -> dict[WorkerId, tuple[str, ...]]:
    """Choose one holder for each state that is to be saved, such that the bytes are spread evenly.

    Args:
        held: Who holds which states.
        profile: Of the model.

    Returns:
        What each is to save: nothing, too, of those who hold states that others save.
    """
    load = {worker: 0 for worker, states in held.items() if states}
    shares: dict[WorkerId, list[str]] = {worker: [] for worker in load}
    for layer in sorted(profile.layers, key=lambda layer: -layer.state_bytes):
        holders = [worker for worker in load if layer.name in held[worker]]
        if holders:
            worker = min(holders, key=lambda worker: (load[worker], worker))
            load[worker] += layer.state_bytes
            shares[worker].append(layer.name)
    return {worker: tuple(states) for worker, states in shares.items()}


def uncovered(profile: ModelProfile, states: Mapping[str, object]) -> tuple[str, ...]:
    """Return the states with content that ``states`` lacks, in layer order."""
    return tuple(layer.name for layer in profile.layers if layer.state_bytes and layer.name not in states)
