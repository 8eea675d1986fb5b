"""A way to go on from a plan: what it takes at least, and the candidate that it is with all nodes in their places.

Placing the nodes takes longest. Bounds that need no places say which ways can be best, and only these are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal

from resilient.templates.plan import Plan
from resilient.templates.replan.repair import RepairKind

CandidateKind = RepairKind | Literal["composed"]


@dataclass(frozen=True, kw_only=True)
class ReplanCandidate:
    """One way to go on.

    Args:
        kind: ``composed``, or what is done to the pipelines concerned.
        plan: The plan.
        copied_bytes: What nodes must receive from other nodes before the next step.
        copy_ms: How long that takes: as long as the node that receives or sends most.
        step_ms: How long a step takes, slow nodes considered.
        lacking_domains: In how many more failure domains states should be held, summed over the states.
        with_more_ms: Where nodes stand by that there is a place for, how long a step takes at best that uses all of
            these; else None.
    """

    kind: CandidateKind
    plan: Plan
    copied_bytes: int
    copy_ms: float
    step_ms: float
    lacking_domains: int
    with_more_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """A candidate before its nodes are in their places.

    Args:
        least_step_ms: How long a step takes at least, whichever of its nodes are slow.
        num_nodes: How many nodes it uses.
        placed_step_ms: Places the nodes and returns how long a step takes; None where that is ``least_step_ms``.
        copy_bounds: Each returns how long copies take at least, in ms, and how many bytes are copied at least; the
            later, the higher, and the longer it takes.
        candidate: Places the nodes and returns the candidate; None where the step shows to be too long.
    """

    least_step_ms: float
    num_nodes: int
    placed_step_ms: Callable[[], float] | None
    copy_bounds: Sequence[Callable[[], tuple[float, int]]]
    candidate: Callable[[], ReplanCandidate | None]

    @cached_property
    def step_ms(self) -> float:
        """How long a step takes."""
        return self.least_step_ms if self.placed_step_ms is None else self.placed_step_ms()

    def shorter_than(self, step_ms: float) -> Way:
        """Return this way, in which nodes stand by, but only if a step is shorter than the one with them."""

        def candidate() -> ReplanCandidate | None:
            found = self.candidate() if self.step_ms < step_ms else None
            return found and replace(found, with_more_ms=step_ms)

        return replace(self, candidate=candidate)


def fastest_ms(ways: Iterable[Way]) -> float:
    """Return the shortest step of some ways, one or more; nodes are placed in those only that may have it."""
    found = inf
    for way in sorted(ways, key=lambda each: (each.least_step_ms, each.placed_step_ms is not None)):
        if way.least_step_ms >= found:
            break
        found = min(found, way.step_ms)
    return found
