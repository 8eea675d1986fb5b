"""Whichever links between nodes are broken, and in whatever order it is told: no node without one is let go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from resilient.protocol.messages import Suspect
from tests.agent.membership.simulated import Job, started

NUM_NODES = 7
LINKS = [frozenset(pair) for pair in combinations(range(NUM_NODES), 2)]

SEEDS = st.integers(0, 2**32 - 1)


class Breaking:
    """Plays the workers of a generation whose links are broken, until all have reported.

    A worker fails at a link that is broken, or at one whose other end has left. It leaves when it is asked to, or as
    it fails, where gloo takes its other connections down as well.

    Args:
        job: In training.
        broken: Links, each by its two nodes.
        random: Decides what happens next.
        leaves_at_once: Whether whoever fails leaves as it does.
        all_leave_together: Nobody fails because others have been asked to leave before it was.
    """

    def __init__(
        self,
        job: Job,
        broken: Collection[frozenset[int]],
        random: Random,
        *,
        leaves_at_once: bool = False,
        all_leave_together: bool = False,
    ) -> None:
        self._job, self._broken, self._random = job, broken, random
        self._leaves_at_once, self._all_leave_together = leaves_at_once, all_leave_together
        self._generation = job.machine.generation
        self._ranks = {slot.node: slot.rank for slot in job.plan.slots}
        self._failed: set[int] = set()
        self._left: set[int] = set()
        self._unheard: dict[int, Suspect] = {}

    def run(self) -> None:
        """Let things happen until the next generation begins, or the job ends."""
        while self._job.machine.generation == self._generation and self._job.stop is None:
            happenings = [happening for node in self._ranks for happening in self._of(node)]
            self._random.choice(happenings)()
        self._job.answer()

    def _of(self, node: int) -> list[Callable[[], None]]:
        """Return what can happen to a node next."""
        if node in self._unheard:
            return [partial(self._is_heard, node)]
        if node in self._left:
            return [partial(self._job.answer, [(node, 0)])] if self._is_asked(node) else []
        found: list[Callable[[], None]] = []
        if node not in self._failed:
            found += [partial(self._fails, node, peer) for peer in self._ranks if self._is_cut(node, peer)]
        if self._is_asked(node):
            found.append(partial(self._leaves, node))
        return found

    def _is_asked(self, node: int) -> bool:
        return bool(self._job.workers[node, 0].inbox)

    def _is_cut(self, node: int, peer: int) -> bool:
        is_left = peer in self._left and peer != node and not (self._all_leave_together and self._is_asked(node))
        return frozenset((node, peer)) in self._broken or is_left

    def _fails(self, node: int, peer: int | None) -> None:
        rank = self._ranks[peer] if peer is not None else None
        self._unheard[node] = Suspect(generation=self._generation, reason="reset", peer=rank)
        self._failed.add(node)
        if self._leaves_at_once:
            self._left.add(node)

    def _leaves(self, node: int) -> None:
        if node not in self._failed:
            self._fails(node, None)
        self._left.add(node)

    def _is_heard(self, node: int) -> None:
        self._job.say((node, 0), self._unheard.pop(node))


def trained() -> Job:
    job = started(NUM_NODES)
    job.step(1)
    return job


def is_whole(job: Job, broken: Collection[frozenset[int]]) -> bool:
    return not any(link <= set(job.plan.nodes) for link in broken)


def let_go(job: Job) -> set[int]:
    return {record.fields["node"] for record in job.records if record.kind == "node_lost"}


@given(broken=st.sets(st.sampled_from(LINKS), min_size=1, max_size=6), leaves_at_once=st.booleans(), seed=SEEDS)
def test_no_node_without_a_broken_link_is_let_go(broken: set[frozenset[int]], leaves_at_once: bool, seed: int) -> None:
    job, random = trained(), Random(seed)
    while job.stop is None and not is_whole(job, broken):
        Breaking(job, broken, random, leaves_at_once=leaves_at_once).run()
        assert let_go(job) <= {node for link in broken for node in link}


@given(center=st.integers(0, NUM_NODES - 1), others=st.sets(st.integers(0, NUM_NODES - 1), min_size=1), seed=SEEDS)
def test_links_that_all_end_at_one_node_cost_it_and_at_most_one_other(center: int, others: set[int], seed: int) -> None:
    broken = {frozenset((center, other)) for other in others - {center}}
    job, random = trained(), Random(seed)
    while job.stop is None and not is_whole(job, broken):
        Breaking(job, broken, random, all_leave_together=True).run()
    assert job.stop is None
    assert len(let_go(job)) <= 2
    job.step(2)
    assert job.machine.parts.suspicions.count == 0
