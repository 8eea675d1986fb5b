"""Who sends which bytes of which layer state to whom.

Ranks of the plan come first; those after them have no place in it and only send: workers of nodes that leave or stand
by.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, Piece, common_pieces
from resilient.templates.plan import Holdings, Plan, PlanningProblem

if TYPE_CHECKING:  # it loads numba, and most processes that import the planner never copy anything
    from resilient.templates.replan.senders import Wants

# Up to this many bytes a state comes from one holder; larger ones are split over several, at page boundaries.
_MAX_WHOLE_BYTES = 4 * 2**20
_MAX_SENDERS = 16
"""Of a piece, to one rank: more do not make its own link faster, and every worker is told of each copy of its own."""
_FEW_SENDERS = 8
"""To one rank, of all that it lacks: one connection alone may not fill its link."""
_EVEN_SHARES = 8
"""Where each sender of a piece has a share in as many copies of it, loads are within a tenth of even, mostly 5 %."""
_PAGE_BYTES = 4096


class Transfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # made by the ten thousands at once
    """Bytes ``first_byte .. end_byte - 1`` of a state's canonical buffer go from one rank to another."""

    state: str
    source: int
    target: int
    first_byte: int
    end_byte: int


def plan_transfers(
    problem: PlanningProblem, plan: Plan, held: Holdings, num_sources: int = 0
) -> tuple[tuple[Transfer, ...], tuple[str, ...]]:
    """Plan the copies that bring every rank of a plan to the states it needs.

    Args:
        problem: The job.
        plan: The plan to bring about.
        held: What ranks hold at the agreed version, whether or not the plan places it there.
        num_sources: Ranks after those of the plan: they send, and receive nothing.

    Returns:
        As :func:`transfers_between`.

    Raises:
        ValueError: ``held`` names a state or rank that does not exist.
    """
    _check_held(problem, len(plan.slots) + num_sources, held)
    return transfers_between(plan.holders(problem.profile), held)


def transfers_between(needed: Holdings, held: Holdings) -> tuple[tuple[Transfer, ...], tuple[str, ...]]:
    """Plan the copies that bring every rank what it needs and does not hold.

    All ranks walk the list in order and start a non-blocking send or receive, tagged with its position, for each entry
    of theirs before they wait for any: no order of arrival can then block.

    Args:
        needed: Ranks, and what they are to hold, in the order of the states and ranks of the result.
        held: What ranks hold; of equally loaded holders the lowest sends.

    Returns:
        The transfers, by state, target and first byte, each of bytes that lie together here and there; and the states
        of which some rank needs a byte that none holds. There are no transfers of those: they must come from a
        checkpoint. States without bytes need neither.
    """
    missing, lost = _Missing(), list[str]()
    for state, targets in needed.items():
        holders = held.get(state, {})
        lacking = [
            (rank, lack)
            for rank, intervals in targets.items()
            if (has := holders.get(rank, NO_BYTES)) is not intervals and (lack := intervals - has)  # mostly it is
        ]
        if lacking and not missing.take(state, lacking, common_pieces(holders)):
            lost.append(state)
    return missing.copies(), tuple(lost)


