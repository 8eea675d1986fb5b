"""Sets of bytes of a layer's canonical buffer: what a worker holds of it, lacks, sends, sums or saves.

The canonical buffer is the one that the layer's state has on a single device. The unit is the byte: profiles, copies
and files count bytes, and an element number would say nothing of the parts of a buffer, whose elements may differ in
size. Whoever makes intervals cuts between elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise

import numpy as np

from resilient.templates.common.arrays import Flags, Ints


@dataclass(frozen=True, slots=True)
class ByteIntervals:
    """Bytes ``start .. end - 1`` of each of some intervals, which neither overlap nor touch.

    Args:
        bounds: ``(start, end, start, end, ...)``, ascending.

    Raises:
        ValueError: They are not ascending, or not pairs.
    """

    bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ascending = all(before < after for before, after in pairwise((-1, *self.bounds)))
        if not ascending or len(self.bounds) % 2:
            raise ValueError(
                f"bounds of intervals must be ascending pairs >= 0, got {self.bounds}; merge those that touch"
            )

    @classmethod
    def of(cls, start: int, end: int) -> ByteIntervals:
        """Return the single interval ``start .. end - 1``; nothing where it is empty."""
        return cls((start, end)) if start < end else NO_BYTES

    @property
    def size(self) -> int:
        """How many bytes they have."""
        if len(self.bounds) == 2:  # mostly, and often asked
            return self.bounds[1] - self.bounds[0]
        return sum(self.bounds[1::2]) - sum(self.bounds[::2])

    def before(self, byte: int) -> int:
        """Return how many of the bytes come before ``byte``."""
        return sum(min(end, byte) - start for start, end in self if start < byte)

    def positions(self, other: ByteIntervals) -> ByteIntervals:
        """Return where the bytes of another set are in a buffer that has those of this one, one after the other."""
        return merged((self.before(start), self.before(end)) for start, end in other)

    def first(self, num_bytes: int) -> ByteIntervals:
        """Return the first so many bytes."""
        return merged((start, min(end, start + num_bytes - self.before(start))) for start, end in self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each interval."""
        return zip(self.bounds[::2], self.bounds[1::2], strict=True)

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def __or__(self, other: ByteIntervals) -> ByteIntervals:
        if self is other or not other.bounds or self.bounds == other.bounds:  # often asked: no call of another method
            return self
        if not self:
            return other
        bounds, (ours, theirs) = _cells((self, other))
        return _where(bounds, ours | theirs)

    def __and__(self, other: ByteIntervals) -> ByteIntervals:
        if self is other or not self.bounds or self.bounds == other.bounds:
            return self
        bounds, (ours, theirs) = _cells((self, other))
        return _where(bounds, ours & theirs)

    def __sub__(self, other: ByteIntervals) -> ByteIntervals:
        if self is other or self.bounds == other.bounds:
            return NO_BYTES
        if not other.bounds:
            return self
        bounds, (ours, theirs) = _cells((self, other))
        return _where(bounds, ours & ~theirs)


NO_BYTES = ByteIntervals()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a state that are all held by the same.

    Args:
        holders: Their ranks, ascending.
        intervals: The bytes.
    """

    holders: tuple[int, ...]
    intervals: ByteIntervals


def common_pieces(holders: Mapping[int, ByteIntervals]) -> tuple[Piece, ...]:
    """Cut a state such that each piece is held whole or not at all by everybody.

    There is one piece for each set of holders that occurs, by their first bytes: the same list for whoever asks. A
    state without bytes is one piece of all who have it.

    Args:
        holders: By rank, what it holds of the state.
    """
    whole = next(iter(holders.values()), NO_BYTES)
    if all(intervals is whole for intervals in holders.values()):  # mostly they are
        return (Piece(tuple(sorted(holders)), whole),) if holders else ()
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(holders):
        ranks_of.setdefault(holders[rank].bounds, []).append(rank)
    if len(ranks_of) == 1:
        return (Piece(tuple(sorted(holders)), whole),)
    bounds, inside = _cells([holders[ranks[0]] for ranks in ranks_of.values()])
    patterns, which = np.unique(inside, axis=1, return_inverse=True)
    pieces: list[Piece] = []
    for index, pattern in enumerate(patterns.T):
        if pattern.any():
            ranks = chain.from_iterable(compress(ranks_of.values(), pattern))
            pieces.append(Piece(tuple(sorted(ranks)), _where(bounds, which.ravel() == index)))
    return tuple(sorted(pieces, key=lambda piece: piece.intervals.bounds))


def redundancy(holders: Mapping[int, ByteIntervals], whole: ByteIntervals, place_of: Mapping[int, int]) -> int:
    """Return in how many places the byte of a state is that is in the fewest.

    Args:
        holders: By rank, what it holds of the state.
        whole: All that there is of it, at least a byte.
        place_of: By rank, the node it is on, or the failure domain.
    """
    pieces = common_pieces(holders)
    if sum(piece.intervals.size for piece in pieces) < whole.size:
        return 0
    return min(len({place_of[rank] for rank in piece.holders}) for piece in pieces)


def merged(intervals: Iterable[tuple[int, int]]) -> ByteIntervals:
    """Return ascending intervals, of which some are empty or touch, as a set."""
    bounds: list[int] = []
    for start, end in intervals:
        if start < end and bounds and bounds[-1] == start:
            bounds[-1] = end
        elif start < end:
            bounds += start, end
    return ByteIntervals(tuple(bounds))


def _cells(sets: Sequence[ByteIntervals]) -> tuple[Ints, Flags]:
    """Return where a cell begins, between all bounds, and which sets have it. [cells], [sets, cells]"""
    bounds = np.unique(np.concatenate([np.array(each.bounds, dtype=np.int64) for each in sets]))
    # Inside a set is who has passed an odd number of its bounds.
    inside = [np.searchsorted(each.bounds, bounds, side="right") % 2 == 1 for each in sets]
    return bounds, np.stack(inside)


def _where(bounds: Ints, chosen: Flags) -> ByteIntervals:
    """Return the chosen cells, neighbours as one; the last cell begins after all sets and is never chosen."""
    changes = np.flatnonzero(np.diff(chosen, prepend=False))
    return ByteIntervals(tuple(bounds[changes].tolist()))
