"""The lines of pipelines with slow nodes at any of their places, for many layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from math import perm
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.composition.batch_split import LineTable
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.template import PipelineTemplate

_MOST_ARRANGEMENTS = 120

Factors = tuple[float, ...]


class SlowPipeline(NamedTuple):
    """A pipeline with slow nodes.

    Args:
        layout: Number of its layout among all of a set, size by size. Equal sets may be different objects.
        factors: For each of its nodes, by how much the stages on it take longer; 1 for any that is not slow.
    """

    layout: int
    factors: Factors


class SlowLines(NamedTuple):
    """Lines of layouts with as many slow nodes: by group of these, size, microbatches of a round, and length of rounds.

    Args:
        pipelines: What the lines are of.
        table: The lines. [lines, 1]
        sizes: Nodes of the layout of each. [lines]
    """

    pipelines: _Pipelines
    table: LineTable
    sizes: Ints

    def by_kind(self) -> tuple[Ints, Ints, Ints]:
        """Return the number of each kind's group of slow nodes, its size, and how many lines there are, in order."""
        group, sizes = self.pipelines.group, self.sizes
        differs = np.ones(len(group), dtype=np.bool_)
        differs[1:] = (group[1:] != group[:-1]) | (sizes[1:] != sizes[:-1])
        first = np.flatnonzero(differs)
        return group[first], sizes[first], np.diff(np.append(first, len(group)))


class _Pipelines(NamedTuple):
    """Pipelines of layouts with as many slow nodes. They are made when they are asked for: few are.

    Args:
        layouts: Layouts of a set, size by size from the first on.
        groups: The factors of the slow nodes of each group. [groups, slow nodes]
        group: Which of the groups each pipeline has. [pipelines]
        layout: Which of the layouts each pipeline has. [pipelines]
        places: Where its slow nodes are. [pipelines, slow nodes]
    """

    layouts: Sequence[PipelineTemplate]
    groups: Floats
    group: Ints
    layout: Ints
    places: Ints

    def pipeline(self, index: int) -> SlowPipeline:
        """Return one of them."""
        layout = int(self.layout[index])
        factors = np.ones(self.layouts[layout].num_nodes)
        factors[self.places[index]] = self.groups[self.group[index]]
        return SlowPipeline(layout, tuple(factors.tolist()))


