"""The coordinator dies, and another one inherits what it had written: the machine is made again of its log.

What was told since the last line that had to be on disk is lost with it. Nobody was told that it was heard, so the
agents say it again, before all else; plans that were wanted are wanted still.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.agent.journal.inheritance import inherit
from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts.events import (
    NodeConnected,
    PreparePlans,
    Send,
    Stimulus,
    Tell,
    Tick,
    WriteManifest,
)
from tests.agent.membership.checker.lineage import Violation

if TYPE_CHECKING:
    from tests.agent.membership.checker.world import World


class _Addressees:
    """Counts what the new machine says to each node."""

    def __init__(self) -> None:
        self.num_said: Counter[int] = Counter()
        self.expected: set[int] = set()

    def expect_back(self, connected: NodeConnected) -> None:
        self.expected.add(connected.node)

    def forget(self, node: int) -> None:
        self.expected.discard(node)

    def tell(self, instruction: Send | Tell) -> None:
        self.num_said[instruction.node] += 1


def succeed(world: World) -> None:
    """Have the coordinator die and another one take over."""
    num_written = next(
        (
            index
            for index in range(len(world.stimuli), 0, -1)
            if world.stimuli[index - 1][2] or isinstance(world.stimuli[index - 1][0], Tick)
        ),
        0,
    )
    written, lost = world.stimuli[:num_written], [stimulus for stimulus, _, _ in world.stimuli[num_written:]]
    machine = Membership(replace(world.job.settings, validate=True))
    addressees = _Addressees()
    inherited = inherit(machine, ((at, stimulus) for stimulus, at, _ in written), addressees)
    said = Counter(each.node for _, _, told in written for each in told if isinstance(each, Send | Tell))
    if addressees.num_said != said:
        raise Violation(f"conversations go on elsewhere: {said} was said, {addressees.num_said} is said again")
    if not machine.members.keys() <= addressees.expected:
        raise Violation(f"nodes {sorted(machine.members)} are counted on, {sorted(addressees.expected)} expected back")
    world.machine, world.stimuli = machine, written
    world.plans_wanted = [each.num_nodes for each in inherited.unanswered if isinstance(each, PreparePlans)]
    for stimulus in reversed(lost):
        _say_again(world, stimulus)
    for wanted in inherited.unanswered:
        if isinstance(wanted, WriteManifest):
            world.feed(world.write(wanted))


def _say_again(world: World, stimulus: Stimulus) -> None:
    node: int | None = getattr(stimulus, "node", None)
    if node is not None:
        world.nodes[node].up.appendleft(stimulus)
