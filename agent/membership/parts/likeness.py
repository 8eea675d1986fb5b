"""What nodes and workers have said of themselves that must be alike, and who said it first."""

from __future__ import annotations

from collections import deque

from resilient.agent.membership.parts.context import Context
from resilient.protocol.alike import ALLOWABLE, FIXES, Alike

_MOST_TOLD = 3
_MOST_KNOWN = 4


class Likeness:
    """Holds what a node tells against what the first one told; what may differ is recorded, what may not is refused."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first: dict[tuple[str, str], tuple[str, str]] = {}  # kind and detail -> value, and whose
        # What was like them, as it was told: by agents and by workers, and mostly others tell the same.
        self._like: deque[Alike] = deque(maxlen=_MOST_KNOWN)

    def why_unlike(self, node: int, told: Alike) -> str:
        """Return why a node cannot take part with the others; "" if it can, which it is held against from now on.

        What only one of two nodes tells, a module that only one of them has imported for example, is no difference.

        Args:
            node: Which is connected.
            told: By one of its workers; what its agent told comes before.
        """
        member = self._context.members[node]
        here = f"node {node} ({member.host})"
        told, member.unchecked = {**member.unchecked, **told}, {}
        if told in self._like:
            return ""
        differences = {kind: text for kind in FIXES if (text := self._differences(kind, told.get(kind, {}), here))}
        refused = [kind for kind in differences if kind not in self._context.settings.allow_different]
        if refused:
            return _refusal(refused, differences)
        for kind, text in differences.items():
            self._context.record("difference_allowed", node=node, what=kind, difference=text)
        for kind, values in told.items():
            for detail, value in values.items():
                self._first.setdefault((kind, detail), (value, here))
        if not differences:
            self._like.append(told)
        return ""

    def _differences(self, kind: str, values: dict[str, str], here: str) -> str:
        found: list[str] = []
        for detail, value in values.items():
            first, there = self._first.get((kind, detail), (value, here))
            if first != value:
                found.append(f"{detail} {value} on {here} and {first} on {there}")
        more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        return f"{', '.join(found[:_MOST_TOLD])}{more}"


def _refusal(refused: list[str], differences: dict[str, str]) -> str:
    fix = FIXES[refused[0]]  # what the others follow from
    if all(kind in ALLOWABLE for kind in refused):
        fix += f", or start the job with {' '.join(f'--allow-different {kind}' for kind in refused)}"
    got = "; ".join(differences[kind] for kind in refused)
    return f"{' and '.join(refused)} must be the same on all nodes, got {got}; {fix}"