class Arrangements:
    """Layouts with a number of slow nodes at any of their places; where that is too much, where least is done.

    Args:
        layouts: Of a set, size by size from the first on; of a size those with equal rounds stand together.
        number: How many nodes of each are slow; there are none of layouts with fewer nodes.
    """

    def __init__(self, layouts: Sequence[PipelineTemplate], number: int) -> None:
        nowhere = np.empty((0, number), dtype=np.int64)
        places = [_places(layout, number) if layout.num_nodes >= number else nowhere for layout in layouts]
        self._layouts = layouts
        self._layout = np.repeat(np.arange(len(layouts)), [len(each) for each in places])
        self._places = np.concatenate(places)
        self._sizes = np.array([layout.num_nodes for layout in layouts])
        self._sizes_of_all = self._sizes[self._layout]
        self._round_sizes = np.array([layout.round_size for layout in layouts])
        differs = (np.diff(self._sizes) != 0) | (np.diff(self._round_sizes) != 0)
        self._kind = np.concatenate(([0], differs.cumsum()))[self._layout]
        self._are_chains = all(layout.lanes == (CHAIN,) for layout in layouts)
        self._nodes = _Nodes.of(layouts)
        self._num_chunks = np.array([layout.num_chunks for layout in layouts])[self._layout]
        self._sync_ms = np.array([(layout.sync_ms, layout.lone_sync_ms) for layout in layouts])[self._layout].T

    def lines(self, groups: Floats, sizes: range, within: tuple[int, int], *, alone: bool) -> SlowLines:
        """Return the lines of layouts of some numbers of nodes, with slow nodes of each of some groups.

        Args:
            groups: Their factors. [groups, slow nodes]
            sizes: The numbers of nodes.
            within: The step's times of interest, in ns, from the first to the last. Of those of a group and a size the
                lines are returned that get through most at one of them.
            alone: Whether a pipeline is the only one of a plan.
        """
        first, end = np.searchsorted(self._sizes_of_all, (sizes.start, sizes.stop)).tolist()
        looked_at = slice(first, end)
        fill, slowest = self._times_ns(groups, looked_at, alone=alone)
        kept: Ints = compiled(_get_through_most)(fill, slowest, self._kind[looked_at], *within)
        group, index = np.divmod(kept, max(1, end - first))
        layout = self._layout[looked_at][index]
        columns = fill[kept], slowest[kept], self._round_sizes[layout]
        return SlowLines(
            _Pipelines(self._layouts, groups, group, layout, self._places[looked_at][index]),
            LineTable(*(np.ascontiguousarray(column[:, None]) for column in columns)),
            self._sizes[layout],
        )

    def _times_ns(self, groups: Floats, looked_at: slice, *, alone: bool) -> Ints:
        """Return lines (:meth:`PipelineTemplate.line_ms`) of arrangements of each group; chains all at once. [2, lines]

        A round counts for 1 ns at least.
        """
        layout, places = self._layout[looked_at], self._places[looked_at]
        if self._are_chains:
            more = self._num_chunks[looked_at], self._sync_ms[int(alone), looked_at]
            return compiled(_chain_times)(layout, places, groups, *self._nodes, *more)
        every = [
            _Pipelines(self._layouts, groups, np.full(len(layout), group), layout, places).pipeline(index)
            for group in range(len(groups))
            for index in range(len(layout))
        ]
        times = [self._layouts[layout].line_ms(factors, alone=alone) for layout, factors in every]
        fill, slowest = np.rint(np.array(times).reshape(-1, 2).T * 1e6).astype(np.int64)
        return np.array((fill, np.maximum(slowest, 1)))


def _places(layout: PipelineTemplate, number: int) -> Ints:
    """Return where slow nodes may be. [arrangements, slow nodes]"""
    if number == 1 or perm(layout.num_nodes, number) <= _MOST_ARRANGEMENTS:
        return _anywhere(layout.num_nodes, number)
    return layout.idlest_nodes[:, :number]


@cache
def _anywhere(num_nodes: int, number: int) -> Ints:
    return np.array(list(permutations(range(num_nodes), number)), dtype=np.int64)


class _Nodes(NamedTuple):
    """What the nodes of layouts do, one layout after the other.

    Args:
        first: The first node of each layout, and behind all of them.
        total_ms: What the rows of each layout fill.
        filling_ms: What those of each node do.
        busy_ms: What the slowest row of each node takes.
        its_own_ms: What that fills.
        slowest_first: The nodes of each layout by their slowest row; of equal ones those that fill more come first.
    """

    first: Ints
    total_ms: Floats
    filling_ms: Floats
    busy_ms: Floats
    its_own_ms: Floats
    slowest_first: Ints

    @classmethod
    def of(cls, layouts: Sequence[PipelineTemplate]) -> _Nodes:
        """Return those of some layouts."""
        sizes = np.array([layout.num_nodes for layout in layouts])
        first = sizes.cumsum() - sizes
        node, busy, filling = map(np.concatenate, zip(*(layout.row_times for layout in layouts), strict=True))
        layout = np.repeat(np.arange(len(layouts)), [len(layout.rows) for layout in layouts])
        node += first[layout]
        slowest = np.lexsort((filling, busy, node))
        slowest = slowest[np.append(np.diff(node[slowest]) != 0, True)]
        busy_of, its_own = busy[slowest], filling[slowest]
        order = np.lexsort((-its_own, -busy_of, np.repeat(first, sizes)))
        return cls(
            first=np.append(first, sizes.sum()),
            total_ms=np.bincount(layout, filling).astype(np.float64),
            filling_ms=np.bincount(node, filling).astype(np.float64),
            busy_ms=busy_of,
            its_own_ms=its_own,
            slowest_first=order - np.repeat(first, sizes),
        )


