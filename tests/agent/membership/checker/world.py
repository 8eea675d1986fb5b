"""Everything around the machine: nodes, links, files, the clock, and what the coordinator does with instructions."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts.events import (
    Instruction,
    ManifestFailed,
    ManifestWritten,
    NodeBack,
    NodeCutOff,
    NodeLost,
    PlansPrepared,
    PreparePlans,
    Record,
    Send,
    Stimulus,
    Stop,
    Tell,
    WorkerSaid,
    WriteManifest,
)
from resilient.protocol.messages import Generation, Ready, Shutdown, Welcome
from resilient.state.manifest import folder
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.jobs import RUN, SmallJob
from tests.agent.membership.checker.lineage import Disk
from tests.agent.membership.checker.nodes import Node
from tests.agent.membership.checker.promises import Promises
from tests.agent.membership.checker.recovery import Recovery
from tests.agent.membership.checker.worker import Worker

Weighted = tuple[float, str, Callable[[], object]]

_BETWEEN_EVENTS_S = 0.01


class World:
    """One job, from before its start to after its end.

    Args:
        random: Decides everything.
        tell: Takes a line of the history.

    Attributes:
        fabrics: Of all generations, by number.
        manifests_to_fail: So many manifests cannot be written.
        broken_links: Nodes whose workers cannot talk to each other.
        stimuli: All that the machine was told, when, and what it wanted then.
        stop: How the job ended.
    """

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self.random, self.tell = random, tell
        self.now = 0.0
        self.disk = Disk()
        self.job = SmallJob(random, self.disk)
        self.fabrics: dict[int, Fabric] = {}
        self.recovery = Recovery(self.job, self.disk, self.fabrics)
        self.machine = Membership(self.job.settings)
        self.nodes: dict[int, Node] = {}
        self.promises = Promises(self)
        self.manifests_to_fail = 0
        self.broken_links: set[frozenset[int]] = set()
        self.plans_wanted: list[int] = []
        self.stimuli: list[tuple[Stimulus, float, list[Instruction]]] = []
        self.stop: Stop | None = None
        for _ in range(self.job.settings.num_nodes):
            self.connect()

    def path(self, step: int) -> str:
        """Return the folder of a step's checkpoint."""
        return str(folder(RUN, step))

    @property
    def last_path(self) -> str:
        """The folder of the last step's checkpoint."""
        return self.path(self.job.spec.num_steps)

    @property
    def workers(self) -> list[Worker]:
        """All worker processes that run."""
        return [worker for node in self.nodes.values() if node.is_alive for worker in node.workers]

    def connect(self) -> Node:
        """Start a node, which connects."""
        number = len(self.nodes)
        node = self.nodes[number] = Node(self, number, self.random)
        return node

    def forget(self, worker: Worker) -> None:
        """Take in that a worker has died: whoever waits for it will notice."""
        for fabric in self.fabrics.values():
            fabric.leave(worker)

    # ------------------------------------------------------------ what can happen next

    def actions(self) -> list[Weighted]:
        """Return everything that happens by itself, sooner or later, and how readily."""
        found: list[Weighted] = []
        for node in self.nodes.values():
            if node.up:
                found.append((node.readiness, "", lambda node=node: self.feed(node.up.popleft())))
            if node.down and node.is_alive and not node.is_cut_off:
                found.append((node.speed, f"node {node.number}", lambda node=node: self._take(node)))
            if node.is_alive:
                for worker in node.workers:
                    found += [(node.speed, f"{worker.name} {label}", act) for label, act in worker.actions()]
        for place in range(len(self.plans_wanted)):
            found.append((0.3, "", lambda place=place: self._prepare(place)))
        return found

    def happen(self, action: Weighted) -> None:
        """Have something happen."""
        self.now += _BETWEEN_EVENTS_S
        if action[1] and not action[1].startswith("node"):
            self.tell(action[1])
        action[2]()

    def _take(self, node: Node) -> None:
        self.tell(f"node {node.number} {node.take()}")

    def _prepare(self, place: int) -> None:
        self.feed(PlansPrepared(num_nodes=self.plans_wanted.pop(place)))

    # ------------------------------------------------------------ the coordinator

    def feed(self, stimulus: Stimulus) -> None:
        """Give the machine a stimulus, and do what it says."""
        if isinstance(stimulus, NodeLost):
            self.nodes[stimulus.node].is_linked = False
        if isinstance(stimulus, NodeCutOff | NodeBack):
            self.nodes[stimulus.node].is_cut_off = isinstance(stimulus, NodeCutOff)
        self.tell(f"  {_told(stimulus)}")
        self.promises.before(stimulus)
        instructions = self.machine.handle(stimulus, self.now)
        self.stimuli.append((stimulus, self.now, instructions))
        self.machine.validate()
        for instruction in instructions:
            self.tell(f"    -> {_told(instruction)}")
            self.promises.check(instruction)
            self._obey(instruction)
        self.promises.after(stimulus, instructions)
        for instruction in instructions:
            if isinstance(instruction, WriteManifest):
                self.feed(self.write(instruction))

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Send(node=number, local_rank=local_rank, message=message):
                node = self.nodes[number]
                if isinstance(message, Generation):
                    self._expect(node, local_rank or 0, message)
                if node.is_linked:
                    node.down.append((local_rank, message))
            case Tell(node=number, message=Shutdown() as message):
                if self.nodes[number].is_linked:
                    self.nodes[number].down.append(message)
            case PreparePlans(num_nodes=num_nodes):
                self.plans_wanted.append(num_nodes)
            case Stop():
                self.stop = instruction
            case Record(kind="node_lost", fields={"node": number}) if self.nodes[number].is_cut_off:
                self.nodes[number].is_linked = False  # it comes back to nobody who counts on it
            case _:
                pass

    def _expect(self, node: Node, local_rank: int, message: Generation) -> None:
        fabric = self.fabrics.setdefault(message.generation, Fabric(self.job, message))
        worker = node.workers[local_rank]
        fabric.expect(worker, message)
        if not node.is_alive:
            fabric.leave(worker)

    def write(self, wanted: WriteManifest) -> ManifestWritten | ManifestFailed:
        """Write a manifest, if that can be done; return what came of it."""
        lacking = self.disk.lacking(wanted.path, wanted.manifest)
        if lacking is not None:
            return ManifestFailed(path=wanted.path, error=f"{lacking} is not there", node=wanted.nodes[lacking])
        if self.manifests_to_fail:
            self.manifests_to_fail -= 1
            return ManifestFailed(path=wanted.path, error="no space left on device")
        self.promises.check_manifest(wanted.path, wanted.manifest)
        self.disk.seal(wanted.path, wanted.manifest)
        return ManifestWritten(path=wanted.path)


