"""A worker: what it holds, where it is in a step, and what it can do next.

What it can do next is a list: which of it happens when, and what never happens because somebody dies, is chance.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

from resilient.protocol.messages import (
    Dropped,
    Failed,
    Finished,
    FromWorkerMessage,
    Installed,
    NotSaved,
    Ready,
    Saved,
    StepDone,
    StepOutcome,
    Suspect,
    ToWorkerMessage,
)
from resilient.state.witnesses import HeldCopy, witness
from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.lineage import Applied, Lineage, Violation, told

if TYPE_CHECKING:
    from tests.agent.membership.checker.nodes import Node
    from tests.agent.membership.checker.world import World


class At(Enum):
    """Where a worker is."""

    STARTING = "starting"
    ASIDE = "aside"  # without a place, or out of all communication
    MEETING = "meeting"
    COPYING = "copying"
    READY = "ready"
    BEGUN = "begun"
    CONTRIBUTED = "contributed"
    COMPLETE = "complete"
    ENTERED = "entered"
    LAST_DONE = "last done"
    SCRIPT_ENDS = "script ends"
    ENDED = "ended"


IN_FABRIC = (At.MEETING, At.COPYING, At.READY, At.BEGUN, At.CONTRIBUTED, At.COMPLETE, At.ENTERED)
STEPPING = (At.READY, At.BEGUN, At.CONTRIBUTED, At.COMPLETE, At.ENTERED)

Action = tuple[str, Callable[[], None]]


class Writing:
    """A part of a checkpoint that is being written: the copies as they were when it began."""

    def __init__(self, generation: int, step: int, states: dict[str, Lineage], path: str, *, is_asked: bool) -> None:
        self.generation, self.step, self.states, self.path = generation, step, states, path
        self.is_asked = is_asked
        self.tries = 0


class Worker:
    """One worker process.

    Attributes:
        version: Steps committed by it; -1 without any state. ``saved_step``: the last it has written a part of.
        states: What it trains, or has trained; ``retained``: what it holds besides.
        gradient: The sum of gradients that it holds completely, of step ``version + 1``.
        begun: It has begun step ``version + 1``.
        odd: States whose copies here the machine knows to be damaged.
    """

    def __init__(self, world: World, node: Node, local_rank: int) -> None:
        self.world, self.node, self.id = world, node, (node.number, local_rank)
        self.at = At.STARTING
        self.is_hung = self.is_main = self.is_damaged = self.is_writing_due = self.has_ended_well = False
        self.version = self.saved_step = -1
        self.states: dict[str, Lineage] = {}
        self.retained: dict[str, Lineage] = {}
        self.gradient: Applied | None = None
        self.begun = False
        self.odd: set[str] = set()
        self.passed: StepOutcome | None = None
        self.fabric: Fabric | None = None
        self.rank = -1
        self.pause_for = 0
        self.inbox: deque[ToWorkerMessage] = deque()
        self.writing: deque[Writing] = deque()
        self.done: list[StepDone] = []
        self.heard_step = 0

    @property
    def name(self) -> str:
        """What the history calls it."""
        return f"worker {self.id[0]}/{self.id[1]}"

    @property
    def step(self) -> int:
        """The step under way, or the next."""
        return self.version + 1

    @property
    def here(self) -> Fabric:
        """The generation it takes part in."""
        assert self.fabric is not None
        return self.fabric

    def say(self, message: FromWorkerMessage) -> None:
        """Send a message to the coordinator, through the agent."""
        self.node.pass_on(self.id[1], message)

    # ------------------------------------------------------------ what it can do

    def actions(self) -> list[Action]:
        """Return everything that it can do now."""
        if self.is_hung or self.at is At.ENDED:
            return []
        found: list[Action] = []
        if self.at is At.STARTING:
            found.append(("is up", self.come_up))
        if self.inbox:
            found.append((f"hears {type(self.inbox[0]).__name__}", self.hear))
        if self.writing:
            found.append(("writes", self.write))
        if self.at in IN_FABRIC:
            found += self._in_fabric()
        if self.at is At.SCRIPT_ENDS and not self.writing:
            found.append(("script ends", self.end))
        return found

    def _in_fabric(self) -> list[Action]:
        fabric, found = self.here, list[Action]()
        if fabric.is_broken or fabric.is_stuck:
            found.append(("fails", self.fail))
        unreachable = fabric.unreachable(self) if self.world.broken_links else []
        if unreachable:
            found.append(("cannot reach a peer", lambda: self.fail(unreachable[0])))
        if self.at is At.MEETING and fabric.has_met and not unreachable:
            found.append(("meets", lambda: self.move(At.COPYING)))
        elif self.at is At.COPYING:
            found += self._copying()
        elif self.at is At.READY:
            found.append(("begins", self.begin))
        elif self.at is At.BEGUN:
            if fabric.can_contribute(self.rank, self.step):
                found.append(("contributes", self.contribute))
        elif self.at is At.CONTRIBUTED and fabric.can_sum(self.rank, self.step):
            found.append(("sums", self.sum_up))
        elif self.at is At.COMPLETE:
            found.append(("enters", self.enter))
        elif self.at is At.ENTERED and fabric.can_pass(self.step):
            found.append(("passes", self.commit))
        return found

    def _copying(self) -> list[Action]:
        fabric, rank = self.here, self.rank
        for place, transfer in enumerate(fabric.transfers):
            if transfer.source == rank and place not in fabric.sent:
                return [(f"sends {transfer.state}", partial(self.send, place))]
        for place, transfer in enumerate(fabric.transfers):
            if transfer.target == rank and transfer.state not in self.states:
                if place not in fabric.sent:
                    return []
                return [(f"receives {transfer.state}", partial(self.receive, place))]
        return [("has installed", self.installed)]

    # ------------------------------------------------------------ doing it

    def move(self, at: At) -> None:
        """Be elsewhere."""
        self.at = at

    def come_up(self) -> None:
        """Say that the job is built."""
        self.at = At.ASIDE
        spec = self.world.job.spec
        if self.node.is_unlike:
            spec = replace(spec, alike={"job": {"model": "another"}})
        self.say(Ready(job=spec, store_address=f"host:{self.id[0]}", pid=100 + self.id[0], device="cpu"))

    def hear(self) -> None:
        """Take in the next message."""
        self.world.recovery.hear(self, self.inbox.popleft())

    def fail(self, peer: int | None = None) -> None:
        """Give the generation up, because a peer does not answer; which, it may not know."""
        number, left = self.here.number, sorted(self.here.left)
        if peer is None and left and self.world.random.random() < 0.5:
            peer = left[0]
        self.leave()
        self.say(Suspect(generation=number, reason="connection reset by peer", peer=peer))

    def leave(self) -> None:
        """Get out of all communication; what it holds, it keeps."""
        if self.fabric is not None and self.at in IN_FABRIC:
            self.fabric.leave(self)
        if self.at not in (At.STARTING, At.SCRIPT_ENDS, At.ENDED):
            self.at = At.ASIDE

    def send(self, place: int) -> None:
        """Send a copy."""
        state, held = self.here.transfers[place].state, {**self.retained, **self.states}
        if state in self.odd:
            raise Violation(f"{self.name} is to send {state}, and its copy is known to be damaged")
        if state not in held:
            raise Violation(f"{self.name} is to send {state}, and holds {sorted(held)}")
        self.here.sent[place] = held[state]

    def receive(self, place: int) -> None:
        """Take in a copy."""
        self.states[self.here.transfers[place].state] = self.here.sent[place]

    def installed(self) -> None:
        """Say that it has what it needs, and go on: with a step, with the end, or aside."""
        fabric = self.here
        fabric.installed.add(self.rank)
        number = fabric.number
        self.say(Installed(generation=number, started_at=0.0, regrouped_at=0.0, installed_at=0.0, bytes_copied=0))
        self.world.promises.note_installed(fabric)
        if self.rank >= len(fabric.slots):
            self.at = At.ASIDE
        else:
            self.at = At.READY
            if self.version == self.world.job.spec.num_steps:
                self.finish()
            elif self.is_writing_due:
                self.write_part()

    def begin(self) -> None:
        """Begin the next step."""
        self.here.begin(self.rank, self.step, self.states)
        self.begun, self.at = True, At.BEGUN

    def contribute(self) -> None:
        """Have its own gradients of the step."""
        self.here.contributed[self.step].add(self.rank)
        self.at = At.CONTRIBUTED

    def sum_up(self) -> None:
        """Have the sums of all gradients of its states; in a generation's first step, compare copies then."""
        self.at = At.COMPLETE
        self.gradient = self.here.gradient(self.step)

    def enter(self) -> None:
        """Enter the prepare barrier, with a wish for a pause if it was told so; look at the copies before."""
        if self.step == self.here.version + 1 and self.drops_damaged():
            return
        self.here.entered[self.step][self.rank] = bool(self.pause_for)
        self.at = At.ENTERED

    def worst(self, states: Collection[str]) -> str:
        """Return which of these states memory damages here: seldom the one it damages elsewhere."""
        return sorted(states)[self.id[0] % len(states)]

    def drops_damaged(self) -> bool:
        """Say that a copy is not that of the others, if one is not; what follows depends on whether most agree."""
        if not (self.is_damaged and self.states):
            return False
        fabric = self.here
        alike = [worker for worker in fabric.members.values() if worker.fabric is fabric and worker.at in STEPPING]
        damaged = {worker: worker.worst(worker.states) for worker in alike if worker.is_damaged and worker.states}
        damaged.pop(self, None)
        state = self.worst(self.states)
        self.leave()
        self.is_damaged, self.gradient = False, None
        num_odd = Counter([state, *damaged.values()])
        if all(len(fabric.holders[each]) > 2 * number for each, number in num_odd.items()):
            del self.states[state]
            odd = {witness(*worker.id): (each,) for worker, each in {**damaged, self: state}.items()}
            self.say(Dropped(generation=fabric.number, step=self.version, odd=odd))
        else:
            self.say(Failed(error=f"copies of {state} differ", is_sound=False))
        return True

    def commit(self) -> None:
        """Pass the barrier and apply the step."""
        fabric, spec = self.here, self.world.job.spec
        assert self.gradient is not None
        step, is_pause = self.step, fabric.pauses_after(self.step)
        self.apply(self.gradient, self.world.job.outcome(step))
        self.retained = {}
        done = StepDone(
            generation=fabric.number,
            outcome=self.world.job.outcome(step),
            num_samples=spec.global_batch,
            step_ms=1.0,
            learning_rate=0.1,
            at=float(step),
        )
        self.done.append(done)
        if self.rank == 0:
            self.say(done)
        self.at = At.READY
        if self.world.job.is_due(step) and self.drops_damaged():
            return
        if step == spec.num_steps:
            self.finish()
        elif self.world.job.is_due(step):
            self.write_part()
        if is_pause:
            self.pause()

    def pause(self) -> None:
        """Stop between two steps: the generation ends here for all; answer the wish, if it has come here."""
        self.at = At.ASIDE
        if self.pause_for:
            self.world.recovery.report(self, self.pause_for)

    def apply(self, gradient: Applied, outcome: StepOutcome) -> None:
        """Apply a step to what it trains."""
        self.states = {name: (*lineage, gradient) for name, lineage in self.states.items()}
        self.version, self.passed = self.version + 1, outcome
        self.gradient, self.begun = None, False

    def finish(self) -> None:
        """Write the last part and say so."""
        self.at = At.LAST_DONE
        self.write_part()
        if not self.writing:
            self.say(Finished(generation=self.here.number))

    def end(self) -> None:
        """Come to the script's end, after training."""
        self.at, self.has_ended_well = At.ENDED, True
        self.node.worker_ended(self, 0)

    # ------------------------------------------------------------ files

    def write_part(self) -> None:
        """Begin to write its part of the checkpoint of the step that it is at."""
        fabric = self.here
        own = {name: self.states[name] for name, rank in fabric.writers().items() if rank == self.rank}
        if own:
            path = self.world.path(self.version)
            self.writing.append(Writing(fabric.number, self.version, own, path, is_asked=False))

    def write(self) -> None:
        """Have written what it is writing, or find that the disk takes no file."""
        writing = self.writing[0]
        is_last = writing.is_asked or writing.step == self.world.job.spec.num_steps
        if self.node.num_refused and writing.states:
            self.node.num_refused -= 1
            self.say(NotSaved(step=writing.step, error=f"cannot write {writing.path}"))
            writing.tries += 1
            if not is_last:
                self.writing.popleft()
            elif writing.tries > 2:
                self.writing.popleft()
                self.say(Failed(error=f"cannot write {writing.path}"))
            return
        self.writing.popleft()
        saved = {
            name: (self.world.disk.write(writing.path, name, lineage, is_elsewhere=self.node.writes_elsewhere),)
            for name, lineage in writing.states.items()
        }
        self.saved_step, skipped = writing.step, self.world.job.skipped(writing.step)
        held = self.held_copies() if writing.is_asked else {}
        number, step = writing.generation, writing.step
        self.say(Saved(generation=number, step=step, states=saved, skipped=skipped, held=held))
        if is_last and not writing.is_asked and not self.writing and self.at is At.LAST_DONE:
            self.say(Finished(generation=writing.generation))

    def held_copies(self) -> dict[str, HeldCopy]:
        """Return what it tells of all its copies, at an early stop."""
        return {
            name: HeldCopy(fingerprint=crc32(told(lineage).encode()), origin=witness(*self.id), device="cpu")
            for name, lineage in self.states.items()
        }
