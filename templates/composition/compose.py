"""Which templates, and how many pipelines of each, for a number of nodes.

For a step time tau, a pipeline of i nodes gets through ``c_i(tau)`` microbatches, with whichever of its layouts does
most: the greatest ``floor((tau - fill) / slowest) round``. A knapsack over the nodes finds the composition that gets
through most; the least tau with enough is the best step time over all compositions, layouts and batch splits. Times are
whole nanoseconds, so bisection over tau is exact.

Where more pipelines fit than there are microbatches, some would idle, and the knapsack has to count them. A table with
a row per count is large, so most taus are decided without: a price on each pipeline (a Lagrange multiplier) gives a
bound on what the allowed counts get through, and a composition that may already do. The rest take the table, of only
those sizes that can be in a composition that is enough by that bound.

Nodes may stand by where that is faster: messages cost time, layers are few, and more pipelines than microbatches there
cannot be. A size then gets through as much as the best of all sizes up to it, so the same knapsack decides over every
number of nodes at once; what a pipeline has no use for stands by.
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
    _check(templates, num_nodes, num_microbatches, min_pipelines)
    found = _Knapsack(templates, num_nodes, num_microbatches, min_pipelines).best()
    assert found
    return found[1]


class Compositions(NamedTuple):
    """The best composition of all nodes, and the best one of any number of them; often they are the same.

    Args:
        every: Of all nodes.
        fastest: Of some of them, where a step is shorter than with all.
    """

    every: tuple[int, ...]
    fastest: tuple[int, ...]


def compositions(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> Compositions:
    """Return :func:`compose`, with its arguments and errors, and what is faster because some nodes stand by.

    Nodes are in use wherever they cost nothing: all are, if that is as fast as any number of them, and if some stand
    by, as many others are in use as the best step has time for.
    """
    _check(templates, num_nodes, num_microbatches, min_pipelines)
    found = _Knapsack(templates, num_nodes, num_microbatches, min_pipelines).best()
    assert found
    step_ns, every = found
    fastest = every
    if min_pipelines == 1:
        lone_ns, lone = _best_lone(templates, num_nodes, num_microbatches)
        if lone_ns < step_ns:
            step_ns, fastest = lone_ns, lone
    several = max(2, min_pipelines)
    if min(num_microbatches, num_nodes // templates.sizes[0]) >= several:
        faster = _Knapsack(templates, num_nodes, num_microbatches, several, may_idle=True).best(step_ns - 1)
        fastest = faster[1] if faster else fastest
    return Compositions(every, fastest)


def _check(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> None:
    smallest, largest = templates.sizes[0], templates.sizes[-1]
    if min(num_microbatches, num_nodes // smallest) < max(min_pipelines, -(-num_nodes // largest)):
        raise ArgumentError(
            "num_nodes",
            f"be a sum of {min_pipelines} to {num_microbatches} template sizes from {smallest} to {largest}",
            num_nodes,
            "leave nodes out or plan templates for more nodes",
        )


def _best_lone(templates: TemplateSet, num_nodes: int, num_microbatches: int) -> tuple[int, tuple[int, ...]]:
    """Return the step and the size of the only pipeline, of up to so many nodes; ties: the largest."""
    times = (
        (finish_ns(lines(templates.of(size), alone=True), num_microbatches), -size)
        for size in templates.sizes
        if size <= num_nodes
    )
    step_ns, size = min(times)
    return step_ns, (-size,)


class _Corner(NamedTuple):
    """What a composition that is worth most at some price per pipeline gets through, and its number of pipelines."""

    capacity: int
    pipelines: int


class _Knapsack:
    """Compositions of a number of nodes; *limited* ones have no more pipelines than microbatches.

    With ``may_idle``, of up to so many nodes: each size gets through what the best size up to it does. There are sizes
    then beyond those of templates, for nodes that no pipeline has a place for: fewer than in the largest template,
    because as many would make another pipeline, or there are as many pipelines as microbatches.
    """

    def __init__(
        self,
        templates: TemplateSet,
        num_nodes: int,
        num_microbatches: int,
        min_pipelines: int,
        *,
        may_idle: bool = False,
    ) -> None:
        # A pipeline of all nodes is the only one.
        sizes = [size for size in templates.sizes if size <= num_nodes]
        pipelines = [lines(templates.of(size), alone=size == num_nodes and min_pipelines == 1) for size in sizes]
        self._may_idle, self._num_sizes = may_idle, len(sizes)
        if may_idle:
            pipelines += pipelines[-1:] * (min(num_nodes, 2 * sizes[-1] - 1) - sizes[-1])
        self._smallest = templates.sizes[0]
        self._lines = line_table(pipelines)
        self._longest = max(finish_ns(pipeline, num_microbatches) for pipeline in pipelines)
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches
        self._min_pipelines = min_pipelines

    def best(self, most_ns: int | None = None) -> tuple[int, tuple[int, ...]] | None:
        """Return the least step time and its composition, descending; None if it is more than ``most_ns``."""
        if most_ns is not None and not self.is_enough(most_ns):
            return None
        latest = self._longest if most_ns is None else most_ns
        tau = self.least_tau(0, latest, self.is_enough)
        sizes = self.composition(tau)
        if len(sizes) > self._num_microbatches:
            if most_ns is not None and not self.is_enough_limited(most_ns):
                return None
            tau = self.least_tau(tau, latest, self.is_enough_limited)
            sizes = self.composition_limited(tau)
        return tau, self._in_use(sizes, tau) if self._may_idle else sizes

    def _in_use(self, sizes: tuple[int, ...], tau_ns: int) -> tuple[int, ...]:
        """Return how many nodes of each pipeline are in use, descending: as many as there is time for."""
        capacity = np.minimum(self._lines.capacities(tau_ns), self._num_microbatches)
        most = np.maximum.accumulate(capacity)
        indices = [size - self._smallest for size in sizes]
        spare = int(most[indices].sum()) - self._num_microbatches
        idle, used = 0, list[int]()
        for index in indices:
            lacking = most[index] - capacity[: min(index + idle + 1, self._num_sizes)]
            # One that gets through nothing lacks all that its pipeline was chosen for.
            used.append(int(np.flatnonzero((lacking <= spare) & (lacking < most[index]))[-1]))
            spare -= max(0, int(lacking[used[-1]]))
            idle += index - used[-1]
        return tuple(sorted((index + self._smallest for index in used), reverse=True))

    def least_tau(self, low: int, high: int, is_enough: Callable[[int], bool]) -> int:
        """Return the least step time that is enough, if ``high`` is."""
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
        return np.maximum.accumulate(capacity) if self._may_idle else capacity

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
