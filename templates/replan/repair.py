"""Changing only the pipelines that a loss or a join concerns: how many nodes each of them has afterwards.

Nodes without a place first replace lost ones. A pipeline that is still short of nodes goes on with those it has left
(*simple*); one with fewer than n0 *borrows* from those that have more, or *merges*: it is given up, and its nodes go to
another. Merging is possible whenever nobody can lend and more than f + 1 pipelines are left: the others have n0 nodes
each, and n0 - k nodes more make 2 n0 - k, which is a template size because f + 1 pipelines stay.

Source: Oobleck (SOSP'23), section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace
from typing import Literal

from resilient.templates.plan import Plan

RepairKind = Literal["keep", "join", "simple", "borrow", "merge"]


@dataclass(frozen=True, kw_only=True)
class Repair:
    """The pipelines after a change.

    Args:
        kind: The furthest-reaching thing that is done, in the order of the type.
        pipelines: Of each the index of the pipeline it continues, None for a new one, and its number of nodes.
    """

    kind: RepairKind
    pipelines: tuple[tuple[int | None, int], ...]


def repairs(
    plan: Plan,
    nodes: Collection[int],
    sizes: range,
    *,
    min_pipelines: int,
    max_pipelines: int,
    may_stand_by: bool = False,
) -> tuple[Repair, ...]:
    """Return the different ways to go on that change only the pipelines concerned; none where that is not enough.

    They differ in whether pipelines with too few nodes borrow while others can lend, or are given up while there are
    enough pipelines; and in whether nodes that are left over extend the smallest pipelines, make new ones, or stand by.

    Args:
        plan: The plan before.
        nodes: The live nodes.
        sizes: The template sizes; the first is n0.
        min_pipelines: f + 1.
        max_pipelines: One per microbatch.
        may_stand_by: Whether nodes that are left over may stand by where there is a place for them.
    """
    live = set(nodes)
    left = [sum(node in live for node in pipeline.nodes) for pipeline in plan.pipelines]
    wanted = [len(pipeline.nodes) for pipeline in plan.pipelines]
    found: dict[tuple[tuple[int | None, int], ...], Repair] = {}
    for giving_up in (False, True):
        for adding in (False, True, None) if may_stand_by else (False, True):
            change = _Change(left, wanted, len(live) - sum(left), sizes, min_pipelines, max_pipelines)
            change.replace_lost()
            if change.make_viable(giving_up):
                if adding is not None:
                    change.use_spare(adding)
                repair = Repair(kind=change.kind, pipelines=change.pipelines)
                found.setdefault(repair.pipelines, repair)
    return tuple(found.values())


class _Change:
    def __init__(
        self,
        left: Sequence[int],
        wanted: Sequence[int],
        spare: int,
        sizes: range,
        min_pipelines: int,
        max_pipelines: int,
    ) -> None:
        # By index in the plan; new pipelines follow, and those that are given up are gone.
        self._sizes = dict(enumerate(left))
        self._wanted, self._spare = wanted, spare
        self._n0, self._largest = sizes[0], sizes[-1]
        self._min_pipelines, self._max_pipelines = min_pipelines, max_pipelines
        self._joined = self._borrowed = self._merged = False

    @property
    def kind(self) -> RepairKind:
        if self._merged:
            return "merge"
        if self._borrowed:
            return "borrow"
        if any(self._sizes.get(index, 0) < wanted for index, wanted in enumerate(self._wanted)):
            return "simple"
        return "join" if self._joined else "keep"

    @property
    def pipelines(self) -> tuple[tuple[int | None, int], ...]:
        old = len(self._wanted)
        return tuple((index if index < old else None, size) for index, size in self._sizes.items())

    def replace_lost(self) -> None:
        """Fill up: first pipelines that get to n0 by it, then those that lack least."""
        sizes = self._sizes
        short = [index for index, size in sizes.items() if size < self._wanted[index]]
        while self._spare and short:
            index = min(
                short, key=lambda i: (not sizes[i] < self._n0 <= sizes[i] + self._spare, self._wanted[i] - sizes[i])
            )
            sizes[index] += 1
            self._spare -= 1
            self._joined = True
            if sizes[index] == self._wanted[index]:
                short.remove(index)

    def make_viable(self, giving_up: bool) -> bool:
        """Borrow and merge until every pipeline has n0 nodes; return whether that is possible."""
        while min(self._sizes.values()) < self._n0:
            neediest = min(reversed(self._sizes), key=self._sizes.__getitem__)
            least_needy = max((i for i, size in self._sizes.items() if size < self._n0), key=self._sizes.__getitem__)
            lender = max(self._sizes, key=self._sizes.__getitem__)
            may_go = len(self._sizes) > self._min_pipelines
            if may_go and (giving_up or not self._sizes[neediest] or self._sizes[lender] <= self._n0):
                self._merge(neediest)
            elif self._sizes[lender] > self._n0:
                self._sizes[lender] -= 1
                self._sizes[least_needy] += 1
                self._borrowed = True
            else:
                return False
        return True

    def use_spare(self, adding: bool) -> None:
        """Make new pipelines as large as the smallest, or extend the smallest; what fits nowhere is left out."""
        smallest_first = [(size, index) for index, size in self._sizes.items()]
        heapify(smallest_first)
        next_index = max(len(self._wanted), *self._sizes) + 1
        while self._spare:
            size, index = smallest_first[0]
            full = size >= self._largest
            if (adding or full) and self._spare >= self._n0 and len(self._sizes) < self._max_pipelines:
                new = min(self._spare, size)
                heappush(smallest_first, (new, next_index))
                self._sizes[next_index] = new
                self._spare -= new
                next_index += 1
            elif full:
                return
            else:
                heapreplace(smallest_first, (size + 1, index))
                self._sizes[index] += 1
                self._spare -= 1
            self._joined = True

    def _merge(self, index: int) -> None:
        """Give a pipeline up: its nodes go to others below n0, or all to the smallest, or wherever there is room."""
        freed = self._sizes.pop(index)
        self._merged = self._merged or freed > 0
        while freed:
            needy = [i for i, size in self._sizes.items() if size < self._n0]
            if needy:
                self._sizes[max(needy, key=self._sizes.__getitem__)] += 1
                freed -= 1
                continue
            smallest = min(self._sizes, key=self._sizes.__getitem__)
            taken = min(freed, self._largest - self._sizes[smallest])
            if not taken:
                self._spare += freed
                return
            self._sizes[smallest] += taken
            freed -= taken
