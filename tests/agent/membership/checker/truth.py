"""What is true of a job, told by nobody: who is still there, what must not be lost, what has gone wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.membership.parts.events import (
    Interrupted,
    ManifestFailed,
    NodeConnected,
    NodeLeaving,
    NodeLost,
    Stimulus,
    StopWanted,
    WorkerEnded,
    WorkerSaid,
)
from resilient.protocol.messages import Dropped, Failed, NotSaved, Ready, StepDone, Suspect
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.worker import At

if TYPE_CHECKING:
    from tests.agent.membership.checker.world import World


class Truth:
    """What is true of a job.

    Attributes:
        generation: The newest that was announced.
        gone: Nodes that the machine knows to be lost, or has sent away.
        ready: Workers that have said that they are up, by node.
        leaving: Nodes that the machine knows to go away.
        admitted: Nodes that were told of a generation; ``unfit``: that failed before that.
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
        self.gone: set[int] = set()
        self.ready: dict[int, set[int]] = {}
        self.leaving: set[int] = set()
        self.admitted: set[int] = set()
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
        asked = [
            worker.version
            for node in self._world.nodes.values()
            if node.number not in self.gone and node.is_alive and node.is_linked
            for worker in node.workers
            if worker.at is not At.STARTING
        ]
        return max([self._heard, *asked])

    @property
    def is_redundant(self) -> bool:
        """Whether no more nodes were lost than may be."""
        return len(self.lost) <= self._world.job.shape.max_failures

    @property
    def num_usable(self) -> int:
        """Nodes that the machine knows to be ready, and that stay."""
        num_workers = self._world.job.shape.workers_per_node
        return sum(
            len(ready) == num_workers and node not in self.gone and node not in self.leaving
            for node, ready in self.ready.items()
        )

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
        self.generation, self._heard = generation, version
        self.disturbed.clear()

    def hear(self, stimulus: Stimulus) -> None:
        """Take in what the machine is about to be told."""
        match stimulus:
            case NodeConnected(node=node):
                self.ready[node] = set()
            case NodeLost(node=node) if node not in self.gone:
                self.gone.add(node)
                self.lose(node, "a node was lost")
            case NodeLeaving(node=node):
                self.leaving.add(node)
            case WorkerEnded(node=node, exit_code=exit_code) if node not in self.gone and exit_code != 0:
                self.gone.add(node)
                self.lose(node, "a worker ended")
                if exit_code > 0 and self._is_its_own_affair(node):
                    self.unfit.add(node)
                elif exit_code > 0:
                    self.failures.add("a worker ended")  # costs the job only if others end as well
            case ManifestFailed(path=path) if self.is_ending or path == self._world.path(
                self._world.job.spec.num_steps
            ):
                self.troubles.add("the last manifest could not be written")
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

    def _is_its_own_affair(self, node: int) -> bool:
        """Return whether a node that fails is not let in yet."""
        return self.generation > 0 and node not in self.admitted

    def _hear_worker(self, stimulus: WorkerSaid) -> None:
        match stimulus.message:
            case Ready():
                self.ready[stimulus.node].add(stimulus.local_rank)
            case StepDone(generation=generation, outcome=outcome) if generation == self.generation:
                self._heard = max(self._heard, outcome.step)
                self.num_suspicions = 0
            case Suspect(generation=generation) if generation == self.generation:
                self.disturbed.add("communication failed")
                self.num_suspicions += 1
            case Dropped(generation=generation) if generation == self.generation:
                self.lose(stimulus.node, "a copy was dropped")
                self.num_suspicions += 1
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
