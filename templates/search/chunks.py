"""Layers -> stages of interleaved schedules and ZB-V: for each number of nodes a template with several on each device.

Of K devices and v chunks, stage s of K v is in row ``s % K``, or of ZB-V on the way back in ``2 K - 1 - s``. A row's
step takes as long as its stages together, so for many microbatches the slowest row shall be as fast as can be, for few
ones the first stage's gradient sum counts as well; of equal steps the one with even stages and rows is taken. Where
there are few cuts all are looked at. Otherwise cuts are searched for
(:mod:`resilient.templates.search.chunk_limits`), and those of few stages moved bound by bound, from there and from some
that are drawn. A pipeline of one device has one stage.

A row holds what it does at the moment at which that is most (:mod:`resilient.templates.search.chunk_counts`), with the
workspace of one of its stages: one at a time runs. What it hands on to itself, where zb-v turns back, is there once. It
checkpoints all of them where only that fits. States that several stages of a row use count for each. A pipeline beside
which there may be others holds whatever its share becomes; one that has all microbatches, those.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import Held, rows_of_stages
from resilient.templates.search.chunk_counts import chunk_counts
from resilient.templates.search.chunk_limits import ChunkCuts, ChunkTable, bytes_at_moments, row_bytes
from resilient.templates.search.stage_cost_model import UNLIMITED, StageCosts
from resilient.templates.template import PipelineTemplate, StageSpec

if TYPE_CHECKING:
    from resilient.templates.search.chunk_rows import StageTables

_FEW = 20_000
"""Cuts that are looked at one by one: takes 20 ms."""

_MOST_MOVED, _NUM_DRAWN, _MOVED_FROM = 16, 32, 320_000
"""Pipelines of up to so many stages are searched by moving bounds, too, from so many cuts that are drawn: of long
models from fewer, so many divided by the square of their layers, as bounds go farther there."""

_STARTS, _MOST_STARTS = 40_000, 30
"""Long models are searched from one cut alone, shorter ones from so many divided by the square of their layers."""


class _Rated(NamedTuple):
    """Cuts and what they cost.

    Args:
        bounds: Where the stages begin and end. [cuts, stages + 1]
        lacking: Bytes that do not fit. [cuts]
        slowest: Nanoseconds of the slowest row. [cuts]
        fill: Of a step beside its rounds, without the gradient sum, as :attr:`PipelineTemplate.fill_ms`. [cuts]
        sync: Of the gradient sum. [cuts]
        squares: The sum of all stages' and rows' squared times: the less the more even. [cuts]
        checkpointing: Rows that do. [cuts, rows]
    """

    bounds: ChunkTable
    lacking: Ints
    slowest: Ints
    fill: NDArray[np.float64]
    sync: Ints
    squares: NDArray[np.float64]
    checkpointing: Flags

    def at(self, cuts: Ints) -> _Rated:
        """Return some of them."""
        return _Rated(
            bounds=self.bounds[cuts],
            lacking=self.lacking[cuts],
            slowest=self.slowest[cuts],
            fill=self.fill[cuts],
            sync=self.sync[cuts],
            squares=self.squares[cuts],
            checkpointing=self.checkpointing[cuts],
        )


class ChunkSearch:
    """Finds the templates of schedules with several stages on each device, one for each number of nodes.

    Args:
        problem: One with ``num_chunks`` stages for each device.
        beside: The search for pipelines that stand beside others, where this one is for a plan's only pipeline: it has
            all microbatches. What pipelines hold differs from number to number.
    """

    def __init__(self, problem: PlanningProblem, beside: ChunkSearch | None = None) -> None:
        self.problem = problem
        self._beside = beside
        self._fewest = problem.num_microbatches if beside else 1
        self.costs = beside.costs if beside else StageCosts(problem)
        single = self.costs.single_device()
        self._single = single._replace(send=np.pad(single.send, ((0, 1), (0, 0))))  # none where stages share a row
        if not problem.activation_checkpointing:
            self._single = self._single._replace(largest=np.full_like(self._single.largest, UNLIMITED))
        self._state_bytes = sum(layer.device_bytes(problem.profile.tp_degrees[0]) for layer in problem.profile.layers)
        self._cuts: dict[int, _Rated] = {}

    @property
    def sizes(self) -> range:
        """The numbers of nodes whose devices the layers suffice for."""
        return range(self.problem.min_pipeline_nodes, self._most_nodes + 1)

    @property
    def _most_nodes(self) -> int:
        devices = self.problem.cluster.devices_per_node
        return max(self.costs.num_layers // (devices * self.problem.num_chunks), int(devices == 1))

    def fits(self, size: int) -> bool:
        """Return whether there is a template for a number of nodes."""
        return size in self.sizes and len(self._cut(size).bounds) > 0

    def layouts(self, size: int, counts: range, *, alone: bool) -> tuple[PipelineTemplate, ...]:
        """Return the best of the cuts found for a number of nodes and each of these numbers of microbatches.

        Args:
            size: The number of nodes.
            counts: Of microbatches.
            alone: Whether there are no other pipelines to sum gradients with.
        """
        if not self.fits(size):
            return ()
        cuts = self._cut(size)
        beside = cuts.fill + (0 if alone else cuts.sync)
        cuts = cuts.at(np.lexsort((cuts.squares, beside, cuts.slowest)))
        beside = cuts.fill + (0 if alone else cuts.sync)
        corners = np.flatnonzero(np.diff(np.minimum.accumulate(beside), prepend=np.inf) < 0)
        times = beside[corners] + np.arange(counts.start, counts.stop)[:, None] * cuts.slowest[corners]
        return tuple(self._template(size, cuts.at(corners[[best]])) for best in np.unique(np.argmin(times, axis=1)))

    def _template(self, size: int, cut: _Rated) -> PipelineTemplate:
        row_of, memory = self._row_of(size), self._bytes_of_stages(size, cut)
        send = self._single.send[self._source(row_of), cut.bounds[0, :-1]]
        stages: list[StageSpec] = []
        for index, row in enumerate(row_of.tolist()):
            stage = self.costs.stage(
                int(cut.bounds[0, index]),
                int(cut.bounds[0, index + 1]),
                0,
                row,
                (Held(1, 0),),
                checkpointing=bool(cut.checkpointing[0, row]),
                send_ms=int(send[index]) / 1e6,
            )
            stages.append(replace(stage, memory_bytes=int(memory[index])))
        return PipelineTemplate(
            num_nodes=size,
            stages=tuple(stages),
            sync_ms=int(cut.sync[0]) / 1e6,
            only_alone=not self._fits_beside(size, cut),
        )

    def _fits_beside(self, size: int, cut: _Rated) -> bool:
        """Return whether a cut, and what of it checkpoints, also fits beside other pipelines."""
        if self._beside is None:
            return True
        rated = self._beside._rate(size, cut.bounds)
        return not rated.lacking.any() and np.array_equal(rated.checkpointing, cut.checkpointing)

    def _bytes_of_stages(self, size: int, cut: _Rated) -> Ints:
        """Return what each stage has of what its row holds when that is most. [stages]"""
        stage_at = self._stage_at(size)
        held, once = bytes_at_moments(self._single, self._counts(size), stage_at, cut.bounds[0])
        rows, again = np.arange(stage_at.shape[1]), cut.checkpointing[0].astype(np.int64)
        held, once = held[:, rows, :, again], once[:, rows, again]  # [rows, chunks, moments] and [chunks, rows]
        moment = held.sum(axis=1).argmax(axis=1)
        memory = np.empty(stage_at.size, dtype=np.int64)
        memory[stage_at] = held[rows, :, moment].T
        memory[stage_at[once.argmax(axis=0), rows]] += once.max(axis=0)
        return memory

    def misfit(self) -> ArgumentError:
        """Return why no number of nodes has a template."""
        problem, sizes = self.problem, self.sizes
        if not sizes:
            return ArgumentError(
                "layers",
                f"suffice for {{num_chunks}} = {problem.num_chunks} stages on each of the "
                f"{problem.cluster.devices_per_node} devices of {{min_pipeline_nodes}} = {problem.min_pipeline_nodes} "
                f"nodes",
                self.costs.num_layers,
                "lower {num_chunks} or {min_pipeline_nodes}, or use schedule 1f1b",
            )
        return ArgumentError(
            "memory_bytes",
            f"hold the stages of a pipeline of {sizes.start} to {sizes.stop - 1} nodes with what they have in flight",
            problem.cluster.memory_bytes,
            "use smaller microbatches, schedule 1f1b or devices with more memory",
        )

    def _num_rows(self, size: int) -> int:
        return size * self.problem.cluster.devices_per_node

    def _chunks(self, size: int) -> int:
        return self.problem.num_chunks if self._num_rows(size) > 1 else 1

    def _row_of(self, size: int) -> ChunkTable:
        """Return the row of each stage."""
        return np.array(rows_of_stages(self.problem.schedule, self._num_rows(size), self._chunks(size)))

    def _source(self, row_of: ChunkTable) -> ChunkTable:
        """Return where messages before each stage come from: 0 the same node, 1 another one, 2 the same device."""
        node = row_of // self.problem.cluster.devices_per_node
        return np.concatenate([[2], np.where(np.diff(row_of) == 0, 2, np.diff(node) != 0)])

    def _stage_at(self, size: int) -> ChunkTable:
        """Return the stages of chunks and rows. [chunks, rows]"""
        row_of, num_rows = self._row_of(size), self._num_rows(size)
        stage_at = np.empty((self._chunks(size), num_rows), dtype=np.int64)
        stage_at[np.arange(len(row_of)) // num_rows, row_of] = np.arange(len(row_of))
        return stage_at

    def _counts(self, size: int) -> Ints:
        """Return the microbatches that rows keep of each chunk, as of :class:`ChunkCuts`."""
        problem = self.problem
        most, num_rows, num_chunks = problem.most_microbatches, self._num_rows(size), self._chunks(size)
        return chunk_counts(problem.schedule, num_rows, num_chunks, self._fewest, most).transpose(2, 0, 1, 3)

    def _cut(self, size: int) -> _Rated:
        """Return the cuts that fit among which numbers of microbatches decide."""
        if size not in self._cuts:
            number, num_layers = self._num_rows(size) * self._chunks(size), self.costs.num_layers
            if number == 1:
                bounds = np.array([[0, num_layers]])
            elif self._too_large(size):
                bounds = np.empty((0, number + 1), dtype=np.int64)
            elif math.comb(num_layers - 1, number - 1) <= _FEW:
                bounds = _every(num_layers, number)
            else:
                bounds = self._found(size, number)
            rated = self._rate(size, bounds)
            self._cuts[size] = rated.at(np.flatnonzero(rated.lacking == 0))
        return self._cuts[size]

    def _too_large(self, size: int) -> bool:
        """Return whether the states alone, each in one place, are more than all rows hold."""
        limit = self.problem.cluster.memory_bytes
        return limit is not None and self._state_bytes > self._num_rows(size) * limit

    @cached_property
    def _tables(self) -> StageTables:
        from resilient.templates.search.chunk_rows import stage_tables

        return stage_tables(self._single)

    def _found(self, size: int, num_stages: int) -> ChunkTable:
        """Return the cuts that the search finds: the one with the fastest rows, and with less to sum in the end.

        The sum is that of the first stage. It is shorter for fewer layers, which the row's others can make up for.
        """
        limit, row_of = self.problem.cluster.memory_bytes, self._row_of(size)
        of_rows = self._counts(size), self._stage_at(size), row_of, self._source(row_of)
        cuts = ChunkCuts(self._single, self._tables, *of_rows)
        starts = _starts(self._single.work, num_stages, _STARTS // self.costs.num_layers**2)
        found = [cuts.best(start, limit) for start in starts]
        fastest = found[int(np.argmin([cuts.rank(each, limit) for each in found]))]
        end = int(fastest[1])
        if self._single.sync[end] > 0 and cuts.fits(fastest, limit):
            time = cuts.rank(fastest, limit)
            while end > 1:
                end = max(1, end * 2 // 3)
                found.append(cuts.best(fastest, limit, first_end=end, fastest=time))
        if num_stages <= _MOST_MOVED:
            begin = np.concatenate((fastest[None], _drawn(self.costs.num_layers, num_stages)))
            found += self._moved(size, cuts, begin)
        return np.unique(np.stack([*starts, *found]), axis=0)

    def _moved(self, size: int, cuts: ChunkCuts, now: ChunkTable) -> list[ChunkTable]:
        """Return where cuts come to by moves that make a step shorter: of one microbatch or all, also without sums."""
        from resilient.templates.search.chunk_moves import Rows, move_bounds

        limit, found = self.problem.cluster.memory_bytes, list[ChunkTable]()
        alone = self._single._replace(sync=np.zeros_like(self._single.sync))
        several_or_alone = [self._single, alone] if self.problem.max_failures == 0 else [self._single]
        for costs, num_microbatches in product(several_or_alone, {1, self.problem.most_microbatches}):
            rows = Rows(
                counts=cuts.counts,
                source=cuts.source,
                stages=cuts.stage_at.T.copy(),
                memory=0 if limit is None else limit,
                checkpoints=self.problem.activation_checkpointing and limit is not None,
                num_microbatches=num_microbatches,
            )
            moved = now.copy()
            move_bounds(costs, rows, _moves(now.shape[1]), moved)
            found += [*moved]
        return found

    def _rate(self, size: int, bounds: ChunkTable) -> _Rated:
        single, limit, row_of = self._single, self.problem.cluster.memory_bytes, self._row_of(size)
        first, end, stage_at = bounds[:, :-1], bounds[:, 1:], self._stage_at(size)
        number, num_chunks = np.arange(len(bounds)), len(stage_at)

        def of_rows(stages: ChunkTable) -> ChunkTable:
            return stages[:, stage_at].sum(axis=1)

        checkpointing = np.zeros((len(bounds), stage_at.shape[1]), dtype=bool)
        lacking = np.zeros(len(bounds), dtype=np.int64)
        if limit is not None:
            held = row_bytes(*bytes_at_moments(single, self._counts(size), stage_at, bounds))
            checkpointing = (held[..., 0] > limit) & self.problem.activation_checkpointing
            lacking = np.maximum(np.where(checkpointing, held[..., 1], held[..., 0]) - limit, 0).sum(axis=1)
        forward = (single.forward[end] - single.forward[first]) * (single.next_backward[first] < end)
        stages = single.work[end] - single.work[first] + single.send[self._source(row_of), first]
        again = checkpointing[:, row_of]
        stages += again * forward
        filling = np.maximum(0, stages - 2 * (single.weights[end] - single.weights[first]) * ~again)
        rows, filling_rows = of_rows(stages), of_rows(filling)
        slowest = np.lexsort((filling_rows, rows), axis=1)[:, -1]
        squares = (stages.astype(float) ** 2).sum(axis=1) + (rows.astype(float) ** 2).sum(axis=1)
        return _Rated(
            bounds=bounds,
            lacking=lacking,
            slowest=rows[number, slowest],
            fill=(filling_rows.sum(axis=1) - filling_rows[number, slowest]) / num_chunks,
            sync=single.sync[end[:, 0]],
            squares=squares,
            checkpointing=checkpointing,
        )


@cache
def _moves(num_bounds: int) -> ChunkTable:
    """Return what one or two of the inner bounds move by, up to a layer each, behind no move. [moves, bounds]"""
    single = np.concatenate([sign * np.eye(num_bounds, dtype=np.int64)[1:-1] for sign in (-1, 1)])
    moves = np.unique((single[:, None] + single).reshape(-1, num_bounds), axis=0)
    return np.concatenate([0 * moves[:1], moves[moves.any(axis=1)]])


@cache
def _drawn(num_layers: int, num_stages: int) -> ChunkTable:
    """Return some cuts, the same ones each time."""
    draw, number = np.random.default_rng(0), min(_NUM_DRAWN, _MOVED_FROM // num_layers**2)
    inner = [np.sort(draw.choice(num_layers - 1, num_stages - 1, replace=False) + 1) for _ in range(number)]
    drawn = np.array(inner, dtype=np.int64).reshape(number, num_stages - 1)
    return np.pad(drawn, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_layers)))


def _every(num_layers: int, num_stages: int) -> ChunkTable:
    """Return all cuts. [cuts, stages + 1]"""
    inner = np.array(list(combinations(range(1, num_layers), num_stages - 1)))
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_layers)))


def _starts(work: ChunkTable, num_stages: int, more: int) -> list[ChunkTable]:
    """Return a cut that is even by time, and some that are even by number of layers or not at all."""
    num_layers, shares = len(work) - 1, np.arange(num_stages + 1) / num_stages
    by_time = np.searchsorted(work, shares * work[-1])
    by_count = np.round(shares * num_layers).astype(np.int64)
    draw = np.random.default_rng(0)  # the same cuts wherever it is planned
    uneven = [np.sort(draw.integers(0, num_layers + 1, num_stages + 1)) for _ in range(min(more, _MOST_STARTS))]
    return [_spread(bounds, num_layers) for bounds in (by_time, by_count, *uneven)][: max(1, more)]


def _spread(bounds: ChunkTable, num_layers: int) -> ChunkTable:
    """Return the bounds moved as little as gives every stage a layer."""
    steps = np.arange(len(bounds))
    risen = np.maximum.accumulate(np.concatenate([[0], bounds[1:-1], [num_layers]]) - steps) + steps
    return np.minimum(risen, num_layers - steps[::-1])
