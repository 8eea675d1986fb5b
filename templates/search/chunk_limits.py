"""Cuts with several stages in each row under limits on the rows: the least limit for which one is found.

Two chunks that follow each other are cut anew together, as long as that helps, each two in turn: with two chunks the
best of all is found, where every layer is tried as the second one's first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.search.stage_cost_model import SingleDeviceCosts

if TYPE_CHECKING:
    from resilient.templates.search.chunk_cuts import Room

ChunkTable = Ints

UNLIMITED = 1 << 50
"""More than any time or memory of a row; sums over rows fit into 64 bits."""

TIME, MEMORY = 0, 1
"""What there is a limit on."""

_CLOSE = 1000
"""A limit is not lowered where that would be by less than one part of so many."""

_SHORT = 100
"""Layers up to which limits are halved also where several pairs are lowered in turn: looks take no time."""

_STEPS = 1_000_000
"""Of loops, in which a limit is tried; takes about 5 ms. Of long models not every layer is tried as a chunk's first."""


class ChunkCuts:
    """Cuts of a number of rows.

    Args:
        costs: Of stages.
        in_flight: Microbatches that the rows keep of each chunk. [rows, chunks]
        deferred: Those of them that are between the two parts of their backward. [rows, chunks]
        row_of: The row of each stage. [stages]
        source: Where the messages before each stage come from, as the first dimension of the costs' ``send``. [stages]

    Attributes:
        kept: Microbatches that each stage keeps. [stages]
        deferred: Those of them that are between the two parts of their backward. [stages]
        stage_at: The stages of chunks and rows. [chunks, rows]
        is_short: Whether the model has so few layers that looks at limits take no time.
        leads_back: Whether the second chunk leads back up the rows.
    """

    def __init__(
        self, costs: SingleDeviceCosts, in_flight: ChunkTable, deferred: ChunkTable, row_of: Ints, source: Ints
    ) -> None:
        self.costs = costs
        self.num_rows, self.num_chunks = in_flight.shape
        self.row_of, self.source = row_of, source
        chunk_of = np.arange(len(row_of)) // self.num_rows
        self.kept, self.deferred = in_flight[row_of, chunk_of], deferred[row_of, chunk_of]
        self.stage_at = np.empty((self.num_chunks, self.num_rows), dtype=np.int64)
        self.stage_at[chunk_of, row_of] = np.arange(len(row_of))
        self.is_short = len(costs.work) <= _SHORT
        self.leads_back = self.num_chunks == 2 and int(self.stage_at[1, 0]) == len(row_of) - 1

    def best(self, bounds: ChunkTable, limit: int | None, first_end: int = UNLIMITED) -> ChunkTable:
        """Return the cut with the fastest slowest row that is found from one to begin with.

        One that does not fit into memory, where none that does is found.

        Args:
            bounds: The cut to begin with. [stages + 1]
            limit: Bytes of a row; None for no limit.
            first_end: Where the first stage ends at the latest.
        """
        memory = UNLIMITED if limit is None else limit
        if first_end < bounds[1]:
            bounds = bounds.copy()
            bounds[1] = first_end
        cut = _Limited(self, memory, first_end)
        if limit is not None:
            bounds = cut.lowered(bounds, MEMORY, limit)
            if self.most(bounds, MEMORY, UNLIMITED) > limit:
                return bounds
        even = -(-int(self.costs.work[-1]) // self.num_rows)
        return cut.evened(cut.lowered(bounds, TIME, even))

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
        rows = self.stages(bounds)[self.stage_at].sum(axis=0)
        if of == MEMORY:
            return int(np.minimum(rows[:, 2], rows[:, 3]).max())
        return int(np.where(rows[:, 2] > memory, rows[:, 1], rows[:, 0]).max())

    def room(self, bounds: ChunkTable, chunks: range, rows: Ints, limits: tuple[int, int, int]) -> Room:
        """Return the rows, in some order, that chunks are cut for.

        Args:
            bounds: Where the others are cut. [stages + 1]
            chunks: Those that are cut anew.
            rows: The order.
            limits: Time, memory, and the end of the first stage.
        """
        from resilient.templates.search.chunk_cuts import Room

        stages, at = self.stages(bounds)[self.stage_at], self.stage_at[chunks.start : chunks.stop, rows]
        stages[chunks.start : chunks.stop] = 0
        first_end = limits[2] if chunks.start == 0 else UNLIMITED
        others = stages.sum(axis=0)[rows]
        return Room(self.kept[at], self.deferred[at], self.source[at], others, limits[0], limits[1], first_end)

    def stages(self, bounds: ChunkTable) -> Ints:
        """Return time with activations kept and with checkpoints, and bytes of both. [stages, 4]"""
        costs, first, end = self.costs, bounds[:-1], bounds[1:]
        plain = costs.work[end] - costs.work[first] + costs.send[self.source, first]
        again = plain + (costs.forward[end] - costs.forward[first]) * (costs.next_backward[first] < end)
        held = costs.held[first, end]
        kept = held + self.kept * costs.kept[first, end] + costs.workspace[first, end]
        kept += self.deferred * costs.deferred[first, end]
        inputs = held + self.kept * costs.inputs[first, end] + costs.largest[first, end]
        return np.stack([plain, again, kept, inputs], axis=-1)


class _Limited:
    """Cuts in which the memory of rows and the first stage's end are limited."""

    def __init__(self, cuts: ChunkCuts, memory: int, first_end: int) -> None:
        self._cuts = cuts
        self._memory = memory
        self._first_end = first_end

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
        """Return the same with a chunk and the next one cut anew; the cut itself where none with a lower limit is."""
        low, high = floor - 1, self._cuts.most(bounds, of, self._memory)
        # To find that a limit is too low takes longest. Of several pairs each is lowered again and again, so that times
        # only fall, ever faster, until one is too low.
        falls, fall = of == TIME and self._cuts.num_chunks > 2 and not self._cuts.is_short, high // (2 * _CLOSE) + 1
        limit = max(floor, high - fall) if falls else floor
        while low < limit < high:
            lacking, found = self._under(bounds, chunk, of, limit)
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

        cuts, before = self._cuts, None
        limits = cuts.most(bounds, TIME, self._memory), self._memory, self._first_end
        while before is None or not np.array_equal(before, bounds):
            before, bounds = bounds, bounds.copy()
            for chunk in range(cuts.num_chunks):
                first, end = chunk * cuts.num_rows, (chunk + 1) * cuts.num_rows
                room = cuts.room(bounds, range(chunk, chunk + 1), cuts.row_of[first:end], limits)
                even_chunk(cuts.costs, room, int(bounds[first]), int(bounds[end]), bounds[first + 1 : end + 1])
        return bounds

    def _under(self, bounds: ChunkTable, chunk: int, of: int, limit: int) -> tuple[int, ChunkTable]:
        """Return a cut within a limit on time or memory in which a chunk and the next one are cut anew.

        Before it 0, or where none is found the least time under which more can be tried.
        """
        from resilient.templates.search.chunk_cuts import cut_pair, cut_there_and_back

        cuts, rows = self._cuts, self._cuts.num_rows
        limits = (limit, self._memory, self._first_end) if of == TIME else (UNLIMITED, limit, self._first_end)
        first, middle, end = (int(bounds[(chunk + of) * rows]) for of in range(3))
        room = cuts.room(bounds, range(chunk, chunk + 2), np.arange(rows), limits)
        ends, found = np.empty((2, rows), dtype=np.int64), bounds.copy()
        if cuts.leads_back:
            lacking = cut_there_and_back(cuts.costs, room, ends)
        else:
            middles = np.arange(first + rows, end - rows + 1)
            nearest = np.argsort(np.abs(middles - middle), kind="stable")
            tried = max(3, _STEPS // (end - first) ** 2)
            lacking = cut_pair(cuts.costs, room, first, end, middles[nearest[:tried]], ends)
        found[cuts.stage_at[chunk : chunk + 2] + 1] = ends
        return lacking, found