class _Missing:
    """What ranks lack of states, each want a piece that the same ranks hold."""

    def __init__(self) -> None:
        self._lacking: list[tuple[str, int]] = []  # state and rank
        self._lacks: list[int] = []  # of each want, its place among these
        self._parts: list[ByteIntervals] = []
        self._sizes: list[int] = []
        self._pieces: list[int] = []  # of each want, who holds it
        self._holders: list[tuple[int, ...]] = []

    def take(self, state: str, lacking: Sequence[tuple[int, ByteIntervals]], pieces: Sequence[Piece]) -> bool:
        """Take in what ranks lack of a state; return False, and take in nothing, if none holds some of the bytes.

        Args:
            state: Its name.
            lacking: The ranks, and which bytes each lacks.
            pieces: What others hold of it.
        """
        numbered = [(number, piece.intervals) for number, piece in enumerate(pieces, start=len(self._holders))]
        wants = [
            (lack, part, number)
            for lack, (_, intervals) in enumerate(lacking, start=len(self._lacking))
            for number, piece in numbered
            if (part := intervals & piece)
        ]
        sizes = [part.size for _, part, _ in wants]
        if sum(sizes) < sum([intervals.size for _, intervals in lacking]):
            return False
        if wants:
            lacks, parts, numbers = zip(*wants, strict=True)
            self._lacks += lacks
            self._parts += parts
            self._pieces += numbers
        self._sizes += sizes
        self._lacking += [(state, rank) for rank, _ in lacking]
        self._holders += [piece.holders for piece in pieces]
        return True

    def copies(self) -> tuple[Transfer, ...]:
        """Choose who sends what, and return the copies in order."""
        if not self._lacks:
            return ()
        lacks = np.array(self._lacks)
        cuts = self._cuts(np.array([rank for _, rank in self._lacking])[lacks])
        cuts[:, 0] = lacks[cuts[:, 0]]
        in_order = cuts[np.lexsort((cuts[:, 2], cuts[:, 0]))].tolist()
        lacking = self._lacking
        return tuple(
            [
                Transfer(state=lacking[lack][0], source=source, target=lacking[lack][1], first_byte=start, end_byte=end)
                for lack, source, start, end in in_order
            ]
        )

    def _cuts(self, targets: Ints) -> Ints:
        """Return want, sender, first and end byte of each copy, given the rank that has each want.

        Each rank receives from few others, if none of these has half as much to send as some rank has to receive.
        Otherwise links of senders may be the limit, and what they have to send is evened out.
        """
        wants = self._wants()
        num_holders, num_wanting = np.diff(wants.first_holders), np.bincount(wants.pieces, minlength=len(self._holders))
        to_receive = np.zeros(targets.max() + 1, dtype=np.int64)
        np.add.at(to_receive, targets, wants.sizes)
        num_senders = len(np.unique(wants.ranks[np.repeat(num_wanting > 0, num_holders)]))
        # Those with the least choice of senders first, then the largest: what is left evens the loads out.
        order = np.lexsort((-wants.sizes, num_holders[wants.pieces]))
        most = -(-_FEW_SENDERS // np.bincount(targets)[targets])
        if 2 * to_receive.sum() <= to_receive.max() * num_senders:
            cuts, loads = _chosen(wants, order, most)
            if 2 * loads.max() <= to_receive.max():
                return cuts
        even = _EVEN_SHARES * num_holders[wants.pieces] // num_wanting[wants.pieces]
        return _chosen(wants, order, np.minimum(_MAX_SENDERS, np.maximum(even, most)))[0]

    def _wants(self) -> Wants:
        from resilient.templates.replan.senders import Wants

        return Wants(
            sizes=np.array(self._sizes),
            pieces=np.array(self._pieces),
            firsts=np.cumsum([0, *[len(part.bounds) for part in self._parts]]),
            bounds=np.fromiter(chain.from_iterable([part.bounds for part in self._parts]), np.int64),
            first_holders=np.cumsum([0, *map(len, self._holders)]),
            ranks=np.fromiter(chain.from_iterable(self._holders), np.int64),
        )


def _chosen(wants: Wants, order: Ints, most: Ints) -> tuple[Ints, Ints]:
    """Choose who sends, to each want at most so many; return the copies, and what each rank has to send."""
    from resilient.templates.replan.senders import choose_senders

    cuts = np.empty((int(np.minimum(most, -(-wants.sizes // _MAX_WHOLE_BYTES)).sum()) + len(wants.bounds) // 2, 4), int)
    loads = np.zeros(wants.ranks.max() + 1, dtype=np.int64)
    num_cuts = choose_senders(wants, order, most, loads, cuts, _PAGE_BYTES, _MAX_WHOLE_BYTES)
    return cuts[:num_cuts], loads


def _check_held(problem: PlanningProblem, num_ranks: int, held: Holdings) -> None:
    names = {layer.name for layer in problem.profile.layers}
    for state, ranks in held.items():
        if state not in names:
            raise ArgumentError("held", "name layers of the profile", repr(state), "use the same profile everywhere")
        if ranks and not 0 <= min(ranks) <= max(ranks) < num_ranks:
            raise ValueError(
                f"holders of {state!r} must be ranks 0 to {num_ranks - 1} (the new plan's, then sources), "
                f"got {list(ranks)}; leave out workers that take no part"
            )