def _chain_times(
    layout: Ints,
    places: Ints,
    groups: Floats,
    first: Ints,
    total_ms: Floats,
    filling_ms: Floats,
    busy_ms: Floats,
    its_own_ms: Floats,
    slowest_first: Ints,
    num_chunks: Ints,
    sync_ms: Floats,
) -> Ints:
    """Return of each group and arrangement the time beside its rounds, and of one round, in ns. [2, groups x layouts]

    Args:
        layout: Of each arrangement.
        places: Of the slow nodes in it. [arrangements, slow nodes]
        groups: The factors of the slow nodes. [groups, slow nodes]
        first: As of :class:`_Nodes`, as are all others.
        total_ms: Likewise.
        filling_ms: Likewise.
        busy_ms: Likewise.
        its_own_ms: Likewise.
        slowest_first: Likewise.
        num_chunks: Of the layout of each arrangement.
        sync_ms: What it takes to sum the gradients of each.
    """
    times, num_slow = np.empty((2, len(groups) * len(layout)), dtype=np.int64), places.shape[1]
    for index in range(len(layout)):
        begin, end = first[layout[index]], first[layout[index] + 1]
        slowest = its_own = 0.0
        for rank in range(min(num_slow + 1, end - begin)):
            node = slowest_first[begin + rank]
            is_slow = False
            for number in range(num_slow):
                is_slow = is_slow or places[index, number] == node
            if not is_slow:
                slowest, its_own = busy_ms[begin + node], its_own_ms[begin + node]
                break
        for group in range(len(groups)):
            total, most, of_most = total_ms[layout[index]], slowest, its_own
            for number in range(num_slow):
                node, factor = begin + places[index, number], groups[group, number]
                total += (factor - 1.0) * filling_ms[node]
                busy, filling = busy_ms[node] * factor, its_own_ms[node] * factor
                if busy > most:
                    most, of_most = busy, filling
                elif busy == most:
                    of_most = max(of_most, filling)
            at = group * len(layout) + index
            times[0, at] = np.rint(((total - of_most) / num_chunks[index] + sync_ms[index]) * 1e6)
            times[1, at] = max(1, np.int64(np.rint(most * 1e6)))
    return times


def _get_through_most(fill: Ints, slowest: Ints, kinds: Ints, low_ns: int, high_ns: int) -> Ints:
    """Return the lines that of their kind get through most rounds, one at least, at some time from ``low_ns`` on.

    They are those that are done first with some number of rounds, from what is done by ``low_ns`` to what is by
    ``high_ns``. One that is done first with so many, and not with more of them, is behind one with shorter rounds.

    Args:
        fill: Of the lines, of one group after the other.
        slowest: Likewise.
        kinds: Of the lines of each group; those of a kind stand together.
        low_ns: The first time of interest.
        high_ns: The last.
    """
    kept, number, first = np.empty(len(fill), dtype=np.int64), 0, 0
    while first < len(fill):
        end, rounds, most = first, 1, 0
        at, of_group = first % len(kinds), first - first % len(kinds)
        while end < of_group + len(kinds) and kinds[end - of_group] == kinds[at]:
            if fill[end] + (rounds + 1) * slowest[end] <= low_ns:  # dividing takes longer
                rounds = (low_ns - fill[end]) // slowest[end]
            if fill[end] + (most + 1) * slowest[end] <= high_ns:
                most = (high_ns - fill[end]) // slowest[end]
            end += 1
        while rounds <= most:
            best = first
            for line in range(first + 1, end):
                done, best_done = fill[line] + rounds * slowest[line], fill[best] + rounds * slowest[best]
                if done < best_done or (done == best_done and slowest[line] < slowest[best]):
                    best = line
            kept[number], number = best, number + 1
            rounds = most + 1
            for line in range(first, end):
                if slowest[line] < slowest[best]:
                    rounds = min(rounds, (fill[line] - fill[best]) // (slowest[best] - slowest[line]) + 1)
        first = end
    return kept[:number].copy()
