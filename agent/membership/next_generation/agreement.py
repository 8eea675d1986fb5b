"""What the survivors of a generation agree on: the version to go on from, and who holds which state at it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from resilient.agent.membership.next_generation.members import WorkerId
from resilient.protocol.messages import StepOutcome, WorkerProgress
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, common_pieces
from resilient.templates.inputs.profile import ModelProfile

HeldStates = Mapping[str, ByteIntervals | None]
"""The states somebody holds, and which bytes of each; None for all."""

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
        held: Per worker, what it holds of which states at ``version`` (after rolling forward).
        begun: Somebody alive has begun step ``version + 1``, which is to be done again.
    """

    version: int
    outcome: StepOutcome | None
    roll_forward: StepOutcome | None
    held: Mapping[WorkerId, HeldStates]
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

    def holders(self, profile: ModelProfile) -> dict[str, dict[WorkerId, ByteIntervals]]:
        """Return, per state, what workers hold of it."""
        return _holders(self.held, profile)


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
    held: dict[WorkerId, HeldStates] = {}
    behind = False
    for worker, progress in reports.items():
        if progress.version == agreed:
            held[worker] = _joined(_current(progress), _retained(progress))
        elif progress.version == agreed - 1 and progress.complete and agreed in outcomes:
            held[worker] = _current(progress)
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


def _current(progress: WorkerProgress) -> HeldStates:
    return _held(progress.current, progress.current_parts)


def _retained(progress: WorkerProgress) -> HeldStates:
    return _held(progress.retained, progress.retained_parts)


def _held(names: Collection[str], parts: Mapping[str, ByteIntervals]) -> HeldStates:
    return {name: parts.get(name) for name in names} if parts else dict.fromkeys(names)


def _joined(one: HeldStates, other: HeldStates) -> HeldStates:
    """Return what is in either."""
    if not other:
        return one
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        parts = one[name], other[name]
        joined[name] = None if parts[0] is None or parts[1] is None else parts[0] | parts[1]
    return joined


def _holders(held: Mapping[WorkerId, HeldStates], profile: ModelProfile) -> dict[str, dict[WorkerId, ByteIntervals]]:
    whole = {layer.name: layer.whole for layer in profile.layers}
    holders: dict[str, dict[WorkerId, ByteIntervals]] = {}
    for worker in sorted(held):
        for state, part in held[worker].items():
            holders.setdefault(state, {})[worker] = whole[state] if part is None else part
    return holders


def _pieces(holders: Mapping[WorkerId, ByteIntervals]) -> list[tuple[ByteIntervals, list[WorkerId]]]:
    """Return what of a state the same workers hold."""
    workers = list(holders)
    pieces = common_pieces(dict(enumerate(holders.values())))
    return [(piece.intervals, [workers[number] for number in piece.holders]) for piece in pieces]


def compared_pieces(held: Mapping[WorkerId, HeldStates], profile: ModelProfile) -> dict[str, tuple[ByteIntervals, ...]]:
    """Return, of states that somebody holds a part of, the pieces that everybody holds whole or not at all."""
    return {
        state: tuple(intervals for intervals, _ in _pieces(holders))
        for state, holders in _holders(held, profile).items()
        if any(part != profile.layers[profile.index(state)].whole for part in holders.values())
    }


def share_out(held: Mapping[WorkerId, HeldStates], profile: ModelProfile) -> dict[WorkerId, HeldStates]:
    """Choose one holder for each byte of each state that is to be saved, such that the bytes are spread evenly.

    Args:
        held: Who holds what.
        profile: Of the model.

    Returns:
        What each is to save: nothing, too, of those who hold states that others save.
    """
    load = {worker: 0 for worker, states in held.items() if states}
    shares: dict[WorkerId, dict[str, ByteIntervals | None]] = {worker: {} for worker in load}
    holders = _holders(held, profile)
    for layer in sorted(profile.layers, key=lambda layer: -layer.state_bytes):
        written: dict[WorkerId, ByteIntervals] = {}
        for intervals, workers in _pieces(holders.get(layer.name, {})):
            worker = min(workers, key=lambda worker: (load[worker], worker))
            load[worker] += intervals.size
            written[worker] = written.get(worker, NO_BYTES) | intervals
        for worker, part in written.items():
            shares[worker][layer.name] = None if part == layer.whole else part
    return {**shares}


def uncovered(profile: ModelProfile, held: Iterable[HeldStates]) -> tuple[str, ...]:
    """Return the states of which somebody has to hold bytes that nobody does, in layer order."""
    told = list(held)
    lacking: list[str] = []
    for layer in profile.layers:
        parts = (
            layer.whole if part is None else part for part in (each[layer.name] for each in told if layer.name in each)
        )
        if layer.whole - reduce(or_, parts, NO_BYTES):
            lacking.append(layer.name)
    return tuple(lacking)
