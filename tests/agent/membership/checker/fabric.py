"""What the workers of one generation exchange: copies of states, sums of gradients, the prepare barrier.

Whoever of them stops taking part breaks the fabric: those that wait for it fail, sooner or later, but what has arrived
before counts. Nobody else can come in.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from resilient.protocol.messages import Generation
from tests.agent.membership.checker.jobs import SmallJob
from tests.agent.membership.checker.lineage import Applied, Lineage, Violation, told

if TYPE_CHECKING:
    from tests.agent.membership.checker.worker import Worker


class Fabric:
    """What the members of one generation share.

    Attributes:
        members: All who were told to take part, by rank.
        joined: Those who have heard of it.
        left: Those who take part no longer, before everybody was done.
        sent: Copies that are on their way, by their place among the transfers.
        begun, contributed: By step, who has begun it, and who has computed its gradients.
        entered: By step, who has come to the barrier, and whether it wants a pause.
        installed: Ranks that have said so.
    """

    def __init__(self, job: SmallJob, message: Generation) -> None:
        self.job = job
        self.number, self.plan, self.version = message.generation, message.plan, message.version
        self.content = _content(message)
        self.transfers, self.source = message.transfers, message.source
        self.slots = message.plan.slots
        self.num_ranks = len(self.slots) + message.num_sources
        self.members: dict[int, Worker] = {}
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.sent: dict[int, Lineage] = {}
        self.begun: dict[int, set[int]] = defaultdict(set)
        self.contributed: dict[int, set[int]] = defaultdict(set)
        self.entered: dict[int, dict[int, bool]] = defaultdict(dict)
        self.basis: dict[int, Lineage] = {}
        self.installed: set[int] = set()
        profile = job.spec.profile
        self.needed = [tuple(name for name in slot.intervals(profile) if name in job.states) for slot in self.slots]
        self.holders = {
            name: [rank for rank, needed in enumerate(self.needed) if name in needed] for name in job.states
        }

    def expect(self, worker: Worker, message: Generation) -> None:
        """Take in that the coordinator tells a worker of it."""
        if _content(message) != self.content:
            raise Violation(f"generation {self.number} is another for {worker.name} than for the first")
        if message.rank is None:
            return
        if message.rank in self.members:
            raise Violation(f"rank {message.rank} of generation {self.number} is given twice")
        if message.rank < len(self.slots):
            slot = self.slots[message.rank]
            if (slot.node, slot.local_rank) != worker.id:
                raise Violation(f"{worker.name} gets the place of {(slot.node, slot.local_rank)}")
        self.members[message.rank] = worker

    def leave(self, worker: Worker) -> None:
        """Take in that a worker, dead or alive, takes no part any more."""
        self.left.update(rank for rank, member in self.members.items() if member is worker)

    @property
    def is_broken(self) -> bool:
        """Whether some operation will never be done; who only sends may go when it has."""
        return any(rank < len(self.slots) or rank not in self.installed for rank in self.left)

    @property
    def is_stuck(self) -> bool:
        """Whether somebody does not get on: the others lose patience with it."""
        return any(
            worker.is_hung or (rank not in self.joined and not worker.node.is_linked)
            for rank, worker in self.members.items()
        )

    def unreachable(self, worker: Worker) -> list[int]:
        """Return the ranks that a worker has no connection to."""
        links = worker.world.broken_links
        ends = {other for link in links if worker.id[0] in link for other in link if other != worker.id[0]}
        return [rank for rank, member in self.members.items() if member.id[0] in ends]

    @property
    def has_met(self) -> bool:
        """Whether all have come, at some time."""
        return len(self.joined) == self.num_ranks

    @property
    def is_installed(self) -> bool:
        """Whether all have said that they have what they need, and all are there."""
        return len(self.installed) == self.num_ranks and not self.is_broken

    # ------------------------------------------------------------ a step

    def begin(self, rank: int, step: int, states: dict[str, Lineage]) -> None:
        """Begin a step on a rank: what it computes is wrong unless all copies have gone through the same."""
        if sorted(states) != sorted(self.needed[rank]):
            raise Violation(f"rank {rank} of generation {self.number} trains {sorted(states)}: not what it is to train")
        for name, lineage in states.items():
            basis = self.basis.setdefault(step, lineage)
            if lineage != basis or [applied.step for applied in lineage] != list(range(1, step)):
                raise Violation(
                    f"step {step} is trained on {name} = {told(lineage)}, others have {told(basis)}, "
                    f"in generation {self.number}"
                )
        self.begun[step].add(rank)

    def can_contribute(self, rank: int, step: int) -> bool:
        """Return whether the rank's pipeline is there: gradients come through all of its stages."""
        own = self.slots[rank].pipeline_index
        return all(slot.rank in self.begun[step] for slot in self.slots if slot.pipeline_index == own)

    def can_sum(self, rank: int, step: int) -> bool:
        """Return whether all holders of the rank's states have contributed their gradients of a step."""
        return all(self.contributed[step].issuperset(self.holders[name]) for name in self.needed[rank])

    def can_pass(self, step: int) -> bool:
        """Return whether all have entered the barrier of a step."""
        return len(self.entered[step]) == len(self.slots)

    def pauses_after(self, step: int) -> bool:
        """Return whether somebody has asked for a pause in the barrier of a step."""
        return any(self.entered[step].values())

    def gradient(self, step: int) -> Applied:
        """Return what applying the step does to a state."""
        return Applied(step, self.number, step not in self.job.skipping)

    def writers(self) -> dict[str, int]:
        """Return which rank writes which state to a checkpoint."""
        return {name: ranks[index % len(ranks)] for index, (name, ranks) in enumerate(self.holders.items())}


def _content(message: Generation) -> tuple[object, ...]:
    return (
        message.plan,
        message.version,
        message.roll_forward,
        message.transfers,
        message.source,
        message.store_address,
        message.num_sources,
        message.skipped,
        message.checkpoint_due,
    )
