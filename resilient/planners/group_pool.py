"""Which process groups to keep: creating one takes long and memory, and the same ones come back from step to step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from resilient.planners.samples import Ints

Members = tuple[int, ...]
"""Ranks, ascending."""


@dataclass(frozen=True, kw_only=True)
class PoolChange:
    """What every rank does before a step: first drop, then create, in these orders."""

    drop: tuple[Members, ...]
    create: tuple[Members, ...]


class GroupPool:
    """Decides which process groups exist; the caller creates and destroys them.

    Every rank keeps a pool of its own and asks it the same questions in the same order, for groups that it is not in
    as well: creating a group is collective, and so all ranks create and drop the same ones in the same order.

    Args:
        capacity: Groups that exist at a time. A step that needs more has them, and drops them afterwards.

    Source: DHP, group pool.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}; allow as many groups as a step has")
        self.capacity = capacity
        self._groups: OrderedDict[Members, None] = OrderedDict()

    @property
    def groups(self) -> tuple[Members, ...]:
        """Those that exist, least recently used first."""
        return tuple(self._groups)

    def need(self, groups: Iterable[Iterable[int]]) -> PoolChange:
        """Return what to change so that these groups exist. Groups of one rank need none.

        Args:
            groups: Of one step: the ranks of each, in any order.
        """
        wanted = sorted({members for ranks in groups if len(members := tuple(sorted(set(ranks)))) > 1})
        create = [members for members in wanted if members not in self._groups]
        for members in wanted:
            self._groups[members] = None
            self._groups.move_to_end(members)
        drop: list[Members] = []
        while len(self._groups) > max(self.capacity, len(wanted)):
            drop.append(self._groups.popitem(last=False)[0])
        return PoolChange(drop=tuple(drop), create=tuple(create))


def members(degrees: Ints) -> tuple[Members, ...]:
    """Return the ranks, within its replica, of each group of a microbatch."""
    ends = degrees.cumsum().tolist()
    return tuple(tuple(range(first, end)) for first, end in zip((0, *ends), ends, strict=False))
