"""What must hold of all that the machine decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import (
    Instruction,
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    Record,
    Send,
    Stimulus,
    Stop,
    Tell,
    Tick,
    WorkerEnded,
    WorkerSaid,
    WriteManifest,
)
from resilient.protocol.messages import Finish, Generation, Regroup, Save, Shutdown, Suspect
from resilient.state.manifest import Manifest
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.lineage import Applied, Violation, is_damaged, told
from tests.agent.membership.checker.nodes import is_of_the_past
from tests.agent.membership.checker.truth import Truth
from tests.agent.membership.checker.worker import IN_FABRIC, Worker

if TYPE_CHECKING:
    from tests.agent.membership.checker.world import World

_OF_A_NODE = (NodeCutOff, NodeBack, NodeLost, NodeLeaving, WorkerEnded, WorkerSaid)
_STALL_S = 30.0  # the shortest limit of a step: 15 times the shorter comm_timeout_s
_ONE_WISH_S = 1.0


class Promises:
    """Holds what the machine is told and what it decides against what is true."""

    def __init__(self, world: World) -> None:
        self._world, self._job = world, world.job
        self.truth = Truth(world)
        self._main: Worker | None = None
        self._is_fenced = False
        self._step_told = world.job.settings.resume[1].step if world.job.settings.resume else 0
        self._announced_at = 0.0

    def note_installed(self, fabric: Fabric) -> None:
        """Take in that a worker has installed a generation."""
        self.truth.note_installed(fabric)

    def before(self, stimulus: Stimulus) -> None:
        """Take in what the machine is about to be told."""
        self._is_fenced = isinstance(stimulus, _OF_A_NODE) and stimulus.node in self.truth.gone
        if isinstance(stimulus, WorkerSaid) and is_of_the_past(stimulus.message, self.truth.generation):
            self._is_fenced = True
        self._status = self._world.machine.status() if self._is_fenced else None
        self._is_over = self._world.stop is not None
        self._was_ending = self.truth.is_ending
        self._suspects = isinstance(stimulus, WorkerSaid) and isinstance(stimulus.message, Suspect)
        self.truth.hear(stimulus)

    def after(self, stimulus: Stimulus, instructions: list[Instruction]) -> None:
        """Check that nothing came of what a node said that is gone, nor after the end."""
        if self._is_fenced and (instructions or self._world.machine.status() != self._status):
            raise Violation("a node that is gone, or a message of a generation that was left, is still listened to")
        self._check_losses(stimulus, instructions)
        self._check_saves(instructions)
        if isinstance(stimulus, Tick) and self._world.stop is None and self._is_out_of_time:
            raise Violation("an interrupted job goes on when its time is over")
        if self._is_over and instructions and not isinstance(stimulus, NodeConnected):
            raise Violation("the machine goes on after the job was stopped")

    @property
    def _is_out_of_time(self) -> bool:
        interruptions = self.truth.interruptions
        return bool(interruptions) and self._world.now - interruptions[0] >= self._job.settings.grace_s

    def _check_losses(self, stimulus: Stimulus, instructions: list[Instruction]) -> None:
        """Nobody is given up for nothing, and nothing goes on without one that takes part."""
        truth, machine = self.truth, self._world.machine
        for instruction in instructions:
            match instruction:
                case Record(kind="node_lost", fields={"node": node}) if node not in truth.gone:
                    raise Violation(f"node {node} is given up, and was not lost")
                case _:
                    pass
        if not isinstance(stimulus, NodeLost) or self._is_fenced or machine.generation != truth.generation:
            return
        if machine.phase not in (Phase.INSTALLING, Phase.RUNNING):
            return
        fabric = self._world.fabrics[truth.generation]
        is_copying = not truth.installed.issuperset(worker.id for worker in fabric.members.values())
        for rank, worker in fabric.members.items():
            if worker.id[0] == stimulus.node and (is_copying or rank < len(fabric.slots)):
                raise Violation(f"node {stimulus.node} is lost, and generation {truth.generation} goes on without it")

    def _check_saves(self, instructions: list[Instruction]) -> None:
        """A last checkpoint is begun only where somebody holds each state."""
        saves = [each.message for each in instructions if isinstance(each, Send) and isinstance(each.message, Save)]
        lacking = set(self._job.states) - {name for message in saves for name in message.states}
        if saves and lacking and not self._was_ending:
            raise Violation(f"step {saves[0].version} is saved, and nobody is asked for {sorted(lacking)}")

    def check(self, instruction: Instruction) -> None:
        """Check what the machine wants, before it is done."""
        self.truth.count_nodes()
        match instruction:
            case Send(message=Regroup(at_boundary=False)):
                self._check_hurry()
                self.truth.leave_step()
            case Send(node=node, message=Generation() as message):
                if message.generation > self.truth.generation:
                    self._check_generation(message)
                self.truth.admitted.add(node)
            case Send(message=Save() as message):
                self._check_save(message)
            case Send(node=node, local_rank=local_rank, message=Finish(is_main=is_main)):
                self._check_finish(node, local_rank or 0, is_main=is_main)
            case Tell(node=node, message=Shutdown(reason=reason)):
                self._check_farewell(node, reason)
            case Record(kind="node_lost", fields={"node": node}) if node in self.truth.cut_off - self.truth.gone:
                self._check_given_up(node)
            case WriteManifest(manifest=manifest):
                unsaid = {saved.file for saved in manifest.files} - self.truth.said.get(manifest.step, set())
                if unsaid:
                    raise Violation(
                        f"the manifest of step {manifest.step} has {sorted(unsaid)}, which nobody has saved"
                    )
            case Record(kind="step", fields=fields):
                self._check_step(fields["step"])
            case Stop():
                if self._world.stop is not None:
                    raise Violation("the job is stopped twice")
                self._check_stop(instruction)
            case _:
                pass

    # ------------------------------------------------------------ generations

    def _check_hurry(self) -> None:
        """No step is left without a reason."""
        truth, now = self.truth, self._world.now
        if now - self._announced_at >= _STALL_S:
            truth.disturbed.add("a stall")
        interrupted = truth.interruptions and now - truth.interruptions[0] >= self._job.settings.grace_s / 2
        if not (truth.disturbed or interrupted):
            raise Violation("the step under way is left, and nothing has gone wrong")

    def _check_generation(self, message: Generation) -> None:
        truth, plan = self.truth, message.plan
        if message.generation != truth.generation + 1:
            raise Violation(f"generation {message.generation} follows {truth.generation}")
        if self.truth.is_ending:
            raise Violation("a generation begins after the end")
        if truth.interruptions or truth.must_end:
            raise Violation("a generation begins in a job that is to end")
        self._check_version(message)
        absent = sorted(truth.gone.union(truth.leaving, truth.unfit, truth.erring).intersection(plan.nodes))
        if absent:
            raise Violation(f"nodes {absent} get a place and are gone, or about to go")
        redundancy, max_failures = plan.redundancy(self._job.spec.profile), self._job.shape.max_failures
        if redundancy <= max_failures:
            raise Violation(f"some state lies on {redundancy} nodes, to survive {max_failures} losses")
        if message.store_address != f"host:{plan.slots[0].node}":
            raise Violation(f"the store is at {message.store_address}, and rank 0 on node {plan.slots[0].node}")
        told = self._world.machine.status()
        if told["num_skipped"] != self._job.skipped(told["step"]).total:
            raise Violation(f"{told['num_skipped']} of {told['step']} steps are told to have been skipped")
        self._step_told = min(self._step_told, message.version)
        self._announced_at = self._world.now
        truth.announce(message.generation, message.version)

    def _check_version(self, message: Generation) -> None:
        truth, version = self.truth, message.version
        if version < truth.must_keep:
            if not truth.may_be_lost:
                raise Violation(
                    f"the job goes back from step {truth.must_keep} to {version}, and nothing is lost with nodes "
                    f"{sorted(truth.lost)}"
                )
            if version != truth.saved_step:
                raise Violation(f"the job goes back to {version}, and the newest checkpoint is {truth.saved_step}")
        for worker in self._world.workers:
            is_asked = worker.node.number not in truth.gone and worker.node.is_linked
            if is_asked and not truth.disturbed and worker.begun and worker.version >= version:
                raise Violation(f"{worker.name} has begun step {worker.step} in vain, and nothing has gone wrong")

    # ------------------------------------------------------------ ends

    def _check_save(self, message: Save) -> None:
        truth = self.truth
        if not truth.is_ending:
            truth.end(message.generation)
            is_last = message.version == self._job.spec.num_steps
            if not (is_last or truth.interruptions or truth.failures):
                self._check_too_few()
        if message.version < truth.must_keep and not truth.may_be_lost:
            raise Violation(f"step {message.version} is saved, and step {truth.must_keep} was committed")

    def _check_too_few(self) -> None:
        """A job that is sound ends before its last step for too few nodes, after a while, or for vain suspicions."""
        truth, settings = self.truth, self._job.settings
        if truth.num_suspicions > settings.max_suspicions or truth.troubles or not truth.is_redundant:
            return
        if truth.too_few_since is None:
            if not self._world.plans_wanted:
                raise Violation(f"the job ends, and {truth.num_usable} nodes are enough")
        elif self._world.now - truth.too_few_since < settings.wait_for_nodes_s:
            raise Violation("the job ends for too few nodes before it has waited for others")

    def _check_finish(self, node: int, local_rank: int, *, is_main: bool) -> None:
        self.truth.is_ending = True
        if self._job.spec.num_steps not in {
            manifest.step for path, manifest in self._world.disk.manifests.items() if path == self._world.last_path
        }:
            raise Violation("scripts go on, and the last step is not saved")
        if is_main:
            if self._main is not None:
                raise Violation("two workers speak for the job")
            self._main = self._world.nodes[node].workers[local_rank]

    def _check_given_up(self, node: int) -> None:
        """A node that is cut off is waited for, unless its peers miss it, too."""
        if not (self._suspects or self.truth.is_left):
            raise Violation(f"node {node} is cut off, and not waited for, and its peers do not suspect anything")
        self.truth.gone.add(node)
        self.truth.lose(node, "a node was cut off")

    def _check_farewell(self, number: int, reason: str) -> None:
        node, truth = self._world.nodes[number], self.truth
        is_new = number not in truth.gone
        truth.gone.add(number)
        if self._world.stop is not None or self.truth.is_ending or not is_new:
            return
        needed = [w for w in node.workers if w.at in IN_FABRIC and w.here.number == truth.generation]
        if number in truth.leaving:
            if needed and node.is_healthy and not truth.disturbed:
                raise Violation(f"node {number} is let go before others have what it is to send")
            return
        is_up = len(truth.ready.get(number, ())) == len(node.workers)
        is_to_go = number in truth.unfit | truth.erring or truth.is_suspected(number)
        if node.is_healthy and is_up and not is_to_go and "time" not in truth.troubles:
            raise Violation(f"node {number} is sent away, and nothing is wrong with it: {reason}")
        if is_up:
            truth.lose(number, "a node was evicted")

    def _check_step(self, step: int) -> None:
        if step <= self._step_told or (step > self._step_told + 1 and not self.truth.disturbed):
            raise Violation(f"step {step} is told after step {self._step_told}")
        self._step_told = step

    def check_manifest(self, path: str, manifest: Manifest) -> None:
        """Check that a checkpoint is what it says: all states, each of them at its step, by the same course."""
        lineages = {name: self._world.disk.files[path, saved.file] for name, (saved,) in manifest.states.items()}
        if missing := sorted(set(self._job.states) - lineages.keys()):
            raise Violation(f"the checkpoint of step {manifest.step} lacks {missing}")
        if path != self._world.path(manifest.step) or manifest.skipped != self._job.skipped(manifest.step):
            raise Violation(f"{path} is said to be a checkpoint of {manifest.step}, {manifest.skipped}")
        for name in self._job.states:
            if is_damaged(lineages[name]):
                if len(set(self.truth.copies.get(name, {}).values())) > 1:
                    raise Violation(f"a copy of {name} that is not like the others counts as saved")
                return  # nobody could tell
            self._check_lineage(name, lineages[name], manifest.step)
        if len({lineages[name] for name in self._job.states}) > 1:
            parts = ", ".join(f"{name}: {told(lineage)}" for name, lineage in lineages.items())
            raise Violation(f"the checkpoint of step {manifest.step} is of several courses: {parts}")

    def _check_lineage(self, name: str, lineage: tuple[Applied, ...], step: int) -> None:
        right = [(number, number not in self._job.skipping) for number in range(1, step + 1)]
        if [(applied.step, applied.is_update) for applied in lineage] != right:
            raise Violation(f"the checkpoint of step {step} has {name} = {told(lineage)}")

    def _check_stop(self, stop: Stop) -> None:
        truth = self.truth
        if stop.exit_code == 0:
            if self._world.last_path not in self._world.disk.manifests:
                raise Violation("exit 0, and the last step is not saved")
            if self._main is None or not self._main.has_ended_well:
                raise Violation("exit 0, and the main worker's script has not ended")
            return
        if self._main is not None:
            if not (truth.lost or truth.failures or truth.interruptions):
                raise Violation(f"exit {stop.exit_code} after the last step: {stop.reason}")
            return
        wishes = [at for at in truth.interruptions if at - truth.interruptions[0] >= _ONE_WISH_S]
        is_excused = truth.excuses or truth.is_undecided or truth.may_be_lost
        # nobody is left to be told that the last step is saved
        is_unattended = truth.is_deserted and self._world.last_path in self._world.disk.manifests
        due = {1: truth.failures or is_unattended, 130: truth.interruptions, 3: True, 4: is_excused}
        has_begun = truth.generation or not truth.is_deserted
        if has_begun and not due.get(stop.exit_code):
            raise Violation(f"exit {stop.exit_code} without a reason for it: {stop.reason}")
        if stop.exit_code == 3 and not self.truth.is_ending:
            self._check_too_few()
        if truth.saved_step < truth.must_keep and not (is_excused or wishes):
            raise Violation(
                f"the job ends at step {truth.must_keep}, and step {truth.saved_step} is saved: {stop.reason}"
            )
