"""Layers -> stages of interleaved 1F1B: for each number of nodes one template with several stages on each device.

Of K devices and v chunks, stage s of K v is in row ``s % K``. A row's step takes as long as its stages together, so the
cut shall make the slowest row as fast as can be, then the second slowest, and so on. The rows' stages lie between those
of others, so there is no search over prefixes as for one stage per device. A cut is instead improved, from an even
one, by moving a layer's worth from any stage to any other, as long as that helps: no single such move makes a found cut
better, but it need not be the best. A pipeline of one device has one stage.

A row checkpoints all its stages where only that fits. States that several stages of a row use count for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import chunks_in_flight
from resilient.templates.search.stage_cost_model import StageCosts
from resilient.templates.template import PipelineTemplate, StageSpec

ChunkTable = Ints


class _Rated(NamedTuple):
    """Cuts and what they cost.

    Args:
        bounds: Where the stages begin and end. [cuts, stages + 1]
        costs: Bytes that do not fit, then the rows' times from the slowest on, then the time of all. [cuts, 2 + rows]
        checkpointing: Rows that do. [cuts, rows]
    """

    bounds: ChunkTable
    costs: ChunkTable
    checkpointing: Flags


class ChunkSearch:
    """Finds the templates of interleaved 1F1B, one for each number of nodes.

    Args:
        problem: One with ``num_chunks`` stages for each device.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.costs = StageCosts(problem)
        self._single = self.costs.single_device()
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
        return size in self.sizes and bool(self._cut(size).costs[0, 0] == 0)

    def layouts(self, size: int, counts: range, *, alone: bool) -> tuple[PipelineTemplate, ...]:
        """Return the template for a number of nodes, whatever number of microbatches it gets; none where none fits."""
        if not self.fits(size):
            return ()
        cut, in_flight = self._cut(size), self._in_flight(size).T.flatten()
        num_rows, send = self._num_rows(size), self._send_ns(size, self._cut(size).bounds)
        stages: list[StageSpec] = []
        for index in range(len(in_flight)):
            row = index % num_rows
            stage = self.costs.stage(
                int(cut.bounds[0, index]),
                int(cut.bounds[0, index + 1]),
                0,
                row,
                int(in_flight[index]),
                checkpointing=bool(cut.checkpointing[0, row]),
                send_ms=int(send[0, index]) / 1e6,
            )
            stages.append(stage)
        sync_ms = self.costs.sync_ms(stages[0].end_layer, 0)
        return (PipelineTemplate(num_nodes=size, stages=tuple(stages), sync_ms=sync_ms),)

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

    def _in_flight(self, size: int) -> ChunkTable:
        """Return what each chunk of each row keeps. [rows, chunks]"""
        num_rows = self._num_rows(size)
        return chunks_in_flight(
            num_rows, self.problem.num_chunks if num_rows > 1 else 1, self.problem.most_microbatches
        )

    def _cut(self, size: int) -> _Rated:
        """Return the best cut that was found."""
        if size not in self._cuts:
            in_flight = self._in_flight(size)
            work, number = self._single.work, in_flight.size
            shares = np.arange(number + 1) / number
            by_time = np.searchsorted(work, shares * work[-1])
            by_count = np.round(shares * self.costs.num_layers).astype(np.int64)
            starts = np.stack([_spread(bounds, self.costs.num_layers) for bounds in (by_time, by_count)])
            found = _best(self._rate(size, in_flight, starts))
            while True:
                better = _best(self._rate(size, in_flight, np.concatenate([found.bounds, _moved(found.bounds[0])])))
                if better.costs.tolist() == found.costs.tolist():
                    break
                found = better
            self._cuts[size] = found
        return self._cuts[size]

    def _rate(self, size: int, in_flight: ChunkTable, bounds: ChunkTable) -> _Rated:
        single, limit = self._single, self.problem.cluster.memory_bytes
        by_row = (len(bounds), *in_flight.T.shape)
        first, end, kept = bounds[:, :-1], bounds[:, 1:], in_flight.T.flatten()

        def of_rows(stages: ChunkTable) -> ChunkTable:
            return stages.reshape(by_row).sum(axis=1)

        held = single.held[first, end]
        plain = of_rows(held + kept * (single.kept[end] - single.kept[first]))
        again = of_rows(held + kept * (single.inputs[end] - single.inputs[first]) + single.largest[first, end])
        lacking = np.zeros_like(plain)
        checkpointing = np.zeros(plain.shape, dtype=bool)
        if limit is not None:
            checkpointing = (plain > limit) & self.problem.activation_checkpointing
            lacking = np.maximum(np.where(checkpointing, again, plain) - limit, 0)
        forward = (single.forward[end] - single.forward[first]) * (single.next_backward[first] < end)
        times = of_rows(single.work[end] - single.work[first] + self._send_ns(size, bounds))
        times += checkpointing * of_rows(forward)
        columns = (lacking.sum(axis=1), *(-np.sort(-times, axis=1)).T, times.sum(axis=1))
        return _Rated(bounds, np.stack(columns, axis=1), checkpointing)

    def _send_ns(self, size: int, bounds: ChunkTable) -> ChunkTable:
        """Return the time of the messages before each stage. [cuts, stages]"""
        num_rows = self._num_rows(size)
        rows = np.arange(bounds.shape[1] - 1) % num_rows
        between = (rows % self.problem.cluster.devices_per_node == 0) & (size > 1)
        return self._single.send[between.astype(np.int64), bounds[:, :-1]]


def _best(rated: _Rated) -> _Rated:
    """Return the cut that costs least; of equal ones the first."""
    index = np.lexsort(rated.costs.T[::-1])[:1]
    return _Rated(rated.bounds[index], rated.costs[index], rated.checkpointing[index])


def _spread(bounds: ChunkTable, num_layers: int) -> ChunkTable:
    """Return the bounds moved as little as gives every stage a layer."""
    steps = np.arange(len(bounds))
    risen = np.maximum.accumulate(np.concatenate([[0], bounds[1:-1], [num_layers]]) - steps) + steps
    return np.minimum(risen, num_layers - steps[::-1])


def _moved(bounds: ChunkTable) -> ChunkTable:
    """Return all cuts in which a stage is a layer longer at the cost of another. [cuts, stages + 1]"""
    number = len(bounds) - 1
    giver, taker = np.nonzero(~np.eye(number, dtype=bool) & (np.diff(bounds) > 1)[:, None])
    between = np.arange(number + 1)
    lower = (giver[:, None] < between) & (between <= taker[:, None])
    higher = (taker[:, None] < between) & (between <= giver[:, None])
    return bounds - lower + higher
