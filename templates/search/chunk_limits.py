"""Cuts with several stages in each row under limits on the rows: the least limit for which one is found.

Two chunks that follow each other are cut anew together, as long as that helps, each two in turn: with two chunks the
best of all is found, where every layer is tried as the second one's first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.search.stage_cost_model import UNLIMITED, SingleDeviceCosts

if TYPE_CHECKING:
    from resilient.templates.search.chunk_rows import Room, StageTables

ChunkTable = Ints

TIME, MEMORY = 0, 1
"""What there is a limit on."""

_CLOSE = 1000
"""A limit is not lowered where that would be by less than one part of so many."""

_SHORT = 100
"""Layers up to which limits are halved also where several pairs are lowered in turn: looks take no time."""

_STEPS = 1_000_000
"""Of loops, in which a limit is tried; takes about 5 ms. Of long models not every layer is tried as a chunk's first."""

_FAR = np.unique(np.int64(2) ** np.arange(10) * np.array([[2], [3]]))
"""How far from the nearest layer others are tried, where memory is tight."""


def bytes_at_moments(costs: SingleDeviceCosts, counts: Ints, stage_at: Ints, bounds: ChunkTable) -> tuple[Ints, Ints]:
    """Return what rows hold of each of their stages, with activations kept and with checkpoints.

    Args:
        costs: Of stages.
        counts: Of microbatches, as of :class:`ChunkCuts`.
        stage_at: The stages of chunks and rows. [chunks, rows]
        bounds: Cuts. [..., stages + 1]

    Returns:
        Bytes at each moment, ``[..., chunks, rows, moments, 2]``, and those that a stage uses besides while it runs,
        ``[..., chunks, rows, 2]``: of a row's stages one does at a time.
    """
    first, end = bounds[..., stage_at], bounds[..., stage_at + 1]
    held = costs.held[first, end][..., None] - passed_within(costs, counts, stage_at, bounds)
    plain, again = (
        held + counts[..., 0] * kept[first, end][..., None] + counts[..., 1] * waiting[first, end][..., None]
        for kept, waiting in ((costs.kept, costs.waiting), (costs.inputs, costs.waiting_inputs))
    )
    once = np.stack([costs.workspace[first, end], costs.largest[first, end]], axis=-1)
    return np.stack([plain, again], axis=-1), once


def passed_within(costs: SingleDeviceCosts, counts: Ints, stage_at: Ints, bounds: ChunkTable) -> Ints:
    """Return what tables of stages have that rows do not hold, as they hand on to themselves.

    The later stage keeps what the earlier one hands on, and nothing comes in or goes back; it need not keep it any more
    of microbatches between the parts of their backward through the earlier one. Under zb-v the last row does so, where
    the way turns back. Arguments as of :func:`bytes_at_moments`. [..., chunks, rows, moments]
    """
    within = np.zeros((*bounds.shape[:-1], *counts.shape[:-1]), dtype=np.int64)
    for chunk, row in zip(*np.nonzero(np.diff(stage_at, axis=0) == 1), strict=True):
        passed = costs.within[bounds[..., stage_at[chunk + 1, row]]]
        within[..., chunk, row, :] = passed[..., 1, None] * counts[chunk, row, :, 0]
        within[..., chunk + 1, row, :] += passed[..., 0, None]
    return within


def row_bytes(held: Ints, once: Ints) -> Ints:
    """Return what rows hold at most, by what they do of their stages (:func:`bytes_at_moments`). [..., rows, 2]"""
    return held.sum(axis=-4).max(axis=-2) + once.max(axis=-3)


