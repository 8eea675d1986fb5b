"""What a worker can have to say now: nothing of a generation that it has no part in, and no numbers that cannot be.

Workers that are as they should be say nothing else. Whatever has the job's token may say anything, so the machine asks
here before it hears: what is not credible changes nothing. That members without a place say little keeps visitors from
harm; who has a place is taken at its word where only it can know. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.members import WorkerId
from resilient.protocol.messages import (
    Dropped,
    Failed,
    Finished,
    FromWorkerMessage,
    Installed,
    Note,
    NotSaved,
    Output,
    Ready,
    Report,
    Saved,
    StepDone,
    StepOutcome,
    Suspect,
)
from resilient.state.manifest import SavedState
from resilient.state.witnesses import state_of, worker_of
from resilient.templates.common.byte_intervals import ByteIntervals


def is_credible(parts: JobParts, message: FromWorkerMessage, worker: WorkerId) -> bool:
    """Return whether a member's worker may say this now.

    Args:
        parts: What the machine knows.
        message: What is said.
        worker: By whom; its node is a member.
    """
    member, participants = parts.context.members[worker[0]], parts.participants
    if not 0 <= worker[1] < member.num_workers:
        return False
    has_place = participants.has_place(worker)
    match message:
        case Ready() | Failed():
            return True  # what it tells of the job is held against what others told; who fails is done without
        case Output() | Note():
            return participants.plan is None or has_place or participants.is_main(worker)
        case Report():
            is_asked = has_place or (member.is_ready and member.admitted)
            return is_asked and _is_report(parts, message, has_place=has_place)
        case Suspect(peer=peer):
            return participants.takes_part(worker) and (peer is None or participants.has_rank(peer))
        case Installed():
            times = (message.started_at, message.regrouped_at, message.installed_at)
            return participants.takes_part(worker) and _are_amounts(*times, message.bytes_copied)
        case Dropped():
            return has_place and _is_step(parts, message.step) and _are_copies(parts, message.odd)
        case Saved():
            last = parts.last_checkpoint
            is_writer = has_place if last is None else worker in last.awaiting
            return is_writer and message.generation == parts.context.generation and _is_part(parts, message)
        case StepDone():
            is_next = has_place and worker == participants.worker_at(0) and message.outcome.step > parts.progress.step
            return is_next and _is_step_done(parts, message)
        case NotSaved(step=step):
            return has_place and _is_step(parts, step)
        case Finished():
            return has_place


def _are_amounts(*numbers: float) -> bool:
    return all(math.isfinite(number) and number >= 0 for number in numbers)


def _is_step(parts: JobParts, step: int, *, least: int = 0, most: int | None = None) -> bool:
    return least <= step <= (parts.job.spec.num_steps if most is None else most)


def _are_states(parts: JobParts, states: Iterable[str]) -> bool:
    return parts.job.states.keys() >= set(states)


def _are_parts(parts: JobParts, held: Mapping[str, ByteIntervals]) -> bool:
    whole = parts.job.states
    return all(state in whole and not part - whole[state] for state, part in held.items())


def _are_copies(parts: JobParts, odd: Mapping[int, Iterable[str]]) -> bool:
    holders = map(worker_of, odd)
    return all(map(parts.participants.has_place, holders)) and all(_are_states(parts, each) for each in odd.values())


def _is_outcome(parts: JobParts, outcome: StepOutcome, *, most: int | None = None) -> bool:
    """Loss and gradient may be any: there are steps in which they are no numbers."""
    skipped = outcome.skipped
    return _is_step(parts, outcome.step, least=1, most=most) and 0 <= skipped.total <= outcome.step


def _is_step_done(parts: JobParts, done: StepDone, *, most: int | None = None) -> bool:
    rate_and_times = (done.learning_rate, done.step_ms, done.at, done.waited_ms)
    return _is_outcome(parts, done.outcome, most=most) and _are_amounts(*rate_and_times, done.num_samples)


def _is_report(parts: JobParts, report: Report, *, has_place: bool) -> bool:
    """Who stands by has done no step of the generation in force: it knows of none after that which this began from."""
    said, most = report.progress, None if has_place else parts.progress.version
    return (
        _is_step(parts, said.version, least=-1, most=most)
        and (said.passed is None or _is_outcome(parts, said.passed, most=most))
        and _are_states(parts, (*said.current, *said.retained))
        and _are_parts(parts, said.current_parts)
        and _are_parts(parts, said.retained_parts)
        and _are_amounts(said.stage_ms)
        and all(_is_step_done(parts, done, most=most) for done in report.steps)
    )


def _is_part(parts: JobParts, saved: Saved) -> bool:
    """Files lie in the checkpoint's folder and are called after their layer."""
    last = parts.last_checkpoint
    return (
        _is_step(parts, saved.step)
        and (last is None or saved.step == last.step)
        and _are_states(parts, (*saved.states, *map(state_of, saved.held)))
        and all(_is_file(name, file) for name, files in saved.states.items() for file in files)
    )


def _is_file(layer: str, saved: SavedState) -> bool:
    is_plain = PurePath(saved.file).name == saved.file
    return is_plain and saved.file.startswith(f"{layer}.") and saved.num_bytes >= 0
