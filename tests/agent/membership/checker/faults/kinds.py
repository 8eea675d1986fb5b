"""What can go wrong, and what people do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from resilient.agent.membership.parts.events import Interrupted, StopWanted, Tick
from resilient.protocol.messages import Failed
from tests.agent.membership.checker.faults.leaning import NONE
from tests.agent.membership.checker.faults.moments import Moment, targets
from tests.agent.membership.checker.jobs import MOST_NODES
from tests.agent.membership.checker.nodes import Node
from tests.agent.membership.checker.truth import HANGS
from tests.agent.membership.checker.worker import IN_FABRIC, STEPPING, At
from tests.agent.membership.checker.world import World

_IN_A_ROW = 0.6
"""How often the next fault comes while the one before is being dealt with."""
_NOT_YET = 0.8
"""How often copies are let go on for one more event: a fault comes anywhere among them."""

_LOSSES = ("dies", "dies with others", "is cut off", "loses a worker", "loses a connection", "hangs", "has an error")
_MOMENTS = (*[Moment.ANY] * len(Moment), *Moment)
_KINDS_OF_ERRORS = ("OSError at a.py:7", "KeyError at b.py:8", "AcceleratorError at c.py:9")
_FOLLOWS: dict[str, tuple[tuple[Moment, str], ...]] = {
    "leaves": ((Moment.LEAVING, ""), (Moment.COPYING, ""), (Moment.COPYING, "loses a connection")),
    "is interrupted": ((Moment.ENDING, ""),),
    "dies with others": ((Moment.INSTALLING, ""), (Moment.FIRST_STEP, "")),
    "is joined by another": ((Moment.INSTALLING, ""), (Moment.COPYING, "")),
    "has an error": ((Moment.INSTALLING, ""), (Moment.FIRST_STEP, "")),
}
"""What is often worst after a fault: when the next one comes, and of which kind, if it is one in particular."""

_PATIENCE, _LONG_PATIENCE = 80, 300  # events


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
        kinds: dict[str, tuple[float, Callable[[Node], None]]] = {
            "dies": (8, lambda node: node.die(random)),
            "dies with others": (2, self._die_together),
            "is cut off": (4, lambda node: node.cut_off(random)),
            "loses a worker": (3, lambda node: node.end_worker(random.choice(node.workers), -9)),
            "leaves": (12, lambda node: node.announce_leave(random)),
            "is disconnected": (8, lambda node: node.disconnect(random)),
            "has a script that fails": (1, self._fail_script),
            "has an error": (4, self._err),
            "has a broken link": (1, self._break_link),
            "hangs": (2, self._hang),
            "loses a connection": (3, self._break_connection),
            "repeats itself": (3, lambda node: setattr(node, "repeats", True)),
            "has a full disk": (1, lambda node: setattr(node, "num_refused", random.choice((1, 1, 2, 1000)))),
            "writes elsewhere": (1, lambda node: setattr(node, "writes_elsewhere", True)),
            "has damaged memory": (5, self._damage),
            "has damaged memory at the end": (2, self._damage_at_the_end),
            "is joined by another": (14, self._join),
            "is joined by one that is unlike": (3, lambda node: self._join(node, is_unlike=True)),
            "sees a manifest fail": (1, lambda node: setattr(world, "manifests_to_fail", 1)),
            "hangs with all others": (1, self._hang_all),
            "is interrupted": (3, lambda node: world.feed(Interrupted(reason="SIGTERM"))),
            "is stopped": (0.2, lambda node: world.feed(StopWanted(exit_code=1, reason="stopped"))),
        }
        leaning = world.job.leaning
        self._kinds = {kind: (leaning.weigh(kind, weight, random), do) for kind, (weight, do) in kinds.items()}
        self._longest_pause = 100 if leaning is NONE else 40
        self._moments = (*_MOMENTS, *(Moment[name] for name in leaning.moments for _ in range(3)))
        self._next_in, self._moment = random.choice(leaning.calm) + self._pause(), random.choice(self._moments)
        self._next_kind = ""
        self._left = random.choice(leaning.num_faults)
        self._patience, self._targets = _PATIENCE, list[Node]()

    def maybe(self) -> bool:
        """Let something go wrong if it is time; return whether it did."""
        self._next_in -= 1
        if self._next_in > 0 or not self._left:
            return False
        nodes = targets(self._world, self._moment)
        if self._moment is Moment.COPYING and nodes and self._random.random() < _NOT_YET:
            return False
        if not nodes and self._next_in > -self._patience:
            return False
        self._left -= 1
        is_soon = self._random.random() < _IN_A_ROW
        self._next_in = self._random.choice((3, 12, 40)) if is_soon else self._pause()
        if not nodes or self._random.random() < 0.3:
            nodes = [node for node in self._world.nodes.values() if node.is_alive]
        kinds = self._kinds if self._moment is Moment.ANY else {name: self._kinds[name] for name in _LOSSES}
        if not nodes:
            return False
        weights = [weight for weight, _ in kinds.values()]
        if not any(weights):
            return False
        kind = self._next_kind or self._random.choices(list(kinds), weights)[0]
        node, self._targets = self._random.choice(nodes), nodes
        self._tell(f"node {node.number} {kind}")
        self._kinds[kind][1](node)
        is_worst = kind in _FOLLOWS and self._random.random() < 0.75
        self._patience = _LONG_PATIENCE if is_worst else _PATIENCE
        self._moment, self._next_kind = self._random.choice(
            _FOLLOWS[kind] if is_worst else [(m, "") for m in self._moments]
        )
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
        return self._random.randint(1, self._longest_pause)

    def _hang(self, node: Node) -> None:
        worker = self._random.choice(node.workers)
        if worker.at in (*IN_FABRIC, At.ASIDE):
            worker.is_hung = True
        if worker.at not in STEPPING:
            self._world.promises.truth.troubles.add(HANGS)

    def _die_together(self, node: Node) -> None:
        shape = self._world.job.shape
        num_alive = sum(other.is_alive for other in self._world.nodes.values())
        num_others = self._random.choice((shape.max_failures, num_alive - shape.needed_nodes - 1))
        others = [other for other in self._targets if other is not node]
        num_others = max(0, min(len(others), num_others))
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

    def _break_link(self, node: Node) -> None:
        other = self._random.choice(list(self._world.nodes.values()))
        if other is not node:
            self._world.broken_links.add(frozenset((node.number, other.number)))

    def _damage(self, node: Node) -> None:
        others = [other for other in self._world.nodes.values() if other.is_alive and other is not node]
        for other in (node, *self._random.sample(others, min(len(others), self._random.choice((0, 1, 1, 2))))):
            self._random.choice(other.workers).is_damaged = True

    def _damage_at_the_end(self, node: Node) -> None:
        self._random.choice(node.workers).is_damaged = True
        self._world.feed(Interrupted(reason="SIGTERM"))

    def _err(self, node: Node) -> None:
        kinds = self._random.sample(_KINDS_OF_ERRORS, len(_KINDS_OF_ERRORS))
        if self._random.random() < 0.4:
            kinds = kinds[:1] * len(kinds)
        others = [other for other in self._world.nodes.values() if other.is_alive and other is not node]
        others = self._random.sample(others, min(len(others), self._random.choice((0, 1, 2, 2))))
        for kind, each in zip(kinds, (node, *others), strict=False):
            worker = self._random.choice(each.workers)
            if worker.at in IN_FABRIC and not worker.is_hung:
                worker.say(Failed(error="an error", kind=kind))
                worker.leave()

    def _fail_script(self, node: Node) -> None:
        worker = self._random.choice(node.workers)
        if worker.at is At.ENDED or worker.is_hung:
            return
        if self._random.random() < 0.5:
            worker.leave()
            worker.say(Failed(error="ValueError: no such file"))
        else:
            node.end_worker(worker, 1)

    def _join(self, node: Node, *, is_unlike: bool = False) -> None:
        if sum(other.is_alive for other in self._world.nodes.values()) < MOST_NODES:
            self._world.connect().is_unlike = is_unlike
