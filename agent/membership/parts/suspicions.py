"""Counts the generations that end in suspicions before their first step, and judges whose connections are broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from resilient.agent.membership.parts.change import Change
from resilient.agent.membership.parts.context import Context

_ENOUGH = 2
"""Generations that a node's connections must have ended before it is judged; one may be an accident."""


class Suspicions:
    """Remembers how often the same members were regrouped since the last step, and between which nodes links broke."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._count = 0
        self._links: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """Regroups of the same members since the last step."""
        return self._count

    @property
    def is_in_vain(self) -> bool:
        """Whether the same members have been regrouped so often that once more will not help."""
        return self._count > self._context.settings.max_suspicions

    def suspect(self, node: int, other: int) -> None:
        """Take in the link whose break ended a generation; links that break afterwards may do so because of it."""
        self._links.append((min(node, other), max(node, other)))

    def note_step(self) -> None:
        """Take in that a step was done: whatever was suspected before is over."""
        self._count = 0
        self._links.clear()

    def note_failure(self, change: Change) -> None:
        """Count a change that was not wanted, unless it was for a node that was lost."""
        if change.lost_nodes:
            self.note_step()
        else:
            self._count += 1

    def worst(self, live: Collection[int]) -> int | None:
        """Return the node whose links ended the most generations, if these are enough to judge; None otherwise.

        Of several, the one with links to more others; of the two ends of a single link, the higher number: if it was
        the other's fault, that one breaks a further link in the next generation, and is the worst then.

        Args:
            live: The nodes that are left.
        """
        ended = Counter(node for link in self._links for node in set(link))
        num_links = Counter(node for link in set(self._links) for node in set(link))
        worst = max(live, key=lambda node: (ended[node], num_links[node], node), default=None)
        return worst if worst is not None and ended[worst] >= _ENOUGH else None

    def links_of(self, node: int) -> str:
        """Return the nodes to which a node's links broke, in words."""
        others = {other for link in self._links if node in link for other in {*link} - {node} or {node}}
        return " and ".join(f"node {other}" for other in sorted(others))

    def why_in_vain(self, change: Change | None) -> str:
        """Return why the same members are regrouped again and again."""
        if change is not None and change.damaged:
            nodes = ", ".join(str(node) for node in sorted({node for node, _ in change.damaged}))
            told = f"copies of states keep getting damaged (nodes {nodes})"
            return f"{told}; check the memory of these, and leave them out"
        if change is not None and change.stalled_s:
            return (
                f"no step is done within {change.stalled_s:.0f} s, and yet all workers answer; raise the Trainer's "
                "comm_timeout_s if steps may take that long"
            )
        links = ", ".join(f"{node} and {other}" for node, other in sorted(set(self._links)))
        between = f"between live nodes{f' ({links})' if links else ''}"
        return f"communication keeps failing {between}; check the network"
