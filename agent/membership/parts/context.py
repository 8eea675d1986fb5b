"""What all parts of the membership machine share: the settings, the time, the live nodes, what is to be done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from resilient.agent.membership.next_generation.members import Member, WorkerId, available
from resilient.agent.membership.parts.events import Instruction, NodeConnected, Record, Send, Tell
from resilient.protocol.messages import Injection, Kill, ShowStacks, Shutdown, ToWorkerMessage, Welcome
from resilient.state.manifest import Manifest
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Sharding

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_RESUMABLE = 3
EXIT_LOST = 4
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job was started with.

    Args:
        num_nodes: Nodes to wait for before the first generation.
        most_nodes: Nodes that train at once; others stand by. None for all.
        has_own_nodes: The launcher starts these nodes, and they say what the job is; else whoever comes first does.
        options: Of `resilient run`, besides the nodes and the checkpoint, to start the job again as it was started.
        resume: Checkpoint to begin from, and its manifest.
        network: Between two nodes.
        failure_interval_s: Expected time between two failures.
        sharding: Whether workers of a node divide the states of their stage.
        tp_degree: How many of them share each microbatch; None for what makes steps shortest.
        injections: Failures to arm as soon as their node is up.
        heartbeat_s: Silence after which a connection to a node counts as broken.
        orphan_s: How long nodes and coordinator that lost each other wait, as far as nobody is kept waiting by it.
        grace_s: From an interruption to the end; half of it for the running step, the rest for the checkpoint.
        start_timeout_s: How long nodes may take to get ready before the job begins, or goes on, without them.
        wait_for_nodes_s: How long a job of which too few nodes are left waits for others to connect; 0 for not at all.
        report_timeout_s: How long a worker may take to get out of its generation before its node is evicted.
        save_timeout_s: How long writing the last checkpoint may take.
        trace: Steps of which workers write down when they did what; "" for none.
        planner: What workers use instead of the planner that the script asks for; "" for that.
        schedule: What they use instead of its schedule; "" for that.
        tp_chunks: In how many chunks tensor-parallel ones exchange tokens, instead of what it asks for; 0 for that.
        allow_different: What may differ between nodes: of :data:`resilient.protocol.alike.ALLOWABLE`.
        max_suspicions: Regroups of the same members without a step between them before the job is stopped.
        store: Where the job's coordinators are elected, as ``--store`` names it; "" where the first is followed only by
            those that somebody starts.
        port_range: Ports that the job's sockets listen at, ``FIRST:LAST``; "" for any.
        validate: Check the machine's invariants after every stimulus.
    """

    script: str
    arguments: tuple[str, ...] = ()
    directory: str
    run_directory: str
    num_nodes: int
    most_nodes: int | None = None
    has_own_nodes: bool = True
    options: tuple[str, ...] = ()
    workers_per_node: int = 1
    resume: tuple[str, Manifest] | None = None
    network: Link = field(default_factory=Link)
    failure_interval_s: float = 3600.0
    sharding: Sharding = Sharding.OFF
    tp_degree: int | None = 1
    injections: tuple[Injection, ...] = ()
    heartbeat_s: float = 5.0
    orphan_s: float = 600.0
    grace_s: float = 120.0
    start_timeout_s: float = 1800.0
    wait_for_nodes_s: float = 10.0
    report_timeout_s: float = 60.0
    save_timeout_s: float = 600.0
    trace: str = ""
    planner: str = ""
    schedule: str = ""
    tp_chunks: int = 0
    allow_different: tuple[str, ...] = ()
    max_suspicions: int = 3
    store: str = ""
    port_range: str = ""
    validate: bool = False


class Phase(Enum):
    """Where the job is."""

    STARTING = "starting"
    INSTALLING = "installing"
    RUNNING = "running"
    AGREEING = "agreeing"
    SAVING = "saving"
    FINISHED = "finished"
    STOPPED = "stopped"


TRAINING = (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING)
"""Phases in which a generation is in force and the job is to go on."""


class Context:
    """The settings, the clock, the live nodes by number, and the instructions that come of the current stimulus."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.members: dict[int, Member] = {}
        self._unsettled: set[int] = set()
        self._generation = 0
        self._now = 0.0
        self._out: list[Instruction] = []

    @property
    def now(self) -> float:
        """When the current stimulus came."""
        return self._now

    @property
    def generation(self) -> int:
        """The one in force; 0 before the first."""
        return self._generation

    def begin(self, now: float) -> list[Instruction]:
        """Begin with a stimulus; return the list that its instructions will be put into."""
        self._now, self._out = now, []
        return self._out

    def next_generation(self) -> int:
        """Enter the next generation; return its number."""
        self._generation += 1
        return self._generation

    def do(self, instruction: Instruction) -> None:
        """Have something done, after all that was wanted before."""
        self._out.append(instruction)

    def record(self, kind: str, *, generation: int | None = None, **fields: Any) -> None:
        """Write a line to the event log; of the current generation if none is named."""
        self.do(Record(kind=kind, generation=self.generation if generation is None else generation, fields=fields))

    def tell(self, node: int, message: Welcome | Kill | ShowStacks | Shutdown) -> None:
        """Send to a node's agent."""
        self.do(Tell(node=node, message=message))

    def send(self, worker: WorkerId, message: ToWorkerMessage) -> None:
        """Send to one worker."""
        self.do(Send(node=worker[0], local_rank=worker[1], message=message))

    def send_node(self, node: int, message: ToWorkerMessage) -> None:
        """Send to all workers of a node."""
        self.do(Send(node=node, local_rank=None, message=message))

    def dismiss(self, member: Member, reason: str, exit_code: int = EXIT_DONE) -> None:
        """Let a node go; it is no loss."""
        del self.members[member.node]
        self.tell(member.node, Shutdown(exit_code=exit_code, reason=reason))

    def available(self) -> list[int]:
        """Return the nodes that the next plan may use."""
        return available(self.members.values(), self.settings.most_nodes)

    def add(self, came: NodeConnected) -> Member:
        """Take in a node that has come."""
        self._unsettled.add(came.node)
        member = self.members[came.node] = Member(
            node=came.node,
            host=came.host,
            pid=came.pid,
            num_workers=came.num_workers,
            domain=came.domain,
            is_guest=came.is_guest,
            unchecked=came.alike,
            connected_at=self.now,
            num_behind=came.num_behind,
        )
        return member

    def note_leaving(self, member: Member) -> None:
        """Take in that a node wants to leave."""
        member.leaving = True
        self._unsettled.add(member.node)

    def unsettled(self) -> list[Member]:
        """Return the nodes that came or want to leave since the generation in force began.

        Asked with every node that gets ready, it looks at these alone, and not at all there are.
        """
        known = [self.members[node] for node in sorted(self._unsettled) if node in self.members]
        found = [member for member in known if member.leaving or not member.admitted]
        self._unsettled = {member.node for member in found}
        return found

    def joining(self, concerned: Iterable[Member]) -> list[int]:
        """Return those of the nodes that the next plan may use that the generation in force does not know.

        Args:
            concerned: Them, and others perhaps.
        """
        if self.settings.most_nodes is None:
            return available([member for member in concerned if not member.admitted], None)
        return [node for node in self.available() if not self.members[node].admitted]

    def ready_workers(self) -> list[WorkerId]:
        """Return the workers of all nodes that can be given a place, in order."""
        return [worker for _, member in sorted(self.members.items()) if member.is_ready for worker in member.workers]
