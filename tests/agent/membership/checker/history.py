"""One seed, from the beginning of its job to the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from resilient.agent.membership.machine import Membership, MembershipError
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Tick
from tests.agent.membership.checker.faults.kinds import Faults
from tests.agent.membership.checker.lineage import Violation
from tests.agent.membership.checker.succession import succeed
from tests.agent.membership.checker.world import World

_IDLE_S = 30.0
_MOST_IDLE = 600
_MOST_EVENTS = 20_000
_DECIDED_AGAIN = 10
SUCCESSION = "the coordinator dies, and another one takes over"
"""How a history tells it."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What came of a seed.

    Args:
        violation: What does not hold; "" if all does.
        lines: What happened, the last thing last.
        exit_code: Of the job; None if it has not come to an end.
    """

    seed: int
    violation: str
    lines: tuple[str, ...]
    exit_code: int | None

    def told(self) -> str:
        """Return it to be read."""
        return "\n".join([f"seed {self.seed}:", *self.lines, f"seed {self.seed}: {self.violation or 'all holds'}"])


def run(seed: int, deaths: Iterator[bool] | None = None) -> History:
    """Run the history of a seed: all of it is decided by the seed.

    Args:
        seed: Any number.
        deaths: Whether the coordinator dies, before each event; None for what the seed decides.
    """
    lines: list[str] = []
    random = Random(seed)
    world = World(random, lines.append)
    lines.append(f"{world.job.leaning.name}, {world.job.shape}, {world.job.settings}")
    violation = ""
    try:
        _play(world, Faults(world, random, lines.append), random, _deaths(seed) if deaths is None else deaths)
        _check_silence(world)
        if seed % _DECIDED_AGAIN == 0:
            _check_decisions(world)
    except (Violation, MembershipError) as error:
        violation = str(error)
    exit_code = world.stop.exit_code if world.stop is not None else None
    return History(seed=seed, violation=violation, lines=tuple(lines), exit_code=exit_code)


def _deaths(seed: int) -> Iterator[bool]:
    """Yield before each event whether the coordinator dies; decided by the seed, and apart from all else."""
    random = Random(f"coordinators of {seed}")
    often = random.choice((0.0, 0.0, 0.005, 0.05))
    while True:
        yield random.random() < often


def _play(world: World, faults: Faults, random: Random, deaths: Iterator[bool]) -> None:
    """Have things happen until the job stops: time passes when nothing else can happen."""
    idle = 0
    for dies, _ in zip(deaths, range(_MOST_EVENTS), strict=False):
        if world.stop is not None:
            return
        if dies:
            world.tell(SUCCESSION)
            succeed(world)
        if faults.maybe() or faults.pass_time():
            continue
        actions = world.actions()
        if actions:
            world.happen(random.choices(actions, [weight for weight, _, _ in actions])[0])
            continue
        idle += 1
        if idle > _MOST_IDLE:
            break
        if world.machine.phase is Phase.FINISHED:
            for node in world.nodes.values():
                if node.is_hung:  # scripts may take as long as they like: somebody has to end one that hangs
                    node.die(random)
        world.now += _IDLE_S
        world.feed(Tick())
    raise Violation(f"the job does not come to an end: it is {world.machine.phase.value}")


def _check_decisions(world: World) -> None:
    """Have a fresh machine decide everything once more."""
    again = Membership(world.job.settings)
    for stimulus, now, instructions in world.stimuli:
        if str(again.handle(stimulus, now)) != str(instructions):  # a loss that is no number is unlike itself
            raise Violation(f"told the same, another machine decides otherwise about {stimulus}")


def _check_silence(world: World) -> None:
    """After the end, whatever is still on its way changes nothing."""
    for node in world.nodes.values():
        while node.up:
            world.feed(node.up.popleft())
    world.feed(Tick())
