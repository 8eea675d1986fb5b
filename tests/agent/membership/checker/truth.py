"""What is true of a job, told by nobody: who is still there, what must not be lost, what has gone wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.membership.parts.events import (
    Interrupted,
    ManifestFailed,
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    Stimulus,
    StopWanted,
    WorkerEnded,
    WorkerSaid,
)
from resilient.protocol.messages import Dropped, Failed, Installed, NotSaved, Ready, Saved, StepDone, Suspect
from resilient.state.witnesses import witness, worker_of
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.lineage import is_damaged
from tests.agent.membership.checker.worker import At, Worker

HANGS = "who was to report or to save hangs"
_MOST_ERRORS = 2  # of as many nodes, without a step between them
_ENOUGH_LINKS = 2  # broken in as many generations

if TYPE_CHECKING:
    from tests.agent.membership.checker.world import World


class Truth:
    """What is true of a job.

    Attributes:
        generation: The newest that was announced, or the last checkpoint that is begun in place of one.
        gone: Nodes that the machine knows to be lost, or has sent away.
        ready: Workers that have said that they are up, by node.
        leaving: Nodes that the machine knows to go away.
        cut_off: Nodes whose connection is broken; ``is_left``: the step under way was left.
        admitted: Nodes that were told of a generation; ``unfit``: that failed before that, or as they stood by.
        erring: Nodes that had an error of their own, and are to be let go.
        installed: Workers heard to have installed the generation.
        said: By step, files that somebody has said to have written; ``copies``: fingerprints told at an early stop.
        lost: Nodes that were lost, or copies of theirs, since all states were last on f + 1 nodes.
        disturbed: What has gone wrong since the last generation was announced: work may be lost.
        troubles: Why progress may not be saved, though it is not lost.
        failures: Why the job may end as failed.
        too_few_since: When there were last enough nodes; None if there are.
        is_ending: The last checkpoint is being written, or scripts go on after the last step.
        must_end: The script has failed: no generation is to follow.
        num_suspicions: Since the last step that was heard of.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.generation = 0
        self._in_force = 0  # the generation, which a last checkpoint does not change
        self.gone: set[int] = set()
        self.ready: dict[int, set[int]] = {}
        self.leaving: set[int] = set()
        self.cut_off: set[int] = set()
        self.is_left = False
        self.admitted: set[int] = set()
        self.erring: set[int] = set()
        self.installed: set[tuple[int, int]] = set()
        self.said: dict[int, set[str]] = {}
        self.copies: dict[str, dict[tuple[int, int], int]] = {}
        self._first_error: dict[str, int] = {}
        self._had_errors: list[int] = []
        self._has_stepped = False
        self._suspected: dict[int, set[int]] = {}
        self.unfit: set[int] = set()
        self.lost: set[int] = set()
        self.disturbed: set[str] = set()
        self.troubles: set[str] = set()
        self.failures: set[str] = set()
        self.interruptions: list[float] = []
        self.too_few_since: float | None = None
        self.num_suspicions = 0
        self.is_ending = self.must_end = False
        self._heard = world.job.settings.resume[1].step if world.job.settings.resume else 0

    # ------------------------------------------------------------ what is so

    @property
    def must_keep(self) -> int:
        """The last step that somebody who can be asked has committed, or that the coordinator has heard of."""
        return max([self._heard, *(worker.version for worker in self._asked)])

    @property
    def _asked(self) -> list[Worker]:
        nodes = [node for node in self._world.nodes.values() if node.number not in self.gone]
        workers = [worker for node in nodes if node.is_alive and node.is_linked for worker in node.workers]
        return [worker for worker in workers if worker.at is not At.STARTING]

    @property
    def may_be_lost(self) -> bool:
        """Whether more nodes were lost than may be, and some state of the last step is held by nobody who answers."""
        step, held = self.must_keep, set[str]()
        for worker in self._asked:
            if worker.is_hung:
                continue  # in whatever time: what it holds goes with its node
            if worker.version == step:
                held.update((worker.states.keys() | worker.retained.keys()) - worker.odd)
            elif worker.version == step - 1 and worker.gradient is not None:
                held.update(worker.states.keys() - worker.odd)
        return not (self.is_redundant or held.issuperset(self._world.job.states))

    @property
    def is_redundant(self) -> bool:
        """Whether no more nodes were lost than may be."""
        return len(self.lost) <= self._world.job.shape.max_failures

    @property
    def num_usable(self) -> int:
        """How many nodes the machine knows to be ready, and stay."""
        return len(self._usable)

    @property
    def _usable(self) -> set[int]:
        num_workers = self._world.job.shape.workers_per_node
        ready = {node for node, ready in self.ready.items() if len(ready) == num_workers}
        return ready - self.gone - self.leaving

    @property
    def cannot_spare(self) -> bool:
        """Whether too few nodes are left without those that had errors, or too few copies."""
        left = self._usable - self.erring
        if self._world.plans_wanted:
            left &= self.admitted
        shape = self._world.job.shape
        return len(left) < shape.needed_nodes or len(self.lost | self.erring) > shape.max_failures

    @property
    def is_undecided(self) -> bool:
        """Whether copies that were told of at an early stop differ, and most of them are not equal."""
        told = [list(copies.values()) for copies in self.copies.values()]
        return any(len(set(each)) > 1 and 2 * max(map(each.count, each)) <= len(each) for each in told)

    @property
    def excuses(self) -> set[str]:
        """Why a job may end without what was held last: for one that hangs there is time, but not at the end."""
        is_short = self.is_ending or self.interruptions
        return self.troubles if is_short else self.troubles - {HANGS}

    def is_suspected(self, node: int) -> bool:
        """Return whether connections to a node broke often enough to let it go."""
        return len(self._suspected.get(node, ())) >= _ENOUGH_LINKS

    @property
    def is_deserted(self) -> bool:
        """Whether no node is left."""
        return all(node in self.gone for node in self.ready)

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint."""
        return max((manifest.step for manifest in self._world.disk.manifests.values()), default=0)

    # ------------------------------------------------------------ what happens

    def lose(self, node: int, why: str) -> None:
        """Take in that a node's copies are gone, or that it will not give them."""
        self.lost.add(node)
        self.disturbed.add(why)

    def note_installed(self, fabric: Fabric) -> None:
        """Take in that workers have what a generation places on them; all states are redundant when all have."""
        if fabric.number != self.generation or not fabric.is_installed:
            return
        nodes = {slot.node for slot in fabric.slots}
        self.lost = {node for node in nodes if node in self.gone or not self._world.nodes[node].is_healthy}

    def announce(self, generation: int, version: int) -> None:
        """Take in that a generation is announced."""
        self.generation = self._in_force = generation
        self._heard, self.is_left = version, False
        self.disturbed.clear()
        self.erring.clear()
        self.installed.clear()

    def end(self, generation: int) -> None:
        """Take in that the last checkpoint is begun, in place of a generation."""
        self.generation, self.is_ending = generation, True
        self.copies.clear()

    def leave_step(self) -> None:
        """Take in that the step under way is left, or the last checkpoint: after a loss, others may have come."""
        self.is_left, self.is_ending = True, False

    def hear(self, stimulus: Stimulus) -> None:
        """Take in what the machine is about to be told."""
        match stimulus:
            case NodeConnected(node=node):
                self.ready[node] = set()
            case NodeLost(node=node) if node not in self.gone:
                self.gone.add(node)
                self.lose(node, "a node was lost")
            case NodeCutOff(node=node):
                self.cut_off.add(node)
            case NodeBack(node=node):
                self.cut_off.discard(node)
            case NodeLeaving(node=node):
                self.leaving.add(node)
            case WorkerEnded(node=node, exit_code=exit_code) if node not in self.gone and exit_code != 0:
                if exit_code > 0:
                    self._err(node, f"exit code {exit_code}")
                self.gone.add(node)
                self.lose(node, "a worker ended")
            case ManifestFailed(path=path, node=lacking) if self.is_ending or path == self._world.last_path:
                self.troubles.add("the last manifest could not be written")
                if lacking is not None or "time" in self.troubles:  # otherwise it is tried again
                    self.failures.add("the last manifest could not be written")
            case Interrupted():
                self.interruptions.append(self._world.now)
            case StopWanted():
                self.troubles.add("the job was stopped")
                self.failures.add("the job was stopped")
            case WorkerSaid(node=node) if node not in self.gone:
                self._hear_worker(stimulus)
            case _:
                pass
        self.count_nodes()

    def count_nodes(self) -> None:
        """Remember since when there are too few nodes."""
        if self.num_usable >= self._world.job.shape.needed_nodes:
            self.too_few_since = None
        elif self.too_few_since is None:
            self.too_few_since = self._world.now
        if self.erring and self.cannot_spare:
            self.failures.add("nodes with errors cannot be spared")

    def _is_its_own_affair(self, node: int) -> bool:
        """Return whether a node that fails is not let in yet, or stands by: the last checkpoint may be its to write."""
        if not self.generation or (node in self.admitted and self.is_ending):
            return False
        return node not in self.admitted or not self._takes_part(node)

    def _takes_part(self, node: int) -> bool:
        """Return whether a node has a place in the generation in force, or still has states to send in it."""
        fabric = self._world.fabrics[self._in_force]
        has_all = self.installed.issuperset(worker.id for worker in fabric.members.values())
        is_copying = not (self.is_left or has_all)
        ranks = [rank for rank, worker in fabric.members.items() if worker.id[0] == node]
        return any(rank < len(fabric.slots) or is_copying for rank in ranks)

    def _err(self, node: int, kind: str) -> None:
        """Take in an error that may be a node's own: the job's, if it is another node's as well, or one of too many."""
        if node in self.erring:
            return
        if self._is_its_own_affair(node):
            self.unfit.add(node)
            return
        self.disturbed.add("an error")
        is_too_many = len(self._had_errors) >= _MOST_ERRORS
        if self.is_ending or not self._has_stepped or self._first_error.get(kind, node) != node or is_too_many:
            self.failures.add("an error of the job")
            self.must_end = True
            return
        self._first_error[kind] = node
        self._had_errors.append(node)
        self.erring.add(node)

    def _hear_worker(self, stimulus: WorkerSaid) -> None:
        match stimulus.message:
            case Ready(job=job) if job.alike != self._world.job.spec.alike:
                self.unfit.add(stimulus.node)
                if not self.generation:
                    self.failures.add("a node is unlike the others")
            case Ready():
                self.ready[stimulus.node].add(stimulus.local_rank)
            case StepDone(generation=generation, outcome=outcome) if generation == self.generation:
                self._heard = max(self._heard, outcome.step)
                self.num_suspicions, self._has_stepped = 0, True
                self._had_errors.clear()
                for of in self._suspected.values():
                    of &= {generation}  # heard of while it is left: why it is left counts all the same
            case Installed(generation=generation) if generation == self.generation:
                self.installed.add((stimulus.node, stimulus.local_rank))
            case Saved(step=step, states=states, held=held):
                self.said.setdefault(step, set()).update(saved.file for files in states.values() for saved in files)
                for name, copy in held.items():
                    self.copies.setdefault(name, {})[stimulus.node, stimulus.local_rank] = copy.fingerprint
                worker = self._world.nodes[stimulus.node].workers[stimulus.local_rank]
                if held and any(map(is_damaged, worker.states.values())):
                    self.lose(stimulus.node, "a copy is damaged")
            case Suspect(generation=generation, peer=peer) if generation == self.generation:
                self.disturbed.add("communication failed")
                self.num_suspicions += 1
                ends = [stimulus.node]
                if peer is not None:
                    ends.append(self._world.fabrics[generation].members[peer].id[0])
                for node in ends:
                    self._suspected.setdefault(node, set()).add(generation)
            case Dropped(generation=generation, odd=odd) if generation == self.generation:
                for node, local_rank in map(worker_of, odd):
                    self.lose(node, "a copy was dropped")
                    worker = self._world.nodes[node].workers[local_rank]
                    worker.odd.update(set(odd[witness(node, local_rank)]) & {*worker.states, *worker.retained})
                self.num_suspicions += 1
            case Failed(kind=kind) if kind:
                self._err(stimulus.node, kind)
            case Failed(is_sound=is_sound):
                if self._is_its_own_affair(stimulus.node):
                    self.unfit.add(stimulus.node)
                else:
                    self.disturbed.add("the script failed")
                    self.failures.add("the script failed")
                    self.must_end = True
                if not is_sound:
                    self.troubles.add("copies differ")
            case NotSaved(step=step) if self.is_ending or step == self._world.job.spec.num_steps:
                self.troubles.add("a disk is full")
            case _:
                pass
