"""Which pipelines slow nodes are in, at which of their places, and which of them stand by.

Beside the composition of nodes as fast as profiled (:mod:`.compose`), pipelines with slow nodes are made of a template,
some of the slow nodes, each at one of its places, and others. For a step time tau each of these gets through a known
number of microbatches; so a table over (slow nodes that are decided on, pipelines, other nodes) finds what gets through
most, and bisection over tau the best step. A slow node that is in none of its pipelines stands by.

That is exact for the few nodes that are slow as a rule, but for two simplifications where there are too many ways:
several slow nodes of a large template are put where little is computed instead of anywhere, and only the slowest
:data:`MOST_SLOW` nodes are decided on; what there is of others counts as fast here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import combinations, permutations
from math import fsum, perm
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.composition.batch_split import Line, LineTable, lines
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.template import PipelineTemplate, TemplateSet

MOST_SLOW = 4
"""The most nodes whose pipelines are searched for; half as many where templates have very many sizes."""

_MANY_SIZES = 40
_MOST_ARRANGEMENTS = 120
_MOST_CELLS = 2_000_000
_IMPOSSIBLE = -(2**61)

Factors = tuple[float, ...]


class SlowPipeline(NamedTuple):
    """A pipeline with slow nodes.

    Args:
        template: Its layout.
        factors: For each of its nodes, by how much the stages on it take longer; 1 for any that is not slow.
    """

    template: PipelineTemplate
    factors: Factors


class MixedComposition(NamedTuple):
    """Pipelines with slow nodes, and sizes (descending) of those without."""

    slow: tuple[SlowPipeline, ...]
    fast: tuple[int, ...]


def compose_with_slow(
    templates: TemplateSet,
    num_fast: int,
    factors: Sequence[float],
    num_microbatches: int,
    min_pipelines: int,
    most_ns: int,
) -> MixedComposition | None:
    """Return the composition with the shortest step in which slow nodes take part; None if none is short enough.

    Args:
        templates: The job's templates.
        num_fast: Nodes that are not slow. Not all need be in use.
        factors: Of the nodes that are, each above 1; no more than :data:`MOST_SLOW` are looked at.
        num_microbatches: Of a step over all pipelines; also the most pipelines there can be.
        min_pipelines: The fewest pipelines, f + 1; at least 1.
        most_ns: The longest step of interest.
    """
    slow = tuple(sorted(factors, reverse=True))
    best: tuple[int, MixedComposition] | None = None
    if min_pipelines == 1:
        best = _best_lone(templates, num_fast, slow, num_microbatches, most_ns)
        most_ns = best[0] - 1 if best else most_ns
    several = _Table(templates, num_fast, slow, num_microbatches, max(2, min_pipelines))
    return several.best(most_ns) or (best[1] if best else None)


def searched(templates: TemplateSet, num_slow: int) -> int:
    """Return how many slow nodes, the slowest ones, are decided on."""
    return min(num_slow, MOST_SLOW if len(templates.sizes) <= _MANY_SIZES else MOST_SLOW // 2)


def _best_lone(
    templates: TemplateSet, num_fast: int, slow: Factors, num_microbatches: int, most_ns: int
) -> tuple[int, MixedComposition] | None:
    found: tuple[int, MixedComposition] | None = None
    for size in templates.sizes:
        for choices in _choices(templates, size, _groups_of_size(slow, size, num_fast), alone=True).values():
            for pipeline, line in choices:
                step_ns = line.finish_ns(num_microbatches)
                if step_ns <= most_ns and (found is None or step_ns < found[0]):
                    found = step_ns, MixedComposition((pipeline,), ())
    return found


def _groups(slow: Factors) -> list[Factors]:
    """Return the different choices of one or more of the slow nodes, each descending."""
    return list(dict.fromkeys(group for number in range(1, len(slow) + 1) for group in combinations(slow, number)))


def _groups_of_size(slow: Factors, size: int, num_fast: int) -> list[Factors]:
    """Return those that a pipeline of so many nodes can have."""
    return [group for group in _groups(slow) if size - num_fast <= len(group) <= size]


def _choices(
    templates: TemplateSet, size: int, groups: Sequence[Factors], *, alone: bool = False
) -> dict[Factors, list[tuple[SlowPipeline, Line]]]:
    """Return the layouts of a size with the slow nodes of each group at any of their places, and what they take.

    Those that another one is as fast as, whatever the number of microbatches, are left out.
    """
    rows = [(layout, _Rows.of(layout)) for layout in templates.of(size)]
    return {group: _fastest(rows, group, alone=alone) for group in groups}


class _Rows(NamedTuple):
    """The rows of a layout: the node of each, what it takes for a round, and what of that fills the pipeline."""

    node: Ints
    busy: Floats
    filling: Floats

    @classmethod
    def of(cls, layout: PipelineTemplate) -> _Rows:
        node, busy, filling = zip(
            *(
                (row[0].node_index, fsum(s.stage_ms for s in row), fsum(s.filling_ms for s in row))
                for row in layout.rows
            ),
            strict=True,
        )
        return cls(np.array(node, dtype=np.int64), np.array(busy), np.array(filling))


def _fastest(
    rows: Sequence[tuple[PipelineTemplate, _Rows]], group: Factors, *, alone: bool
) -> list[tuple[SlowPipeline, Line]]:
    arranged = [_arranged(layout, of, group) for layout, of in rows]
    times = np.concatenate(
        [_lines_ms(layout, of, each, alone=alone) for (layout, of), each in zip(rows, arranged, strict=True)]
    )
    fill, slowest = np.rint(times * 1e6).astype(np.int64).T
    slowest = np.maximum(slowest, 1)
    layouts = np.repeat(np.arange(len(rows)), [len(each) for each in arranged])
    firsts = np.concatenate(([0], np.cumsum([len(each) for each in arranged])))
    round_size = np.array([layout.round_size for layout, _ in rows])[layouts]
    found: list[tuple[SlowPipeline, Line]] = []
    for size in np.unique(round_size):
        order = np.flatnonzero(round_size == size)
        order = order[np.lexsort((fill[order], slowest[order]))]
        least = np.minimum.accumulate(fill[order])
        for index in order[np.diff(least, prepend=least[0] + 1) < 0].tolist():
            number = int(layouts[index])
            factors = arranged[number][index - firsts[number]]
            line = Line(int(fill[index]), int(slowest[index]), int(size))
            found.append((SlowPipeline(rows[number][0], tuple(factors.tolist())), line))
    return found


def _arranged(layout: PipelineTemplate, rows: _Rows, group: Factors) -> Floats:
    """Return the factors of a layout's nodes with slow ones at all places; where that is too much, where least is done.

    [arrangements, nodes]
    """
    if len(group) == 1 or perm(layout.num_nodes, len(group)) <= _MOST_ARRANGEMENTS:
        places = _anywhere(layout.num_nodes, len(group))
    else:
        longest, total = np.zeros(layout.num_nodes), np.zeros(layout.num_nodes)
        np.maximum.at(longest, rows.node, rows.busy)
        np.add.at(total, rows.node, rows.busy)
        places = np.stack([np.argsort(busy, kind="stable")[: len(group)] for busy in (longest, total)])
    arranged = np.ones((len(places), layout.num_nodes))
    np.put_along_axis(arranged, places, np.broadcast_to(np.array(group), places.shape), axis=1)
    return arranged


@cache
def _anywhere(num_nodes: int, number: int) -> Ints:
    return np.array(list(permutations(range(num_nodes), number)), dtype=np.int64)


def _lines_ms(layout: PipelineTemplate, rows: _Rows, arranged: Floats, *, alone: bool) -> Floats:
    """Return :meth:`PipelineTemplate.line_ms` for each row of factors; chains all at once. [arrangements, 2]"""
    if layout.lanes != (CHAIN,):
        return np.array([layout.line_ms(factors.tolist(), alone=alone) for factors in arranged])
    slowed = arranged[:, rows.node]
    busy, filling = slowed * rows.busy, slowed * rows.filling
    slowest = busy.max(axis=1)
    its_own = np.where(busy == slowest[:, None], filling, 0.0).max(axis=1)
    fill = (filling.sum(axis=1) - its_own) / layout.num_chunks
    return np.stack((fill + (layout.lone_sync_ms if alone else layout.sync_ms), slowest), axis=1)


class _Table:
    """What two or more pipelines, some with slow nodes, get through.

    The last row of tables stands for the fewest pipelines allowed or more. Where nodes make more pipelines than there
    are microbatches, tables have a row for each number of pipelines up to that instead; if these would be too large,
    what has too many pipelines is no answer.
    """

    def __init__(
        self, templates: TemplateSet, num_fast: int, slow: Factors, num_microbatches: int, min_pipelines: int
    ) -> None:
        self._templates, self._slow, self._num_fast = templates, slow, num_fast
        self._num_microbatches, self._min_pipelines = num_microbatches, min_pipelines
        self._fast_sizes = range(templates.sizes[0], min(templates.sizes[-1], num_fast) + 1)
        fit = (num_fast + len(slow)) // templates.sizes[0]
        cells = num_microbatches * (num_fast + 1) * len(self._fast_sizes)
        self._counts_all = num_microbatches < fit and cells <= _MOST_CELLS
        self._last_row = num_microbatches if self._counts_all else min_pipelines
        # Pipelines with slow nodes have so many others at most.
        self._width = min(num_fast, len(slow) * templates.sizes[-1]) + 1
        self._kinds: list[tuple[Factors, int]] = [((), size) for size in self._fast_sizes]
        of_kinds = [list(lines(templates.of(size))) for size in self._fast_sizes]
        self._pipelines: dict[tuple[Factors, int], list[SlowPipeline]] = {}
        for size in templates.sizes:
            for group, choices in _choices(templates, size, _groups_of_size(slow, size, num_fast)).items():
                pipelines, their_lines = zip(*choices, strict=True)
                self._pipelines[group, size] = list(pipelines)
                self._kinds.append((group, size))
                of_kinds.append(list(their_lines))
        self._firsts = np.cumsum([0, *map(len, of_kinds)])[:-1]
        every = np.array([line for of_kind in of_kinds for line in of_kind], dtype=np.int64).reshape(-1, 3)
        self._lines = LineTable(*(np.ascontiguousarray(column[:, None]) for column in every.T))

    def best(self, most_ns: int) -> MixedComposition | None:
        """Return the composition with the shortest step, up to ``most_ns``."""
        if self._last_row < self._min_pipelines or not self._kinds or not self._is_enough(most_ns):
            return None
        found = self._read_back(self._lines.least_time(self._is_enough, most_ns))
        return found if len(found.slow) + len(found.fast) <= self._num_microbatches else None

    def _is_enough(self, tau_ns: int) -> bool:
        filled = self._filled(self._by_kind(tau_ns))
        return filled[self._slow][self._min_pipelines :, -1].max() >= self._num_microbatches

    def _by_kind(self, tau_ns: int) -> Ints:
        """Return what pipelines of each kind get through."""
        capacity = np.maximum.reduceat(self._lines.capacities(tau_ns), self._firsts)
        return np.where(capacity > 0, np.minimum(capacity, self._num_microbatches), _IMPOSSIBLE)

    @cached_property
    def _of_group(self) -> dict[Factors, list[int]]:
        """The kinds with each group of slow nodes."""
        found: dict[Factors, list[int]] = {}
        for index, (group, _) in enumerate(self._kinds):
            found.setdefault(group, []).append(index)
        return found

    def _fast(self, by_kind: Ints) -> Ints:
        """Return what pipelines without slow nodes get through, of exactly so many nodes. [pipelines, nodes]"""
        table = np.full((self._last_row + 1, self._num_fast + 1), _IMPOSSIBLE)
        table[0, 0] = 0
        values = by_kind[: len(self._fast_sizes)]
        compiled(_fill_counted)(table, values, self._templates.sizes[0], not self._counts_all)
        return table

    def _filled(self, by_kind: Ints) -> dict[Factors, Ints]:
        """Return, by the slow nodes that are decided on, what gets through most with up to so many others."""
        tables: dict[Factors, Ints] = {(): np.maximum.accumulate(self._fast(by_kind), axis=1)[:, -self._width :]}
        for decided in _groups(self._slow):
            table = tables[decided[1:]].copy()
            for group, rest in _with_first(decided):
                before = tables[rest]
                for kind in self._of_group.get(group, ()):
                    value, others = by_kind[kind], self._kinds[kind][1] - len(group)
                    if value > 0 and others < self._width:
                        grown, so_far = table[:, others:], before[:, : self._width - others] + value
                        np.maximum(grown[1:], so_far[:-1], out=grown[1:])
                        if not self._counts_all:
                            np.maximum(grown[-1], so_far[-1], out=grown[-1])
            tables[decided] = table
        return tables

    def _read_back(self, tau_ns: int) -> MixedComposition:
        by_kind = self._by_kind(tau_ns)
        tables, fast = self._filled(by_kind), self._fast(by_kind)
        decided, column = self._slow, self._width - 1
        row = self._min_pipelines + int(tables[decided][self._min_pipelines :, -1].argmax())
        chosen: list[SlowPipeline] = []
        while decided:
            step = self._step_back(tables, by_kind, decided, row, column)
            if step is None:
                decided = decided[1:]
                continue
            kind, decided, row = step
            group, size = self._kinds[kind]
            column -= size - len(group)
            end = self._firsts[kind + 1] if kind + 1 < len(self._firsts) else None
            capacity = self._lines.capacities(tau_ns)[self._firsts[kind] : end]
            chosen.append(self._pipelines[group, size][int(capacity.argmax())])
        nodes = self._num_fast - (self._width - 1 - column)
        return MixedComposition(tuple(chosen), self._fast_read_back(fast, by_kind, row, nodes))

    def _step_back(
        self, tables: dict[Factors, Ints], by_kind: Ints, decided: Factors, row: int, column: int
    ) -> tuple[int, Factors, int] | None:
        """Return the kind of pipeline that the slowest node is in, who is left, and the row; None if it stands by."""
        for group, rest in _with_first(decided):
            for kind in reversed(self._of_group.get(group, ())):
                before = column - (self._kinds[kind][1] - len(group))
                for earlier in self._rows_before(row):
                    if before >= 0 and tables[rest][earlier, before] + by_kind[kind] == tables[decided][row, column]:
                        return kind, rest, earlier
        return None

    def _rows_before(self, row: int) -> list[int]:
        return [
            earlier
            for earlier in (row - 1, row)
            if 0 <= earlier < row or (row == self._last_row and not self._counts_all)
        ]

    def _fast_read_back(self, fast: Ints, by_kind: Ints, row: int, nodes: int) -> tuple[int, ...]:
        """Walk the table from the most nodes that get through as much to none."""
        most = fast[row, : nodes + 1].max()
        nodes = int(np.flatnonzero(fast[row, : nodes + 1] == most)[-1])
        sizes: list[int] = []
        while nodes:
            size, row = next(
                (size, earlier)
                for size, value in zip(
                    reversed(self._fast_sizes), by_kind[: len(self._fast_sizes)][::-1].tolist(), strict=True
                )
                for earlier in self._rows_before(row)
                if size <= nodes and value > 0 and fast[earlier, nodes - size] + value == fast[row, nodes]
            )
            sizes.append(size)
            nodes -= size
        return tuple(sorted(sizes, reverse=True))


def _with_first(decided: Factors) -> Iterator[tuple[Factors, Factors]]:
    """Yield each choice of nodes with the slowest one, and the others."""
    seen: set[Factors] = set()
    for number in reversed(range(len(decided))):
        for others in combinations(range(1, len(decided)), number):
            group = tuple(decided[index] for index in (0, *others))
            if group not in seen:
                seen.add(group)
                yield group, tuple(factor for index, factor in enumerate(decided) if index and index not in others)


def _fill_counted(best: Ints, values: Ints, smallest: int, saturates: bool) -> None:
    """Fill in a table of which only column 0 is known; the last row counts what has more pipelines, or nothing has."""
    num_rows, num_columns = best.shape
    for nodes in range(num_columns - smallest):
        num_sizes = min(len(values), num_columns - nodes - smallest)
        for row in range(num_rows):
            so_far = best[row, nodes]
            if so_far < 0 or (row + 1 == num_rows and not saturates):
                continue
            grown = best[min(row + 1, num_rows - 1), nodes + smallest :]
            for i in range(num_sizes):
                if values[i] > 0:
                    grown[i] = max(grown[i], so_far + values[i])
