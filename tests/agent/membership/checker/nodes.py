"""Nodes with their agents, and the links between them and the coordinator.

What goes over a link keeps its order and takes any time. When a node dies, or is cut off, a part of what was on its way
still arrives. A node that is cut off goes on: what it then says reaches the machine as well, which must not listen.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from resilient.agent.membership.parts.events import (
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    Stimulus,
    WorkerEnded,
    WorkerSaid,
)
from resilient.protocol.messages import (
    Dropped,
    Finished,
    FromWorkerMessage,
    Installed,
    Report,
    Saved,
    Shutdown,
    StepDone,
    Suspect,
    ToWorkerMessage,
)
from tests.agent.membership.checker.worker import At, Worker

if TYPE_CHECKING:
    from tests.agent.membership.checker.world import World

Downward = tuple[int | None, ToWorkerMessage] | Shutdown


def is_of_the_past(message: FromWorkerMessage, generation: int) -> bool:
    """Return whether a message is of a generation before this one, or answers the wish for it."""
    if isinstance(message, Report):
        return message.generation <= generation
    return isinstance(message, Suspect | Dropped | Installed | StepDone | Saved | Finished) and (
        message.generation < generation
    )


class Node:
    """A node.

    Attributes:
        is_alive: Its processes run.
        is_linked: What is sent to it arrives. ``is_cut_off``: not now; it may be back.
        is_unlike: Its script is started with other arguments than that of the others.
        repeats: It says now and then what it has said in a generation that was left.
        num_refused: So many files cannot be written.
        is_leaving: Its agent has announced that it goes.
        up: What is on its way to the coordinator; ``down``: to the node.
        speed: How readily something of it happens: slow ones are far behind the others.
    """

    def __init__(self, world: World, number: int, random: Random) -> None:
        self.world, self.number = world, number
        self.is_alive = self.is_linked = True
        self.is_leaving = self.is_cut_off = self.is_unlike = self.writes_elsewhere = self.repeats = False
        self.num_refused = 0
        self.speed = random.choice(world.job.leaning.speeds)
        self.up: deque[Stimulus] = deque()
        self.down: deque[Downward] = deque()
        self._said: list[tuple[int, FromWorkerMessage]] = []
        num_workers = world.job.shape.workers_per_node
        self.workers = [Worker(world, self, local_rank) for local_rank in range(num_workers)]
        connected = NodeConnected(node=number, host="host", pid=number, num_workers=num_workers, num_behind=number % 3)
        self.up.append(connected)

    @property
    def is_hung(self) -> bool:
        """Whether one of its workers makes no progress."""
        return self.is_alive and any(worker.is_hung for worker in self.workers)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened to it."""
        return self.is_alive and self.is_linked and not self.is_hung

    def pass_on(self, local_rank: int, message: FromWorkerMessage) -> None:
        """Send what a worker says."""
        self._said.append((local_rank, message))
        self.up.append(WorkerSaid(node=self.number, local_rank=local_rank, message=message))
        if self.repeats and self.world.random.random() < 0.2:
            self._repeat(self.world.random)

    def _repeat(self, random: Random) -> None:
        """Say something of a generation that was left once more: by a thread that was left behind, or by a link."""
        now = max((worker.fabric.number for worker in self.workers if worker.fabric is not None), default=0)
        old = [said for said in self._said if is_of_the_past(said[1], now)]
        if old:
            kind = random.choice(sorted({type(message).__name__ for _, message in old}))  # of some there are many more
            local_rank, message = random.choice([said for said in old if type(said[1]).__name__ == kind])
            self.up.append(WorkerSaid(node=self.number, local_rank=local_rank, message=message))

    def take(self) -> str:
        """Have the agent take in the next message; return what it was."""
        message = self.down.popleft()
        if isinstance(message, Shutdown):
            self.stop()
            self._disconnect("node lost")
            return "is shut down"
        local_rank, inner = message
        for worker in self.workers:
            if local_rank in (None, worker.id[1]) and worker.at is not At.ENDED:
                worker.inbox.append(inner)
        return f"gets {type(inner).__name__}"

    def stop(self) -> None:
        """End all its processes."""
        self.is_alive = False
        for worker in self.workers:
            if worker.at is not At.ENDED:
                self.world.forget(worker)
                worker.at = At.ENDED

    # ------------------------------------------------------------ what can happen to it

    def die(self, random: Random) -> None:
        """Lose power: a part of what it has sent arrives, and then it is lost."""
        self.stop()
        self.is_linked = False
        self._lose_some(self.up, random)
        self.down.clear()
        if random.random() < 0.5:
            self.up.append(NodeCutOff(node=self.number))
        self._disconnect("node lost")

    def cut_off(self, random: Random) -> None:
        """Lose the link to the coordinator; its workers and their peers notice nothing."""
        self.is_linked = False
        self._lose_some(self.up, random)
        self._lose_some(self.down, random)
        self._disconnect("heartbeat missed")

    def disconnect(self, random: Random) -> None:
        """Break the connection: the agent is back with all that was on its way, or given up after a while."""
        if not self.is_linked or any(isinstance(said, NodeCutOff | NodeBack) for said in self.up):
            return
        place = random.randint(1, len(self.up)) if self.up else 0  # it has introduced itself
        self.up.insert(place, NodeCutOff(node=self.number))
        if random.random() < 0.7:
            self.up.insert(place + 1, NodeBack(node=self.number))
            return
        while len(self.up) > place + 1:
            self.up.pop()
        self._disconnect("node lost")

    @property
    def readiness(self) -> float:
        """How readily the coordinator hears the next of it."""
        return self.speed * (0.1 if isinstance(self.up[0], NodeBack) or self.is_cut_off else 1.0)

    def end_worker(self, worker: Worker, exit_code: int) -> None:
        """Have a worker's process end before its script does; the agent ends the others and starts anew."""
        self.stop()
        self.up.append(WorkerEnded(node=self.number, local_rank=worker.id[1], exit_code=exit_code))
        self._disconnect("node lost")

    def worker_ended(self, worker: Worker, exit_code: int) -> None:
        """Say that a worker's script has come to its end."""
        self.up.append(WorkerEnded(node=self.number, local_rank=worker.id[1], exit_code=exit_code))

    def announce_leave(self, random: Random) -> None:
        """Say that the node goes away soon; until then it may have other things to do."""
        self.is_leaving = True
        self.speed *= random.choice((1.0, 0.1))
        self.up.append(NodeLeaving(node=self.number, reason="spot notice"))

    def _disconnect(self, cause: str) -> None:
        self.is_linked = False
        self.up.append(NodeLost(node=self.number, cause=cause))

    @staticmethod
    def _lose_some(queue: deque[object] | deque[Stimulus] | deque[Downward], random: Random) -> None:
        for _ in range(random.randint(0, len(queue))):
            queue.pop()
