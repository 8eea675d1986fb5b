"""Who sends which bytes of which layer state to whom.

Ranks of the plan come first; those after them have no place in it and only send: workers of nodes that leave or stand
by.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, chain

import msgspec

from resilient.errors import ArgumentError
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, common_pieces
from resilient.templates.plan import Holdings, Plan, PlanningProblem

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
    missing: list[_Missing] = []
    lost: list[str] = []
    for state, targets in needed.items():
        holders = held.get(state, {})
        lacking = [
            (rank, lack) for rank, intervals in targets.items() if (lack := intervals - holders.get(rank, NO_BYTES))
        ]
        if not lacking:
            continue
        pieces = [(piece.intervals, _Senders(piece.holders)) for piece in common_pieces(holders)]
        wants = [
            _Missing(state, rank, part, part.size, senders)
            for rank, intervals in lacking
            for piece, senders in pieces
            if (part := intervals & piece)
        ]
        for want in wants:
            want.senders.num_wanting += 1
        if sum([want.size for want in wants]) < sum([intervals.size for _, intervals in lacking]):
            lost.append(state)
        else:
            missing += wants
    return tuple(_from_few(missing) or _from_many(missing)), tuple(lost)


def _from_few(missing: Sequence[_Missing]) -> list[Transfer]:
    """Have each rank receive from few others, if none of these has half as much to send as some rank has to receive.

    Returns:
        The transfers, or none: links of senders may be the limit.
    """
    to_receive = Counter[int]()
    for want in missing:
        to_receive[want.target] += want.size
    most_to_send = max(to_receive.values(), default=0) / 2
    senders = {id(want.senders): want.senders for want in missing}.values()
    num_senders = len(set[int]().union(*[each.ranks for each in senders]))
    if to_receive.total() > most_to_send * num_senders:
        return []
    num_pieces = _num_pieces(missing)
    transfers, load = _assign(missing, lambda want: -(-_FEW_SENDERS // num_pieces[want.target]))
    if max(load.values(), default=0) <= most_to_send:
        return transfers
    for each in senders:
        each.forget()
    return []


def _from_many(missing: Sequence[_Missing]) -> list[Transfer]:
    """Even out what senders have to send."""
    num_pieces = _num_pieces(missing)

    def most(want: _Missing) -> int:
        even = _EVEN_SHARES * len(want.senders.loads) // want.senders.num_wanting
        return min(_MAX_SENDERS, max(even, -(-_FEW_SENDERS // num_pieces[want.target])))

    return _assign(missing, most)[0]


def _num_pieces(missing: Sequence[_Missing]) -> Mapping[int, int]:
    """Return how many pieces each rank lacks."""
    return Counter([want.target for want in missing])


def _assign(missing: Sequence[_Missing], most: Callable[[_Missing], int]) -> tuple[list[Transfer], Mapping[int, int]]:
    """Choose who sends what is missing, each piece from at most so many; return the transfers, and senders' bytes."""
    load: dict[int, int] = defaultdict(int)
    transfers: dict[tuple[str, int], list[Transfer]] = {(want.state, want.target): [] for want in missing}
    # Those with the least choice of senders first, then the largest: what is left evens the loads out.
    for want in sorted(missing, key=lambda want: (len(want.senders.loads), -want.size)):
        transfers[want.state, want.target] += _split(want, load, most(want))
    ordered = (sorted(parts, key=lambda transfer: transfer.first_byte) for parts in transfers.values())
    return list(chain.from_iterable(ordered)), load


class _Senders:
    """Who all has a piece, by rank; their loads at some time, as a heap; and how many ranks want bytes of it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.num_wanting = 0
        self.forget()

    def forget(self) -> None:
        """Take back all loads."""
        self.loads = [(0, rank) for rank in self.ranks]


@dataclass(frozen=True, slots=True)
class _Missing:
    """Bytes of a state that a rank lacks, and who all has them."""

    state: str
    target: int
    part: ByteIntervals
    size: int
    senders: _Senders


def _take_least_loaded(senders: list[tuple[int, int]], load: dict[int, int], count: int) -> list[tuple[int, int]]:
    """Take the least loaded ranks from a heap, in which a rank's load may have grown since; return loads and ranks."""
    found: list[tuple[int, int]] = []
    while senders and len(found) < count:
        known, rank = senders[0]
        now = load[rank]
        if known < now:  # it has sent something else in the meantime
            heapreplace(senders, (now, rank))
        else:
            found.append(heappop(senders))
    return found


def _split(want: _Missing, load: dict[int, int], most: int) -> list[Transfer]:
    """Split bytes over some least loaded holders such that their loads become as equal as can be, and add to them."""
    left, senders, state, target = want.size, want.senders.loads, want.state, want.target
    sources = _take_least_loaded(senders, load, min(most, -(-left // _MAX_WHOLE_BYTES)))
    level, last = _fill_level([loaded for loaded, _ in sources], left), sources[-1][1]
    intervals = iter(want.part)
    start = end = 0
    transfers: list[Transfer] = []
    for loaded, source in sources:
        to_send = left
        if source != last:
            share = -((loaded - level) // _PAGE_BYTES) * _PAGE_BYTES
            to_send = 0 if share < 0 else share if share < left else left
        left -= to_send
        load[source] = loaded + to_send
        heappush(senders, (loaded + to_send, source))
        while to_send:
            if start == end:
                start, end = next(intervals)
            cut = start + to_send
            if cut > end:
                cut = end
            transfers.append(Transfer(state=state, source=source, target=target, first_byte=start, end_byte=cut))
            to_send -= cut - start
            start = cut
    return transfers


def _fill_level(loads: Sequence[int], amount: int) -> int:
    """Return the level, rounded up, that the lowest of ``loads`` (ascending) reach when ``amount`` is poured in."""
    return min([-(-(amount + total) // count) for count, total in enumerate(accumulate(loads), start=1)])


def _check_held(problem: PlanningProblem, num_ranks: int, held: Holdings) -> None:
    names = {layer.name for layer in problem.profile.layers}
    for state, ranks in held.items():
        if state not in names:
            raise ArgumentError("held", "name layers of the profile", repr(state), "use the same profile everywhere")
        if not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(
                f"holders of {state!r} must be ranks 0 to {num_ranks - 1} (the new plan's, then sources), "
                f"got {list(ranks)}; leave out workers that take no part"
            )
