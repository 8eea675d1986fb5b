"""Which templates, and how many pipelines of each, for a number of nodes.

For a step time tau, a pipeline of template i gets through c_i(tau) = floor((tau - fill_i) / slowest_i) microbatches. A
knapsack over the nodes finds the composition that gets through most; the least tau with enough is the best step
time over all compositions. Only finishing times fill_i + m slowest_i can be the least: bisection over these is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from resilient.templates.template import PipelineTemplate, nanoseconds

_IMPOSSIBLE = np.int64(-(2**62))
_Table = npt.NDArray[np.int64]


def compose(
    templates: Mapping[int, PipelineTemplate], num_nodes: int, num_microbatches: int, min_pipelines: int
) -> tuple[int, ...]:
    """Return the template sizes (descending) whose pipelines finish a step soonest under the best batch split.

    Args:
        templates: By number of nodes.
        num_nodes: What the sizes sum up to.
        num_microbatches: Of a step over all pipelines; also the most pipelines there can be.
        min_pipelines: The fewest pipelines, f + 1; at least 1.

    Raises:
        ValueError: No allowed number of pipelines of these sizes has ``num_nodes`` nodes in total.
    """
    knapsack = _Knapsack(templates, num_nodes, num_microbatches, min_pipelines)
    candidates = knapsack.finishing_times()
    if not len(candidates) or not knapsack.solve(int(candidates[-1])):
        raise ValueError(
            f"num_nodes must be a sum of {min_pipelines} to {num_microbatches} template sizes out of "
            f"{sorted(templates)}, got {num_nodes}; leave nodes out or add templates"
        )
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if knapsack.solve(int(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    return knapsack.solve(int(candidates[low]))


class _Knapsack:
    """The best composition for a given step time.

    ``best[k, n]`` is the most microbatches that k pipelines of n nodes in total get through. Where no composition can
    have more pipelines than microbatches (the usual case), the last row stands for "min_pipelines or more".
    """

    def __init__(
        self, templates: Mapping[int, PipelineTemplate], num_nodes: int, num_microbatches: int, min_pipelines: int
    ) -> None:
        sizes = sorted(size for size in templates if size <= num_nodes)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._fill = np.array([nanoseconds(templates[size].fill_ms) for size in sizes], dtype=np.int64)
        self._slowest = np.array([max(1, nanoseconds(templates[s].slowest_ms)) for s in sizes], dtype=np.int64)
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches
        self._min_pipelines = min_pipelines
        most_pipelines = num_nodes // sizes[0] if sizes else 0
        self._open_ended = min_pipelines <= most_pipelines <= num_microbatches
        self._rows = min_pipelines if self._open_ended else min(most_pipelines, num_microbatches)

    def finishing_times(self) -> _Table:
        """Return all times, in ns ascending, at which some pipeline can finish one of its microbatches."""
        counts = np.arange(1, self._num_microbatches + 1, dtype=np.int64)
        return np.unique(self._fill[:, None] + self._slowest[:, None] * counts)

    def solve(self, tau: int) -> tuple[int, ...]:
        """Return the sizes (descending) that get through most microbatches by ``tau`` ns; empty if not enough."""
        capacity = np.minimum((tau - self._fill) // self._slowest, self._num_microbatches)
        able = capacity >= 1
        sizes, capacity = self._sizes[able], capacity[able]
        best = self._fill_table(sizes, capacity)
        last = best[self._min_pipelines :, self._num_nodes]
        if not len(last) or last.max() < self._num_microbatches:
            return ()
        return self._read_back(best, self._min_pipelines + int(last.argmax()), sizes, capacity)

    def _fill_table(self, sizes: _Table, capacity: _Table) -> _Table:
        best = np.full((self._rows + 1, self._num_nodes + 1), _IMPOSSIBLE)
        best[0, 0] = 0
        for nodes in range(1, self._num_nodes + 1):
            fitting = int(np.searchsorted(sizes, nodes, side="right"))
            if not fitting:
                continue
            most = (best[:, nodes - sizes[:fitting]] + capacity[:fitting]).max(axis=1)
            best[1:, nodes] = most[:-1]
            if self._open_ended:
                best[-1, nodes] = max(most[-2], most[-1])
            best[best[:, nodes] < 0, nodes] = _IMPOSSIBLE
        return best

    def _read_back(self, best: _Table, row: int, sizes: _Table, capacity: _Table) -> tuple[int, ...]:
        """Walk the table from the full number of nodes to none; of equally good steps take the largest template."""
        chosen: list[int] = []
        nodes = self._num_nodes
        while nodes:
            before = [row - 1, row] if self._open_ended and row == self._rows else [row - 1]
            row, index = next(
                (previous, i)
                for i in reversed(range(len(sizes)))
                if sizes[i] <= nodes
                for previous in before
                if best[previous, nodes - sizes[i]] >= 0
                and best[previous, nodes - sizes[i]] + capacity[i] == best[row, nodes]
            )
            chosen.append(int(sizes[index]))
            nodes -= chosen[-1]
        return tuple(sorted(chosen, reverse=True))