class ChunkCuts:
    """Cuts of a number of rows.

    Args:
        costs: Of stages.
        tables: What stages take.
        counts: Microbatches that the rows keep of each chunk at each of some moments: those whose backward, or the
            first part of it, is not over, and those that wait between the parts. [chunks, rows, moments, 2]
        stage_at: The stages of chunks and rows. [chunks, rows]
        row_of: The row of each stage. [stages]
        source: Where the messages before each stage come from, as the first dimension of the costs' ``send``. [stages]

    Attributes:
        is_short: Whether the model has so few layers that looks at limits take no time.
        leads_back: Whether the second chunk leads back up the rows.
    """

    def __init__(
        self,
        costs: SingleDeviceCosts,
        tables: StageTables,
        counts: Ints,
        stage_at: Ints,
        row_of: Ints,
        source: Ints,
    ) -> None:
        self.costs = costs
        self.counts, self.stage_at, self.row_of, self.source = counts, stage_at, row_of, source
        self.num_chunks, self.num_rows = stage_at.shape
        self.is_short = len(costs.work) <= _SHORT
        self._tables = tables
        self.leads_back = self.num_chunks == 2 and int(self.stage_at[1, 0]) == len(row_of) - 1

    def best(self, bounds: ChunkTable, limit: int | None, first_end: int = UNLIMITED, fastest: int = 0) -> ChunkTable:
        """Return the cut with the fastest slowest row that is found from one to begin with.

        One that does not fit into memory, where none that does is found.

        Args:
            bounds: The cut to begin with. [stages + 1]
            limit: Bytes of a row; None for no limit.
            first_end: Where the first stage ends at the latest.
            fastest: Nanoseconds of the slowest row where that stage may end anywhere: less is not looked for.
        """
        memory = UNLIMITED if limit is None else limit
        if first_end < bounds[1]:
            bounds = bounds.copy()
            second = int(np.flatnonzero(self.row_of == 0)[1])  # takes what the row's first stage does not
            bounds[1 : second + 1] -= bounds[1] - first_end
        is_tight = not self.fits(bounds, limit)
        cut = _Limited(self, memory, first_end, is_tight=is_tight)
        if is_tight:
            bounds = cut.lowered(bounds, MEMORY, memory)
            if not self.fits(bounds, limit):
                return bounds
        messages = self.costs.send.min(axis=1)[self.source].sum()
        even = -(-int(self.costs.work[-1] + messages) // self.num_rows)
        return cut.evened(cut.lowered(bounds, TIME, max(even, fastest)))

    def fits(self, bounds: ChunkTable, limit: int | None) -> bool:
        """Return whether memory holds all rows of a cut."""
        return limit is None or self.most(bounds, MEMORY, UNLIMITED) <= limit

    def rank(self, bounds: ChunkTable, limit: int | None) -> int:
        """Return how slow a cut is; one that does not fit into memory is slower than all that do."""
        memory = UNLIMITED if limit is None else limit
        lacking = max(0, self.most(bounds, MEMORY, UNLIMITED) - memory)
        return UNLIMITED + lacking if lacking else self.most(bounds, TIME, memory)

    def most(self, bounds: ChunkTable, of: int, memory: int) -> int:
        """Return the time (bytes) of the slowest (fullest) row, the bytes with checkpoints where that is less.

        Args:
            bounds: The cut. [stages + 1]
            of: ``TIME`` or ``MEMORY``.
            memory: Bytes of a row, which decide whether it checkpoints.
        """
        if of == MEMORY:
            return int(self._bytes(bounds).min(axis=1).max())
        times = self._times(bounds)[self.stage_at].sum(axis=0)
        if memory >= UNLIMITED:
            return int(times[:, 0].max())
        return int(np.where(self._bytes(bounds)[:, 0] > memory, times[:, 1], times[:, 0]).max())

    def room(self, bounds: ChunkTable, chunks: range, rows: Ints, limits: tuple[int, int, int]) -> Room:
        """Return the rows, in some order, that chunks are cut for.

        Args:
            bounds: Where the others are cut. [stages + 1]
            chunks: Those that are cut anew.
            rows: The order.
            limits: Time, memory, and the end of the first stage.
        """
        from resilient.templates.search.chunk_rows import Room

        at = self.stage_at[chunks.start : chunks.stop, rows]
        times, (held, once) = self._times(bounds)[self.stage_at], self._held(bounds)
        for of_others in (times, held, once):
            of_others[chunks.start : chunks.stop] = 0
        if len(chunks) == 1:  # tables of a stage do not tell of the one beside it, whose bounds stay
            within = passed_within(self.costs, self.counts, self.stage_at, bounds)
            held[chunks.start] = -within[chunks.start, ..., None]
        own, before = self.counts[chunks.stop - 1], self.counts[chunks.start] * (len(chunks) > 1)
        return Room(
            tables=self._tables,
            source=self.source[at],
            moments=np.concatenate([own, before, held.sum(axis=0)], axis=-1)[rows],
            others=np.concatenate([times.sum(axis=0), once.max(axis=0)], axis=-1)[rows],
            time=limits[0],
            memory=limits[1],
            first_end=limits[2] if chunks.start == 0 else UNLIMITED,
        )

    def _times(self, bounds: ChunkTable) -> Ints:
        """Return time with activations kept and with checkpoints. [stages, 2]"""
        costs, first, end = self.costs, bounds[:-1], bounds[1:]
        plain = costs.work[end] - costs.work[first] + costs.send[self.source, first]
        again = plain + (costs.forward[end] - costs.forward[first]) * (costs.next_backward[first] < end)
        return np.stack([plain, again], axis=-1)

    def _held(self, bounds: ChunkTable) -> tuple[Ints, Ints]:
        return bytes_at_moments(self.costs, self.counts, self.stage_at, bounds)

    def _bytes(self, bounds: ChunkTable) -> Ints:
        """Return what rows hold with activations kept and with checkpoints. [rows, 2]"""
        return row_bytes(*self._held(bounds))


class _Limited:
    """Cuts in which the memory of rows and the first stage's end are limited.

    Args:
        cuts: Of a number of rows.
        memory: Most bytes of a row.
        first_end: Where the first stage ends at the latest.
        is_tight: Whether cuts must be looked for that memory holds, also far from those that are even.
    """

    def __init__(self, cuts: ChunkCuts, memory: int, first_end: int, *, is_tight: bool) -> None:
        self._cuts = cuts
        self._memory = memory
        self._first_end = first_end
        self._is_tight = is_tight

    def lowered(self, bounds: ChunkTable, of: int, floor: int) -> ChunkTable:
        """Return the cut with the least limit that was found, from one to begin with.

        Args:
            bounds: One within the limit of memory, where times are limited. [stages + 1]
            of: ``TIME`` or ``MEMORY``.
            floor: Lower limits are of no use.
        """
        pairs = self._cuts.num_chunks - 1
        if pairs == 1:
            return self._pair_lowered(bounds, 0, of, floor)
        chunk = in_vain = 0
        while in_vain < pairs:  # what a pair was tried for in vain need not be tried again
            found = self._pair_lowered(bounds, chunk, of, floor)
            in_vain = in_vain + 1 if found is bounds else 0
            bounds, chunk = found, (chunk + 1) % pairs
        return bounds

    def _pair_lowered(self, bounds: ChunkTable, chunk: int, of: int, floor: int) -> ChunkTable:
        """Return the same with a chunk and the next one cut anew; the cut itself where none with a lower limit is.

        To find that a limit is too low takes longest, and as long for each layer that is tried as the next chunk's
        first. So the limit is lowered with one of them, and then it is asked which other one helps at all. Of long
        models with two chunks it is only asked for cuts that memory holds.
        """
        cuts, begin = self._cuts, (chunk + 1) * self._cuts.num_rows
        is_tried = np.zeros(len(cuts.costs.work), dtype=np.bool_)
        if of == MEMORY and cuts.num_chunks == 2 and not (cuts.is_short or cuts.leads_back):
            lacking, found = self._under(bounds, chunk, self._middles(bounds, chunk, is_tried), of, floor)
            return bounds if lacking else found
        at = bounds[begin : begin + 1]
        while True:
            bounds = self._lowered_at(bounds, chunk, at, of, floor, slowly=bool(is_tried.any()))
            is_tried[at] = True
            high, middles = cuts.most(bounds, of, self._memory), self._middles(bounds, chunk, is_tried)
            limit = max(floor, high - _least_fall(high))
            if limit >= high or not len(middles):
                return bounds
            lacking, found = self._under(bounds, chunk, middles, of, limit)
            if lacking:
                return bounds
            bounds, at = found, found[begin : begin + 1]
            is_tried[middles[: np.flatnonzero(middles == at)[0]]] = True

    def _middles(self, bounds: ChunkTable, chunk: int, is_tried: Flags) -> Ints:
        """Return the layers to try as the next chunk's first that were not, in order; none where it is free."""
        rows = self._cuts.num_rows
        first, middle, end = (int(bounds[(chunk + of) * rows]) for of in range(3))
        if self._cuts.leads_back:
            return np.empty(0, dtype=np.int64)
        middles = np.arange(first + rows, end - rows + 1)
        middles = middles[np.argsort(np.abs(middles - middle), kind="stable")]
        nearest = middles[: max(3, _STEPS // (end - first) ** 2)]
        if self._is_tight:
            nearest = np.concatenate([middles[np.isin(np.abs(middles - middle), _FAR)][::-1], nearest])
        return nearest[~is_tried[nearest]]

    def _lowered_at(
        self, bounds: ChunkTable, chunk: int, middles: Ints, of: int, floor: int, *, slowly: bool
    ) -> ChunkTable:
        """Return the same where the next chunk begins with one of some layers.

        Args:
            bounds: The cut to begin with, as ``of`` and ``floor`` those of :meth:`lowered`. [stages + 1]
            chunk: The first one of the pair.
            middles: The layers, in the order in which they are tried.
            of: ``TIME`` or ``MEMORY``.
            floor: Lower limits are of no use.
            slowly: Whether to ask first for the least that counts as lower.
        """
        low, high = floor - 1, self._cuts.most(bounds, of, self._memory)
        # Of several pairs each is lowered again and again, so that times only fall, ever faster, until one is too low.
        falls = slowly or (of == TIME and self._cuts.num_chunks > 2 and not self._cuts.is_short)
        fall = _least_fall(high)
        limit = max(floor, high - fall) if falls else floor
        while low < limit < high:
            lacking, found = self._under(bounds, chunk, middles, of, limit)
            if lacking:
                low = lacking - 1 if of == TIME else limit
            else:
                bounds = found
                high = self._cuts.most(bounds, of, self._memory)
            if high - low <= high // _CLOSE:
                break
            limit = (low + high) // 2
            if falls:
                fall *= 2
                limit = max(limit, high - fall)
        return bounds

    def evened(self, bounds: ChunkTable) -> ChunkTable:
        """Return the cut with stages and rows as even as their chunks can make them, none slower than the slowest."""
        from resilient.templates.search.chunk_cuts import even_chunk

        cuts, seen = self._cuts, set[bytes]()
        limits = cuts.most(bounds, TIME, self._memory), self._memory, self._first_end
        # Of cuts that are as even as each other, as many are of equal layers, one may lead to the next in a circle.
        while bounds.tobytes() not in seen:
            seen.add(bounds.tobytes())
            bounds = bounds.copy()
            for chunk in range(cuts.num_chunks):
                first, end = chunk * cuts.num_rows, (chunk + 1) * cuts.num_rows
                room = cuts.room(bounds, range(chunk, chunk + 1), cuts.row_of[first:end], limits)
                even_chunk(cuts.costs, room, int(bounds[first]), int(bounds[end]), bounds[first + 1 : end + 1])
        return bounds

    def _under(self, bounds: ChunkTable, chunk: int, middles: Ints, of: int, limit: int) -> tuple[int, ChunkTable]:
        """Return a cut within a limit on time or memory in which a chunk and the next one are cut anew.

        Before it 0, or where none is found the least time under which more can be tried.
        """
        from resilient.templates.search.chunk_cuts import cut_pair, cut_there_and_back

        cuts, rows = self._cuts, self._cuts.num_rows
        limits = (limit, self._memory, self._first_end) if of == TIME else (UNLIMITED, limit, self._first_end)
        room = cuts.room(bounds, range(chunk, chunk + 2), np.arange(rows), limits)
        ends, found = np.empty((2, rows), dtype=np.int64), bounds.copy()
        if cuts.leads_back:
            lacking = cut_there_and_back(cuts.costs, room, ends)
        else:
            first, end = int(bounds[chunk * rows]), int(bounds[(chunk + 2) * rows])
            lacking = cut_pair(cuts.costs, room, first, end, middles, ends)
        found[cuts.stage_at[chunk : chunk + 2] + 1] = ends
        return lacking, found


def _least_fall(limit: int) -> int:
    """Return by how much less it is asked first whether a limit can be lowered."""
    return limit // (2 * _CLOSE) + 1
