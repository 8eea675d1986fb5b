"""Which templates, and how many pipelines of each, for a number of nodes.

For a step time tau, a pipeline of i nodes gets through ``c_i(tau)`` microbatches, with whichever of its layouts does
most: the greatest ``floor((tau - fill) / slowest)``. A knapsack over the nodes finds the composition that gets through
most; the least tau with enough is the best step time over all compositions, layouts and batch splits. Times are whole
nanoseconds, so bisection over tau is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np

from resilient.templates.batch import Table, capacities, finish_ns, line_table, lines
from resilient.templates.template import TemplateSet

_IMPOSSIBLE = -(2**62)


def compose(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> tuple[int, ...]:
    """Return the template sizes (descending) whose pipelines finish a step soonest under the best batch split.

    Ties: of the compositions with the shortest step, those that could get through most microbatches in that time; of
    these, the one with the largest template, then the largest second, and so on.

    Args:
        templates: The job's templates.
        num_nodes: What the sizes sum up to.
        num_microbatches: Of a step over all pipelines; also the most pipelines there can be.
        min_pipelines: The fewest pipelines, f + 1; at least 1.

    Raises:
        ValueError: No allowed number of pipelines of these sizes has ``num_nodes`` nodes in total; see
            :func:`resilient.templates.nodespec.usable_nodes`.
    """
    smallest, largest = templates.sizes[0], templates.sizes[-1]
    if min(num_microbatches, num_nodes // smallest) < max(min_pipelines, -(-num_nodes // largest)):
        raise ValueError(
            f"num_nodes must be a sum of {min_pipelines} to {num_microbatches} template sizes from {smallest} to "
            f"{largest}, got {num_nodes}; leave nodes out or plan templates for more nodes"
        )
    knapsack = _Knapsack(templates, num_nodes, num_microbatches)
    tau, sizes = knapsack.least_tau(0, min_pipelines)
    if len(sizes) > num_microbatches:
        # Some would idle, so the knapsack has to count them, too. It seldom comes to that: the shortest step leaves
        # hardly any room for more microbatches than there are, and every pipeline has room for one.
        _, sizes = knapsack.least_tau(tau, min_pipelines, num_microbatches)
    return sizes


class _Knapsack:
    """Compositions of a number of nodes, at a given step time."""

    def __init__(self, templates: TemplateSet, num_nodes: int, num_microbatches: int) -> None:
        pipelines = [lines(templates.of(size)) for size in templates.sizes if size <= num_nodes]
        self._smallest = templates.sizes[0]
        self._fill, self._slowest = line_table(pipelines)
        self._enough = max(finish_ns(pipeline, num_microbatches) for pipeline in pipelines)
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches

    def least_tau(
        self, tau_ns: int, min_pipelines: int, max_pipelines: int | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Return the least step time from ``tau_ns`` on that is enough, and its best composition, descending."""
        low, high = tau_ns, self._enough
        while low < high:
            middle = (low + high) // 2
            best, _ = self._fill_table(middle, min_pipelines, max_pipelines)
            if best[-1, -1] >= self._num_microbatches:
                high = middle
            else:
                low = middle + 1
        return low, self._read_back(*self._fill_table(low, min_pipelines, max_pipelines))

    def _fill_table(self, tau_ns: int, min_pipelines: int, max_pipelines: int | None) -> tuple[Table, Table]:
        """Return the table, and the capacity of each size. The table's last row and column hold the answer.

        ``best[r, n]`` is the most microbatches that pipelines of n nodes in total get through: r pipelines or more,
        or, with ``max_pipelines``, up to r and so many that they can be ``min_pipelines`` in the last row.
        """
        capacity = capacities(self._fill, self._slowest, tau_ns)
        capacity[capacity < 1] = _IMPOSSIBLE
        last_row = min_pipelines if max_pipelines is None else max_pipelines
        best = np.full((last_row + 1, self._num_nodes + 1), _IMPOSSIBLE)
        best[: last_row - min_pipelines + 1, 0] = 0
        _compiled()(best, capacity, self._smallest, max_pipelines is None)
        return best, capacity

    def _read_back(self, best: Table, capacity: Table) -> tuple[int, ...]:
        """Walk the table from all nodes to none; of equally good steps take the largest template."""
        chosen: list[int] = []
        row, nodes = len(best) - 1, self._num_nodes
        while nodes:
            before = max(row - 1, 0)
            num_sizes = min(len(capacity), nodes - self._smallest + 1)
            first_rest = nodes - self._smallest - num_sizes + 1
            by_falling_size = best[before, first_rest : first_rest + num_sizes] + capacity[num_sizes - 1 :: -1]
            rest = first_rest + int((by_falling_size == best[row, nodes]).argmax())
            chosen.append(nodes - rest)
            row, nodes = before, rest
        return tuple(chosen)


@cache
def _compiled() -> Callable[[Table, Table, int, bool], None]:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    return cast("Callable[[Table, Table, int, bool], None]", njit(cache=True)(_fill_rows))


def _fill_rows(best: Table, capacity: Table, smallest: int, open_ended: bool) -> None:
    """Fill in a table of which only column 0 is known; a row grows from the one before, the first from itself."""
    num_rows, num_columns = best.shape
    for nodes in range(num_columns - smallest):
        num_sizes = min(len(capacity), num_columns - nodes - smallest)
        for row in range(0 if open_ended else 1, num_rows):
            so_far = best[max(row - 1, 0), nodes]
            if so_far < 0:
                continue
            grown = best[row, nodes + smallest :]
            for i in range(num_sizes):
                grown[i] = max(grown[i], so_far + capacity[i])
