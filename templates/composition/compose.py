"""Which templates, and how many pipelines of each, for a number of nodes.

For a step time tau, a pipeline of i nodes gets through ``c_i(tau)`` microbatches, with whichever of its layouts does
most: the greatest ``floor((tau - fill) / slowest) round``. A knapsack over the nodes finds the composition that gets
through most; the least tau with enough is the best step time over all compositions, layouts and batch splits. Times are
whole nanoseconds, so bisection over tau is exact.

Where more pipelines fit than there are microbatches, some would idle, and the knapsack has to count them. A table with
a row per count is large, so most taus are decided without: a price on each pipeline (a Lagrange multiplier) gives a
bound on what the allowed counts get through, and a composition that may already do. The rest take the table, of only
those sizes that can be in a composition that is enough by that bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.composition.batch_split import finish_ns, line_table, lines
from resilient.templates.template import TemplateSet

_IMPOSSIBLE = -(2**61)


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
            :func:`resilient.templates.search.template_sizes.usable_nodes`.
    """
    smallest, largest = templates.sizes[0], templates.sizes[-1]
    if min(num_microbatches, num_nodes // smallest) < max(min_pipelines, -(-num_nodes // largest)):
        raise ArgumentError(
            "num_nodes",
            f"be a sum of {min_pipelines} to {num_microbatches} template sizes from {smallest} to {largest}",
            num_nodes,
            "leave nodes out or plan templates for more nodes",
        )
    knapsack = _Knapsack(templates, num_nodes, num_microbatches, min_pipelines)
    tau = knapsack.least_tau(0, knapsack.is_enough)
    sizes = knapsack.composition(tau)
    if len(sizes) > num_microbatches:
        tau = knapsack.least_tau(tau, knapsack.is_enough_limited)
        sizes = knapsack.composition_limited(tau)
    return sizes


class _Corner(NamedTuple):
    """What a composition that is worth most at some price per pipeline gets through, and its number of pipelines."""

    capacity: int
    pipelines: int


class _Knapsack:
    """Compositions of a number of nodes; *limited* ones have no more pipelines than microbatches."""

    def __init__(self, templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> None:
        # A pipeline of all nodes is the only one.
        sizes = [size for size in templates.sizes if size <= num_nodes]
        pipelines = [lines(templates.of(size), alone=size == num_nodes) for size in sizes]
        self._smallest = templates.sizes[0]
        self._lines = line_table(pipelines)
        self._longest = max(finish_ns(pipeline, num_microbatches) for pipeline in pipelines)
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches
        self._min_pipelines = min_pipelines

    def least_tau(self, tau_ns: int, is_enough: Callable[[int], bool]) -> int:
        """Return the least step time from ``tau_ns`` on that is enough."""
        low, high = tau_ns, self._longest
        while low < high:
            middle = (low + high) // 2
            last, following = self._lines.ends_around(middle)
            if is_enough(middle):
                high = max(low, last)
            else:
                low = following
        return low

    def is_enough(self, tau_ns: int) -> bool:
        """Return whether some composition gets through all microbatches."""
        return self._most(self._capacity(tau_ns))[-1, -1] >= self._num_microbatches

    def composition(self, tau_ns: int) -> tuple[int, ...]:
        """Return the best composition, descending."""
        capacity = self._capacity(tau_ns)
        sizes = np.flatnonzero(capacity > 0) + self._smallest
        return self._read_back(self._most(capacity), sizes, capacity[sizes - self._smallest])

    def is_enough_limited(self, tau_ns: int) -> bool:
        """Return whether some limited composition gets through all microbatches."""
        capacity = np.minimum(self._capacity(tau_ns), self._num_microbatches)
        enough, sizes = self._bound(capacity)
        if enough or not len(sizes):
            return enough
        return self._most_limited(sizes, capacity[sizes - self._smallest])[-1, -1] >= self._num_microbatches

    def composition_limited(self, tau_ns: int) -> tuple[int, ...]:
        """Return the best limited composition, descending."""
        capacity = self._capacity(tau_ns)
        _, sizes = self._bound(capacity)
        values = capacity[sizes - self._smallest]
        return self._read_back(self._most_limited(sizes, values), sizes, values)

    def _capacity(self, tau_ns: int) -> Ints:
        """Return what each size gets through."""
        capacity = self._lines.capacities(tau_ns)
        capacity[capacity < 1] = _IMPOSSIBLE
        return capacity

    def _most(self, values: Ints) -> Ints:
        """Return a table: ``[r, n]`` is the most that r pipelines or more, of n nodes in total, are worth."""
        best = np.full((self._min_pipelines + 1, self._num_nodes + 1), _IMPOSSIBLE)
        best[0, 0] = 0
        compiled(_fill_rows)(best, values, self._smallest)
        return best

    def _most_limited(self, sizes: Ints, values: Ints) -> Ints:
        """Return a table: ``[r, n]`` is the most that up to r pipelines, of n nodes in total, get through.

        They are so many that they can be the fewest allowed in the last row.
        """
        last_row = self._num_microbatches
        best = np.full((last_row + 1, self._num_nodes + 1), _IMPOSSIBLE)
        best[: last_row - self._min_pipelines + 1, 0] = 0
        compiled(_fill_limited)(best, sizes, values)
        return best

    def _bound(self, capacity: Ints) -> tuple[bool, Ints]:
        """Return whether a limited composition that is enough was found, and the sizes of which the best can be made.

        Of all compositions, those worth most at some price are the corners of the hull of (pipelines, capacity). The
        price at which the hull passes the limit bounds the capacity of all limited compositions, and of all that have
        a given size: there are no sizes where nothing can be enough.
        """
        limit = self._num_microbatches
        largest = int(capacity.max())
        if largest * (self._num_nodes + 1) ** 3 >= -_IMPOSSIBLE // 2:
            return False, np.flatnonzero(capacity > 0) + self._smallest  # the products would not fit in 64 bits
        scale, price = 1, 0
        table, values, above = self._priced(capacity, scale, price)
        below = above
        if above.pipelines > limit:
            _, _, below = self._priced(capacity, 1, self._num_nodes * largest + 1)
            if below.pipelines > limit:
                return False, np.empty(0, dtype=np.int64)
            while True:
                scale, price = above.pipelines - below.pipelines, above.capacity - below.capacity
                table, values, corner = self._priced(capacity, scale, price)
                if scale * (corner.capacity - below.capacity) <= price * (corner.pipelines - below.pipelines):
                    break
                if corner.pipelines <= limit:
                    below = corner
                else:
                    above = corner
        enough = max(below.capacity, limit)
        with_size = values + table[-2, self._num_nodes - self._smallest - np.arange(len(values))]
        able = -(-with_size // (self._num_nodes + 1)) + price * limit >= scale * enough
        return below.capacity >= limit, np.flatnonzero(able) + self._smallest

    def _priced(self, capacity: Ints, scale: int, price: int) -> tuple[Ints, Ints, _Corner]:
        """Return the table of what compositions are worth, the values of the sizes, and the composition worth most.

        A pipeline is worth ``scale`` times its capacity less the price. Of equals the one with the fewest pipelines
        counts: values are multiplied so that the number of pipelines fits below.
        """
        base = self._num_nodes + 1
        values = np.where(capacity > 0, (scale * capacity - price) * base - 1, _IMPOSSIBLE)
        table = self._most(values)
        worth = int(table[-1, -1])
        count = -worth % base
        return table, values, _Corner(((worth + count) // base + price * count) // scale, count)

    def _read_back(self, best: Ints, sizes: Ints, values: Ints) -> tuple[int, ...]:
        """Walk the table from all nodes to none; of equally good steps take the largest template."""
        chosen: list[int] = []
        row, nodes = len(best) - 1, self._num_nodes
        descending = zip(sizes.tolist()[::-1], values.tolist()[::-1], strict=True)
        size, value = next(descending)
        while nodes:
            before = max(row - 1, 0)
            while size > nodes or best[before, nodes - size] + value != best[row, nodes]:
                size, value = next(descending)
            chosen.append(size)
            row, nodes = before, nodes - size
        return tuple(chosen)


def _fill_rows(best: Ints, values: Ints, smallest: int) -> None:
    """Fill in a table of which only column 0 is known; a row grows from the one before, the first from itself."""
    num_rows, num_columns = best.shape
    for nodes in range(num_columns - smallest):
        num_sizes = min(len(values), num_columns - nodes - smallest)
        for row in range(num_rows):
            so_far = best[max(row - 1, 0), nodes]
            if so_far <= _IMPOSSIBLE // 2:
                continue
            grown = best[row, nodes + smallest :]
            for i in range(num_sizes):
                grown[i] = max(grown[i], so_far + values[i])


def _fill_limited(best: Ints, sizes: Ints, values: Ints) -> None:
    """Fill in a table of which only column 0 is known, where the last entry can depend on it; rows grow downwards."""
    last_row, last_column = best.shape[0] - 1, best.shape[1] - 1
    for row in range(1, last_row + 1):
        first = max(0, last_column - (last_row - row) * sizes[-1])
        end = min(last_column - (last_row - row) * sizes[0], row * sizes[-1]) + 1
        for size, value in zip(sizes, values):  # noqa: B905
            start = max(first, size)
            if start < end:
                grown, before = best[row, start:end], best[row - 1, start - size : end - size]
                for i in range(end - start):
                    grown[i] = max(grown[i], before[i] + value)
