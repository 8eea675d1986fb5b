"""Counts the generations that end in suspicions before their first step, and judges whose connections are broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.context import Context
from resilient.templates.common.words import listed

_ENOUGH = 2
"""Generations that a node's connections must have ended before it is judged; one may be an accident."""

_Link = tuple[int, int]
"""The two nodes, the lower number first."""


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What is known of the connections whose break ended a generation.

    Args:
        nodes: Each is certainly at an end of one.
        links: Where they may be.
        teller: Whose word that is, unless both ends have told.
    """

    nodes: frozenset[int] = frozenset()
    links: frozenset[_Link] = frozenset()
    teller: int | None = None


class Suspicions:
    """Remembers how often the same members were regrouped since the last step, and between which nodes links broke.

    A connection also breaks because the worker at its other end has left the generation, by itself or because all are
    asked to. So what workers tell is weighed: what both ends of a connection tell is true, since one of them left
    first; otherwise, what is told first, before anybody was asked to leave.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._count = 0
        self._told: dict[WorkerId, WorkerId] = {}  # in the generation in force: who could not reach whom
        self._first: WorkerId | None = None
        self._verdicts: list[_Verdict] = []

    @property
    def count(self) -> int:
        """Regroups of the same members since the last step."""
        return self._count

    @property
    def is_in_vain(self) -> bool:
        """Whether the same members have been regrouped so often that once more will not help."""
        return self._count > self._context.settings.max_suspicions

    def suspect(self, worker: WorkerId, peer: WorkerId, *, is_first: bool) -> None:
        """Take in that a worker cannot reach a peer; ``is_first``: nobody was asked to leave the generation before."""
        self._told[worker] = peer
        if is_first:
            self._first = worker

    def may_concern(self, node: int) -> bool:
        """Return whether the generation may have been left because of a node: it was named, or the first named none."""
        return self._first is None or node in {peer[0] for peer in self._told.values()}

    def note_step(self) -> None:
        """Take in that a step was done: whatever generations ended in before is over."""
        self._count = 0
        self._verdicts.clear()

    def note_failure(self, change: Change) -> None:
        """Count a change that was not wanted, unless it was for a node that was lost."""
        if change.lost_nodes:
            self.note_step()
        else:
            self._count += 1
            self._verdicts.append(self._verdict())
        self._told, self._first = {}, None

    def _verdict(self) -> _Verdict:
        """Weigh what was told in one generation."""
        told, first = self._told, self._first
        mutual = frozenset(_link(worker, peer) for worker, peer in told.items() if told.get(peer) == worker)
        if mutual:
            return _Verdict(nodes=frozenset(node for link in mutual for node in link), links=mutual)
        if first is None:
            return _Verdict()
        peer = told[first]
        other = told.get(peer)
        nodes, links = {first[0], peer[0]}, {_link(first, peer)}
        if other is not None:  # the peer may have left because of that one, or that one because all did
            nodes, links = {peer[0]} if other not in told else set[int](), {*links, _link(peer, other)}
        return _Verdict(nodes=frozenset(nodes), links=frozenset(links), teller=first[0])

    def worst(self, live: Collection[int]) -> int | None:
        """Return the node whose links ended the most generations, if these are enough to judge; None otherwise.

        Of several, the one with links to more others; of the two ends of a single link, the one that complains, and if
        both do, the higher number: if it was the other's fault, that one breaks a further link in the next generation,
        and is the worst then.

        Args:
            live: The nodes that are left.
        """
        ended = Counter(node for verdict in self._verdicts for node in verdict.nodes)
        num_links = Counter(node for link in self._links for node in set(link))
        complained = Counter(verdict.teller for verdict in self._verdicts)
        worst = max(live, key=lambda node: (ended[node], num_links[node], complained[node], node), default=None)
        return worst if worst is not None and ended[worst] >= _ENOUGH else None

    def links_of(self, node: int) -> str:
        """Return the nodes to which a node's links broke, in words."""
        others = {other for link in self._links if node in link for other in {*link} - {node} or {node}}
        return " and ".join(f"node {other}" for other in sorted(others))

    @property
    def _links(self) -> set[_Link]:
        return {link for verdict in self._verdicts for link in verdict.links}

    def why_in_vain(self, change: Change | None) -> str:
        """Return why the same members are regrouped again and again."""
        if change is not None and change.damaged:
            nodes = listed(sorted({node for node, _ in change.damaged}))
            told = f"copies of states keep getting damaged (nodes {nodes})"
            return f"{told}; check the memory of these, and leave them out"
        if change is not None and change.stalled_s:
            return (
                f"no step is done within {change.stalled_s:.0f} s, and yet all workers answer; raise the Trainer's "
                "comm_timeout_s if steps may take that long"
            )
        links = listed([f"{node} and {other}" for node, other in sorted(self._links)])
        between = f"between live nodes{f' ({links})' if links else ''}"
        return f"communication keeps failing {between}; check the network"


def _link(worker: WorkerId, other: WorkerId) -> _Link:
    return min(worker[0], other[0]), max(worker[0], other[0])
