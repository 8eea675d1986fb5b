"""Changing only the pipelines that a loss or a join concerns: how many nodes each of them has afterwards.

Nodes without a place first replace lost ones. A pipeline that is still short of nodes goes on with those it has left
(*simple*); one with fewer than n0 *borrows* from those that have more, or *merges*: it is given up, and its nodes go to
another. Merging is possible whenever nobody can lend and more than f + 1 pipelines are left: the others have n0 nodes
each, and n0 - k nodes more make 2 n0 - k, which is a template size because f + 1 pipelines stay.

Source: Oobleck (SOSP'23), section 5.
"""

from __future__ import annotations

from copy import copy
from typing import Literal, NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints

RepairKind = Literal["keep", "join", "simple", "borrow", "merge"]

NEW = -1
"""Continues no pipeline."""


class Repair(NamedTuple):
    """The pipelines after a change.

    Args:
        kind: The furthest-reaching thing that is done, in the order of the type.
        continues: Of each the index of the pipeline that it continues, :data:`NEW` for a new one.
        sizes: Of each its number of nodes.
    """

    kind: RepairKind
    continues: Ints
    sizes: Ints


def repairs(
    left: Ints,
    wanted: Ints,
    spare: int,
    sizes: range,
    *,
    min_pipelines: int,
    max_pipelines: int,
    may_stand_by: bool = False,
) -> list[Repair]:
    """Return the different ways to go on that change only the pipelines concerned; none where that is not enough.

    They differ in whether pipelines with too few nodes borrow while others can lend, or are given up while there are
    enough pipelines; and in whether nodes that are left over extend the smallest pipelines, make new ones, or stand by.

    Args:
        left: Of each pipeline of the plan before, the nodes that are still there.
        wanted: Of each the nodes that it had.
        spare: Nodes without a place.
        sizes: The template sizes; the first is n0.
        min_pipelines: f + 1.
        max_pipelines: One per microbatch.
        may_stand_by: Whether nodes that are left over may stand by where there is a place for them.
    """
    found: dict[tuple[bytes, bytes], Repair] = {}
    replaced = _Change(left, wanted, spare, sizes, min_pipelines, max_pipelines)
    replaced.replace_lost()
    for giving_up in (False, True) if replaced.lacks_nodes else (False,):
        viable = copy(replaced)  # from here on nothing is changed in place
        if not viable.make_viable(giving_up):
            continue
        ways = (False, True, None) if may_stand_by else (False, True)
        for adding in ways if viable.has_spare else (None,):
            change = copy(viable)
            if adding is not None:
                change.use_spare(adding)
            repair = change.repair
            found.setdefault((repair.continues.tobytes(), repair.sizes.tobytes()), repair)
    return list(found.values())


class _Change:
    def __init__(
        self, left: Ints, wanted: Ints, spare: int, sizes: range, min_pipelines: int, max_pipelines: int
    ) -> None:
        # Of each pipeline its index in the plan and its nodes; new ones follow, and those that are given up are gone.
        self._index: Ints = np.arange(len(left))
        self._size, self._wanted, self._spare = left.copy(), wanted, spare
        self._n0, self._largest = sizes[0], sizes[-1]
        self._min_pipelines, self._max_pipelines = min_pipelines, max_pipelines
        self._joined = self._borrowed = self._merged = False

    @property
    def kind(self) -> RepairKind:
        if self._merged:
            return "merge"
        if self._borrowed:
            return "borrow"
        now = np.zeros_like(self._wanted)
        old = self._index < len(now)
        now[self._index[old]] = self._size[old]
        if (now < self._wanted).any():
            return "simple"
        return "join" if self._joined else "keep"

    @property
    def lacks_nodes(self) -> bool:
        """Whether a pipeline has too few."""
        return bool(self._size.min() < self._n0)

    @property
    def has_spare(self) -> bool:
        """Whether nodes are left over."""
        return self._spare > 0

    @property
    def repair(self) -> Repair:
        """What has become of the pipelines."""
        return Repair(self.kind, np.where(self._index < len(self._wanted), self._index, NEW), self._size)

    def replace_lost(self) -> None:
        """Fill up: first pipelines that get to n0 by it, then those that lack least."""
        lacks = self._wanted - self._size
        short = np.flatnonzero(lacks > 0)
        short = short[np.argsort(lacks[short], kind="stable")]
        small = short[self._size[short] < self._n0]
        each = zip(small.tolist(), self._size[small].tolist(), self._wanted[small].tolist(), strict=True)
        for index, size, wanted in each:
            if not self._spare:
                break
            if size + self._spare >= self._n0:
                self._extend(index, min(self._n0, wanted) - size)
        lacks = self._wanted[short] - self._size[short]
        order = np.lexsort((short, lacks))
        short, lacks = short[order], lacks[order]
        given = np.clip(self._spare - (lacks.cumsum() - lacks), 0, lacks)
        self._size[short] += given
        self._spare -= int(given.sum())
        self._joined = self._joined or bool(given.any())

    def _extend(self, position: int, by: int) -> None:
        self._size[position] += by
        self._spare -= by
        self._joined = self._joined or by > 0

    def make_viable(self, giving_up: bool) -> bool:
        """Borrow and merge until every pipeline has n0 nodes; return whether that is possible."""
        # Imported late, as below: it loads numba.
        from resilient.templates.replan.repair_loops import make_viable

        bounds = self._n0, self._largest, self._min_pipelines
        is_possible, self._index, self._size, self._spare, borrowed, merged = make_viable(
            self._index, self._size, self._spare, *bounds, giving_up
        )
        self._borrowed, self._merged = self._borrowed or borrowed, self._merged or merged
        return is_possible

    def use_spare(self, adding: bool) -> None:
        """Make new pipelines as large as the smallest, or extend the smallest; what fits nowhere is left out."""
        from resilient.templates.replan.repair_loops import use_spare

        before, next_index = self._spare, max(len(self._wanted), int(self._index[-1])) + 1
        bounds = self._n0, self._largest, self._max_pipelines
        self._index, self._size, self._spare = use_spare(self._index, self._size, before, *bounds, next_index, adding)
        self._joined = self._joined or self._spare < before
