"""Which templates, and how many pipelines of each, for a number of nodes.

For a step time tau, a pipeline of i nodes gets through ``c_i(tau)`` microbatches, with whichever of its layouts does
most: the greatest ``floor((tau - fill) / slowest) round``. A knapsack over nodes and pipelines finds the composition
that gets through most; the least tau with enough is the best step time over all compositions, layouts and batch splits.
Times are whole nanoseconds, so bisection over tau is exact.

Nodes may stand by where that is faster: messages cost time, layers are few, and more pipelines than microbatches there
cannot be. A size then gets through as much as the best of all sizes up to it, so the same knapsack decides over every
number of nodes at once; what a pipeline has no use for stands by.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.composition.batch_split import (
    LineTable,
    least_lines_of_sizes,
    lines,
    lines_of_sizes,
    lone_lines_of_sizes,
)
from resilient.templates.template import TemplateSet

if TYPE_CHECKING:  # it loads numba, and most processes that import the planner never compose
    from resilient.templates.composition.knapsack import Composed

_NEVER = 2**62
"""Longer than any step, in ns."""


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
    return _best_of_all(templates, num_nodes, num_microbatches, min_pipelines)[1]


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
    step_ns, every = _best_of_all(templates, num_nodes, num_microbatches, min_pipelines)
    fastest = every
    if min_pipelines == 1:
        lone_ns, lone = _best_lone(templates, num_nodes, num_microbatches)
        if lone_ns < step_ns:
            step_ns, fastest = lone_ns, lone
    several = max(2, min_pipelines)
    if templates.most_pipelines(num_nodes, num_microbatches) >= several:
        faster = _Knapsack(templates, num_nodes, num_microbatches, several, may_idle=True).best(step_ns - 1)
        fastest = faster[1] if faster else fastest
    return Compositions(every, fastest)


@lru_cache(maxsize=1024)
def least_step_ns(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> int:
    """Return a time that a step takes at least, with :func:`compose`'s arguments; more than any where there is none.

    That holds for any number of nodes up to ``num_nodes``, whichever of them are slow, and by how much. There must be a
    place for all of them.
    """
    least_ns = _NEVER
    if min_pipelines == 1 and num_nodes >= templates.sizes[0]:
        alone = least_lines_of_sizes(templates, alone=True).finish_ns(num_microbatches)
        least_ns = int(alone[: num_nodes - templates.sizes[0] + 1].min())
    several = max(2, min_pipelines)
    if templates.most_pipelines(num_nodes, num_microbatches) >= several:
        table = least_lines_of_sizes(templates, alone=False)
        least = _Knapsack(templates, num_nodes, num_microbatches, several, may_idle=True, line_table=table).least_ns()
        least_ns = min(least_ns, least)
    return least_ns


def _check(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> None:
    smallest, largest = templates.sizes[0], templates.sizes[-1]
    if templates.most_pipelines(num_nodes, num_microbatches) < max(min_pipelines, -(-num_nodes // largest)):
        raise ArgumentError(
            "num_nodes",
            f"be a sum of {min_pipelines} to {num_microbatches} template sizes from {smallest} to {largest}",
            num_nodes,
            "leave nodes out or plan templates for more nodes",
        )


def _best_of_all(
    templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int
) -> tuple[int, tuple[int, ...]]:
    """Return the least step time of all nodes, and its composition."""
    if num_nodes not in templates.sizes_beside and num_nodes in templates.sizes:
        alone = lone_lines_of_sizes(templates).rows([num_nodes - templates.sizes[0]])
        return int(alone.finish_ns(num_microbatches).min()), (num_nodes,)
    found = _Knapsack(templates, num_nodes, num_microbatches, min_pipelines).best()
    assert found
    return found


def _best_lone(templates: TemplateSet, num_nodes: int, num_microbatches: int) -> tuple[int, tuple[int, ...]]:
    """Return the step and the size of the only pipeline, of up to so many nodes; ties: the largest."""
    each = lone_lines_of_sizes(templates).finish_ns(num_microbatches).min(axis=1)
    of_last = each[: num_nodes - templates.sizes[0] + 1][::-1]
    last = int(of_last.argmin())
    return int(of_last[last]), (templates.sizes[: len(of_last)][::-1][last],)


class _Knapsack:
    """Compositions of a number of nodes, of no more pipelines than microbatches.

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
        line_table: LineTable | None = None,
    ) -> None:
        sizes = templates.sizes_beside
        self._smallest, first = sizes[0], sizes[0] - templates.sizes[0]
        self._may_idle, self._num_sizes = may_idle, min(len(sizes), num_nodes - self._smallest + 1)
        largest = self._smallest + self._num_sizes - 1
        num_idle = min(num_nodes, 2 * largest - 1) - largest if may_idle else 0
        table = (line_table or lines_of_sizes(templates)).rows(
            first + np.minimum(np.arange(self._num_sizes + num_idle), self._num_sizes - 1)
        )
        if largest == num_nodes and min_pipelines == 1:  # a pipeline of all nodes is the only one
            alone = [line.fill_ns for line in lines(templates.of(largest), alone=True)]
            table.fill[-1] = alone[-1]
            table.fill[-1, : len(alone)] = alone
        self._lines = table
        self._longest = int(table.finish_ns(num_microbatches).min(axis=1).max())
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches
        self._min_pipelines = min_pipelines
        self._most_pipelines = templates.most_pipelines(num_nodes, num_microbatches)

    @cached_property
    def _asked(self) -> Composed:
        from resilient.templates.composition.knapsack import Composed

        bounds = self._most_pipelines, self._min_pipelines, self._num_nodes, self._num_microbatches
        return Composed(*self._lines, self._smallest, self._may_idle, *bounds)

    def best(self, most_ns: int | None = None) -> tuple[int, tuple[int, ...]] | None:
        """Return the least step time and its composition, descending; None if it is more than ``most_ns``."""
        if most_ns is not None and not self.is_enough(most_ns):
            return None
        tau = self.least_ns(most_ns)
        sizes = self._composition(tau)
        return tau, self._in_use(sizes, tau) if self._may_idle else sizes

    def least_ns(self, most_ns: int | None = None) -> int:
        """Return the least step time; ``most_ns`` must be enough."""
        from resilient.templates.composition.knapsack import least_step

        return least_step(self._asked, self._longest if most_ns is None else most_ns)

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

    def is_enough(self, tau_ns: int) -> bool:
        """Return whether a composition gets through all microbatches in a time."""
        from resilient.templates.composition.knapsack import is_enough

        return is_enough(self._asked, tau_ns)

    def _capacity(self, tau_ns: int) -> Ints:
        """Return what a pipeline of each number of nodes, from 0 on, gets through."""
        from resilient.templates.composition.knapsack import IMPOSSIBLE

        capacity = self._lines.capacities(tau_ns)
        capacity[capacity < 1] = IMPOSSIBLE
        if self._may_idle:
            capacity = np.maximum.accumulate(capacity)
        return np.concatenate((np.full(self._smallest, IMPOSSIBLE), capacity))

    def _composition(self, tau_ns: int) -> tuple[int, ...]:
        """Return the best composition, descending."""
        from resilient.templates.composition.knapsack import best_sizes

        bounds = self._most_pipelines, self._min_pipelines, self._num_nodes, self._num_microbatches
        return tuple(best_sizes(self._capacity(tau_ns), self._smallest, *bounds).tolist())
