"""What can go wrong, and what people do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from resilient.agent.membership.parts.events import Interrupted, StopWanted, Tick
from resilient.protocol.messages import Failed
from tests.agent.membership.checker.jobs import MOST_NODES
from tests.agent.membership.checker.moments import Moment, targets
from tests.agent.membership.checker.nodes import Node
from tests.agent.membership.checker.worker import IN_FABRIC, STEPPING, At
from tests.agent.membership.checker.world import World

_IN_A_ROW = 0.6
"""How often the next fault comes while the one before is being dealt with."""

_LOSSES = ("dies", "dies with others", "is cut off", "loses a worker", "loses a connection", "hangs")
_MOMENTS = (*[Moment.ANY] * len(Moment), *Moment)
_PATIENCE = 150  # events


class Faults:
    """Decides when something goes wrong, and what.

    Args:
        world: Where.
        random: Decides.
        tell: Takes a line of the history.
    """

    def __init__(self, world: World, random: Random, tell: Callable[[str], None]) -> None:
        self._world, self._random, self._tell = world, random, tell
        self.is_hurried = random.random() < 0.1
        self._kinds: dict[str, tuple[float, Callable[[Node], None]]] = {
            "dies": (8, lambda node: node.die(random)),
            "dies with others": (2, self._die_together),
            "is cut off": (4, lambda node: node.cut_off(random)),
            "loses a worker": (3, lambda node: node.end_worker(random.choice(node.workers), -9)),
            "leaves": (8, Node.announce_leave),
            "has a script that fails": (1, self._fail_script),
            "hangs": (2, self._hang),
            "loses a connection": (3, self._break_connection),
            "repeats itself": (3, lambda node: node.repeat(random)),
            "has a full disk": (1, lambda node: setattr(node, "is_disk_full", True)),
            "writes elsewhere": (1, lambda node: setattr(node, "writes_elsewhere", True)),
            "has damaged memory": (1, lambda node: setattr(random.choice(node.workers), "is_damaged", True)),
            "is joined by another": (14, self._join),
            "sees a manifest fail": (1, lambda node: setattr(world, "manifests_to_fail", 1)),
            "hangs with all others": (1, self._hang_all),
            "is interrupted": (2, lambda node: world.feed(Interrupted(reason="SIGTERM"))),
            "is stopped": (0.2, lambda node: world.feed(StopWanted(exit_code=1, reason="stopped"))),
        }
        self._next_in, self._moment = self._pause(), random.choice(_MOMENTS)
        self._left = random.choice((0, 1, 2, 4, 6, 8))

    def maybe(self) -> bool:
        """Let something go wrong if it is time; return whether it did."""
        self._next_in -= 1
        if self._next_in > 0 or not self._left:
            return False
        nodes = targets(self._world, self._moment)
        if not nodes and self._next_in > -_PATIENCE:
            return False
        self._left -= 1
        is_soon = self._random.random() < _IN_A_ROW
        self._next_in = self._random.choice((3, 12, 40)) if is_soon else self._pause()
        if not nodes or self._random.random() < 0.3:
            nodes = [node for node in self._world.nodes.values() if node.is_alive]
        kinds = self._kinds if self._moment is Moment.ANY else {name: self._kinds[name] for name in _LOSSES}
        self._moment = self._random.choice(_MOMENTS)
        if not nodes:
            return False
        kind = self._random.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        node = self._random.choice(nodes)
        self._tell(f"node {node.number} {kind}")
        self._kinds[kind][1](node)
        if not node.is_healthy:
            self._world.promises.truth.lose(node.number, kind)
        return True

    def pass_time(self) -> bool:
        """Let time pass now and then while other things happen; return whether it did."""
        if self._random.random() > 0.02:
            return False
        seconds = self._random.choice((0.5, 1.0, 2.0))
        if self.is_hurried:
            seconds = self._random.choice((1.0, 20.0, 70.0, 2000.0))
            self._world.promises.truth.troubles.add("time")
        self._world.now += seconds
        self._world.feed(Tick())
        return True

    def _pause(self) -> int:
        return self._random.randint(1, 100)

    def _hang(self, node: Node) -> None:
        worker = self._random.choice(node.workers)
        if worker.at in (*IN_FABRIC, At.ASIDE):
            worker.is_hung = True
        if worker.at not in STEPPING:
            self._world.promises.truth.troubles.add("who was to report or to save hangs")

    def _die_together(self, node: Node) -> None:
        others = [other for other in self._world.nodes.values() if other.is_alive and other is not node]
        num_others = min(len(others), self._world.job.shape.max_failures)
        for other in (node, *self._random.sample(others, num_others)):
            other.die(self._random)
            self._world.promises.truth.lose(other.number, "dies")

    def _hang_all(self, node: Node) -> None:
        for other in self._world.nodes.values():
            if other.is_alive:
                self._hang(other)
                if not other.is_healthy:
                    self._world.promises.truth.lose(other.number, "hangs")

    def _break_connection(self, node: Node) -> None:
        worker = self._random.choice(node.workers)
        if worker.at in IN_FABRIC and not worker.is_hung:
            worker.fail()

    def _fail_script(self, node: Node) -> None:
        worker = self._random.choice(node.workers)
        if worker.at is At.ENDED or worker.is_hung:
            return
        if self._random.random() < 0.5:
            worker.leave()
            worker.say(Failed(error="ValueError: no such file"))
        else:
            node.end_worker(worker, 1)

    def _join(self, node: Node) -> None:
        if sum(other.is_alive for other in self._world.nodes.values()) < MOST_NODES:
            self._world.connect()
