"""What must be true of the membership machine after every stimulus."""

from __future__ import annotations

from collections.abc import Iterator

from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.parts.context import TRAINING, Phase


class Invariants:
    """Checks a machine after each stimulus, also against what it was the last time."""

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._generation = 0
        self._step = 0
        self._now = float("-inf")

    def broken(self, machine: JobParts) -> list[str]:
        """Return the invariants that do not hold, each in words; none of a machine in order."""
        checks = (_of_phase, _of_members, _of_generation, _of_change, _of_end, self._of_course)
        found = [text for check in checks for text in check(machine)]
        self._phase, self._generation = machine.phase, machine.context.generation
        self._step, self._now = machine.progress.step, machine.context.now
        return found

    def _of_course(self, machine: JobParts) -> Iterator[str]:
        """Time and generations go forward, and so do steps, unless states were lost."""
        generation, step = machine.context.generation, machine.progress.step
        if machine.context.now < self._now:
            yield f"time goes back from {self._now} to {machine.context.now}"
        if not self._generation <= generation <= self._generation + 1:
            yield f"generation {generation} follows {self._generation}"
        loadable = {0} | {checkpoint.step for checkpoint in machine.checkpoints.whole}
        if step < self._step and (generation == self._generation or step not in loadable):
            yield f"step {step} follows {self._step}, and is not what a new generation loads"
        if machine.phase is Phase.STARTING and self._phase is not Phase.STARTING:
            yield f"the job starts again after {self._phase.value}"
        if self._phase is Phase.FINISHED and machine.phase not in (Phase.FINISHED, Phase.STOPPED):
            yield f"the job goes on ({machine.phase.value}) after it was finished"
        if self._phase is Phase.STOPPED and machine.phase is not Phase.STOPPED:
            yield f"the job goes on ({machine.phase.value}) after it was stopped"


def _of_phase(machine: JobParts) -> Iterator[str]:
    """A change is there while agreeing, a last checkpoint while saving, a plan from the first generation on."""
    phase = machine.phase
    if (machine.change is not None) != (phase is Phase.AGREEING):
        yield f"a change is {'' if machine.change else 'not '}under way while {phase.value}"
    if (machine.last_checkpoint is not None) != (phase is Phase.SAVING):
        yield f"the last checkpoint is {'' if machine.last_checkpoint else 'not '}waited for while {phase.value}"
    begun = machine.context.generation > 0
    if (machine.participants.plan is not None) != begun:
        yield f"there is {'no' if begun else 'a'} plan in generation {machine.context.generation}"
    if begun and not machine.job.is_known:
        yield "a generation is in force, and nobody has said what the job is"
    if phase is not Phase.STOPPED and begun != (phase is not Phase.STARTING):
        yield f"the job is {phase.value} in generation {machine.context.generation}"


def _of_members(machine: JobParts) -> Iterator[str]:
    """Members are as the job wants them; plans have been asked for before they are there."""
    num_workers = machine.context.settings.workers_per_node
    for node, member in machine.context.members.items():
        ranks = set(range(num_workers))
        if member.node != node or member.num_workers != num_workers:
            yield f"node {node} is not what it connected as"
        if not (member.ready.keys() <= ranks and member.done <= ranks):
            yield f"node {node} has workers that it was not started with"
        if member.lacks_plans and not member.is_up:
            yield f"node {node} is held back for plans before it is up"
        if member.admitted and not member.is_ready:
            yield f"node {node} was admitted before it was ready"
    if machine.job.planned_for > machine.job.asked_for:
        yield f"plans for {machine.job.planned_for} nodes are there, asked for were {machine.job.asked_for}"


def _of_generation(machine: JobParts) -> Iterator[str]:
    """Who has a place is alive and admitted, or a change is under way; who finished has a place."""
    phase, participants, members = machine.phase, machine.participants, machine.context.members
    if participants.plan is None:
        return
    slots = {(slot.node, slot.local_rank) for slot in participants.plan.slots}
    if phase in (Phase.INSTALLING, Phase.RUNNING):
        dead = sorted({node for node, _ in slots | participants.senders} - members.keys())
        if dead:
            yield f"nodes {dead} take part in generation {machine.context.generation} and are gone"
        strangers = sorted(node for node in members.keys() & set(participants.plan.nodes) if not members[node].admitted)
        if strangers:
            yield f"nodes {strangers} have a place and were not told"
        if machine.suspicions.is_in_vain:
            yield f"a generation follows {machine.suspicions.count} suspicions without a step"
        if erring := sorted(machine.own_errors.erring):
            yield f"nodes {erring} are to be let go, and generation {machine.context.generation} goes on"
    if participants.senders and phase not in (Phase.INSTALLING, Phase.FINISHED, Phase.STOPPED):
        yield f"{sorted(participants.senders)} still have states to send while {phase.value}"
    if participants.senders & slots:
        yield f"{sorted(participants.senders & slots)} send states as if they had no place"
    if phase is Phase.INSTALLING and participants.is_installed:
        yield "everybody has installed the generation, and it does not run"
    if phase is Phase.RUNNING and not participants.is_installed:
        yield "the generation runs before everybody has installed it"
    if not participants.finished <= slots:
        yield f"{sorted(participants.finished - slots)} have finished without a place"
    if machine.stalls.advanced_at > machine.context.now:
        yield "the job advanced in the future"


def _of_change(machine: JobParts) -> Iterator[str]:
    """A change is for the next generation; it waits for somebody, and for nobody who is gone."""
    members = machine.context.members
    gone = sorted({node for node, _ in machine.awaiting} - members.keys())
    if gone:
        yield f"nodes {gone} are waited for and are gone"
    is_waiting = machine.change is not None and machine.change.waits_for_nodes
    is_written = machine.phase is Phase.SAVING and machine.checkpoints.is_unwritten(machine.progress.step)
    if machine.phase in (Phase.AGREEING, Phase.SAVING) and not (machine.awaiting or is_waiting or is_written):
        yield f"nobody is waited for while {machine.phase.value}"
    if machine.change is not None:
        if machine.change.generation != machine.context.generation + 1:
            yield f"generation {machine.change.generation} is being formed in {machine.context.generation}"
        if reported := sorted({node for node, _ in machine.change.reports} - members.keys()):
            yield f"reports of nodes {reported} count, which are gone"
    if machine.last_checkpoint is not None and machine.last_checkpoint.step != machine.progress.step:
        yield f"step {machine.last_checkpoint.step} is saved after step {machine.progress.step}"


def _of_end(machine: JobParts) -> Iterator[str]:
    """A job that is to end forms no generation; one that is finished has done and saved its last step."""
    if machine.ending.failure and machine.phase in (Phase.STARTING, Phase.INSTALLING, Phase.RUNNING):
        yield f"the job has failed and is {machine.phase.value}"
    paths = [checkpoint.path for checkpoint in machine.checkpoints.whole]
    if len(paths) != len(set(paths)):
        yield "a checkpoint is counted twice"
    if machine.phase is Phase.FINISHED:
        num_steps = machine.job.spec.num_steps
        if machine.progress.step != num_steps:
            yield f"the job is finished at step {machine.progress.step} of {num_steps}"
        if not machine.checkpoints.has(num_steps):
            yield f"the job is finished without a checkpoint of step {num_steps}"
    if machine.phase in (*TRAINING, Phase.SAVING, Phase.FINISHED) and not machine.context.members:
        yield f"no node is left while {machine.phase.value}"