def _told(happened: Stimulus | Instruction) -> str:
    """Return a line of the history, without what is long and the same everywhere."""
    match happened:
        case Send(node=node, local_rank=local_rank, message=Generation() as message):
            pipelines = " + ".join(str(pipeline.nodes) for pipeline in message.plan.pipelines)
            copies = ", ".join(f"{each.state} from {each.source} to {each.target}" for each in message.transfers)
            return (
                f"Generation({message.generation}) to {node}/{local_rank}: rank {message.rank} of {pipelines}, "
                f"version {message.version}, roll_forward={message.roll_forward is not None}, "
                f"copies: {copies or 'none'}, source={message.source!r}"
            )
        case WorkerSaid(node=node, local_rank=local_rank, message=Ready()):
            return f"WorkerSaid(node={node}, local_rank={local_rank}, message=Ready())"
        case WriteManifest(path=path, manifest=manifest):
            return f"WriteManifest({path}: {', '.join(saved.file for saved in manifest.files)})"
        case Tell(node=node, message=Welcome()):
            return f"Welcome to node {node}"
        case PreparePlans(num_nodes=num_nodes):
            return f"PreparePlans({num_nodes})"
        case Record(kind=kind) if kind in ("job", "generation", "node_connected"):
            return f"Record({kind})"
        case _:
            return str(happened)
