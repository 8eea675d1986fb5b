"""Which pipelines slow nodes are in, at which of their places, and which of them stand by.

Beside the composition of nodes as fast as profiled (:mod:`.compose`), pipelines with slow nodes are made of a template,
some of the slow nodes, each at one of its places, and others. For a step time tau each of these gets through a known
number of microbatches; so a table over (slow nodes that are decided on, pipelines, other nodes) finds what gets through
most, and bisection over tau the best step. A slow node that is in none of its pipelines stands by.

That is exact for the few nodes that are slow as a rule, but for two simplifications where there are too many ways:
several slow nodes of a large template are put where little is computed instead of anywhere, and of many slow nodes only
those share a pipeline that are about equally slow (:mod:`.slow_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.composition.batch_split import LineTable, lines_of_layouts
from resilient.templates.composition.slow_groups import SlowGroups, num_of_any, short_pipelines
from resilient.templates.composition.slow_lines import Arrangements, Factors, SlowLines, SlowPipeline
from resilient.templates.template import TemplateSet

_GUESSES = 8
"""So many times to look at are guessed, each from what is done by the one before; then halves decide."""
_MOST_CELLS = 2_000_000
_IMPOSSIBLE = -(2**61)
_NEVER = 2**62


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
    within: tuple[int, int],
) -> MixedComposition | None:
    """Return the composition with the shortest step in which slow nodes take part; None if none is short enough.

    Args:
        templates: The job's templates.
        num_fast: Nodes that are not slow. Not all need be in use.
        factors: Of the nodes that are, each above 1.
        num_microbatches: Of a step over all pipelines; also the most pipelines there can be.
        min_pipelines: The fewest pipelines, f + 1; at least 1.
        within: A time that no step is shorter than, in ns, and the longest step of interest.
    """
    slow = tuple(sorted(factors, reverse=True))
    if num_fast + len(slow) < templates.sizes[0]:
        return None
    best: tuple[int, MixedComposition] | None = None
    if min_pipelines == 1 and len(slow) == num_of_any(templates, len(slow)):
        best = _best_lone(templates, num_fast, slow, num_microbatches, within)
        within = within[0], (best[0] - 1 if best else within[1])
    if templates.most_pipelines(num_fast + len(slow), num_microbatches) < 2:
        return best[1] if best else None
    several = _Table(templates, num_fast, slow, num_microbatches, max(2, min_pipelines), within)
    return several.best() or (best[1] if best else None)


def prepare_places(templates: TemplateSet, num_nodes: int) -> None:
    """Do ahead of time what :func:`compose_with_slow` needs, whichever of up to so many nodes are slow, or gone."""
    lines_of_layouts(templates)
    for number in range(1, num_of_any(templates, num_nodes) + 1):
        _arrangements(templates, number, templates.sizes[-1])
    if num_nodes > num_of_any(templates, num_nodes):
        for number in range(1, short_pipelines(templates) + 1):
            _arrangements(templates, number, short_pipelines(templates))


def _best_lone(
    templates: TemplateSet, num_fast: int, slow: Factors, num_microbatches: int, within: tuple[int, int]
) -> tuple[int, MixedComposition] | None:
    found: tuple[int, int, int, MixedComposition] | None = None
    groups = SlowGroups(slow, templates.sizes[0], templates.sizes[-1], templates.sizes[-1], num_fast, are_any=True)
    for number, each in enumerate(_slow_lines(templates, groups, within, alone=True)):
        times = each.table.finish_ns(num_microbatches)[:, 0]
        # Of equal steps the one with fewest nodes.
        for index in np.lexsort((each.pipelines.group, each.sizes, times))[:1].tolist():
            key = int(times[index]), int(each.sizes[index]), number
            if key[0] <= within[1] and (found is None or key < found[:3]):
                found = *key, MixedComposition((each.pipelines.pipeline(index),), ())
    return (found[0], found[3]) if found else None


def _slow_lines(
    templates: TemplateSet, groups: SlowGroups, within: tuple[int, int], *, alone: bool = False
) -> Iterator[SlowLines]:
    """Yield the lines of layouts with each choice of one or more of the slow nodes, where others fill them up."""
    for each in groups.groups:
        number = each.shape[1]
        arrangements = _arrangements(templates, number, groups.largest)
        yield arrangements.lines(each, groups.sizes(number), within, alone=alone)


@lru_cache(maxsize=512)
def _arrangements(templates: TemplateSet, number: int, largest: int) -> Arrangements:
    layouts = templates.layouts[: largest - templates.sizes[0] + 1]
    return Arrangements(list(chain.from_iterable(layouts)), number)


class _Table:
    """What two or more pipelines, some with slow nodes, get through.

    The last row of tables stands for the fewest pipelines allowed or more. Where nodes make more pipelines than there
    are microbatches, tables have a row for each number of pipelines up to that instead; if these would be too large,
    what has too many pipelines is no answer.
    """

    def __init__(
        self,
        templates: TemplateSet,
        num_fast: int,
        slow: Factors,
        num_microbatches: int,
        min_pipelines: int,
        within: tuple[int, int],
    ) -> None:
        self._templates, self._slow, self._num_fast, self._within = templates, slow, num_fast, within
        self._num_microbatches, self._min_pipelines = num_microbatches, min_pipelines
        self._smallest = templates.sizes_beside[0]
        self._fast_sizes = range(self._smallest, min(templates.sizes[-1], num_fast) + 1)
        fit = (num_fast + len(slow)) // self._smallest
        cells = num_microbatches * (num_fast + 1) * len(self._fast_sizes)
        self._counts_all = num_microbatches < fit and cells <= _MOST_CELLS
        self._last_row = num_microbatches if self._counts_all else min_pipelines
        self._groups = SlowGroups.of(templates, num_fast, slow, self._last_row + 1)
        self._width = self._groups.num_columns(num_fast)
        first_size = self._smallest - templates.sizes[0]
        fast = list(map(len, templates.layouts[first_size : first_size + len(self._fast_sizes)]))
        self._slow_lines = list(_slow_lines(templates, self._groups, within))
        others, num_lines = [np.array(self._fast_sizes, dtype=np.int64)], [np.array([0, *fast])]
        # How many kinds there are with each group of slow nodes, which stand together.
        num_kinds = list[Ints]()
        for each in self._slow_lines:
            groups, sizes, counts = each.by_kind()
            num_kinds.append(np.bincount(groups, minlength=len(each.pipelines.groups)))
            others.append(sizes - each.pipelines.places.shape[1])
            num_lines.append(counts)
        self._steps = self._steps_of(np.concatenate((np.array([len(fast)]), *num_kinds)).cumsum())
        # How many nodes that are not slow pipelines of each kind have.
        self._others = np.concatenate(others)
        # Where the lines of each kind begin, and the last ones end.
        self._firsts = np.concatenate(num_lines).cumsum()
        tables = [each.table for each in self._slow_lines]
        if fast:
            first = sum(map(len, templates.layouts[:first_size]))
            tables.insert(0, lines_of_layouts(templates).rows(range(first, first + sum(fast))))
        self._lines = LineTable(*map(np.concatenate, zip(*tables, strict=True)))

    def best(self) -> MixedComposition | None:
        """Return the composition with the shortest step, of those within the times of interest."""
        low, most_ns = self._within
        if self._last_row < self._min_pipelines:
            return None
        by_kind, before, _ = self._done(most_ns)
        num_done, middle, guesses = self._num_done(by_kind), most_ns, _GUESSES
        if num_done < self._num_microbatches:
            return None
        high = min(most_ns, max(low, before))
        while low < high:
            # About as much more is done as there is more time.
            guess = middle + middle * (self._num_microbatches - num_done) // self._num_microbatches
            middle = min(max(low, guess), high - 1) if guesses > 0 and num_done > 0 else (low + high) // 2
            guesses -= 1
            by_kind, before, after = self._done(middle)
            num_done = self._num_done(by_kind)
            if num_done >= self._num_microbatches:
                high = max(low, before)
            else:
                low = after
        found = self._read_back(low)
        return found if len(found.slow) + len(found.fast) <= self._num_microbatches else None

    def _num_done(self, by_kind: Ints) -> int:
        """Return the most microbatches that are got through with all nodes."""
        return int(self._filled(by_kind)[-1, self._min_pipelines :, -1].max())

    def _done(self, tau_ns: int) -> tuple[Ints, int, int]:
        """Return what pipelines of each kind get through, and from when until when they get through no more."""
        fill, slowest, round_size = (column[:, 0] for column in self._lines)
        return compiled(_get_through)(fill, slowest, round_size, self._firsts, tau_ns, self._num_microbatches)

    def _fast(self, by_kind: Ints) -> Ints:
        """Return what pipelines without slow nodes get through, of exactly so many nodes. [pipelines, nodes]"""
        table = np.full((self._last_row + 1, self._num_fast + 1), _IMPOSSIBLE)
        table[0, 0] = 0
        values = by_kind[: len(self._fast_sizes)]
        compiled(_fill_counted)(table, values, self._smallest, not self._counts_all)
        return table

    def _steps_of(self, firsts: Ints) -> Ints:
        """Return how tables are filled in, in order. [steps, 5]

        Of each step the table, that in which the slowest node stands by, that of the nodes which are not in a pipeline
        with it, the first kind of such pipelines, and one past the last.

        Args:
            firsts: The first kind with each group of slow nodes, and one past the last of all.
        """
        choice, without_first, group, rest = self._groups.steps.T
        stands_by = group < 0
        first, end = firsts[group], np.where(stands_by, firsts[group], firsts[group + 1])
        steps = np.stack((choice, without_first, rest, first, end), axis=1)
        return steps[stands_by | (end > first)]

    def _filled(self, by_kind: Ints) -> Ints:
        """Return what gets through most with up to so many other nodes. [tables, pipelines, nodes]"""
        tables = np.empty((self._groups.num_choices, self._last_row + 1, self._width), dtype=np.int64)
        tables[0] = np.maximum.accumulate(self._fast(by_kind), axis=1)[:, -self._width :]
        compiled(_fill_beside)(tables, self._steps, by_kind, self._others, not self._counts_all)
        return tables

    def _read_back(self, tau_ns: int) -> MixedComposition:
        by_kind, _, _ = self._done(tau_ns)
        tables, fast = self._filled(by_kind), self._fast(by_kind)
        number, column = len(tables) - 1, self._width - 1
        row = self._min_pipelines + int(tables[-1, self._min_pipelines :, -1].argmax())
        chosen: list[SlowPipeline] = []
        while number:
            kind, number, row = compiled(_step_back)(
                tables, self._steps, by_kind, self._others, not self._counts_all, number, row, column
            )
            if kind >= 0:
                column -= int(self._others[kind])
                chosen.append(self._pipeline(kind, tau_ns))
        nodes = self._num_fast - (self._width - 1 - column)
        return MixedComposition(tuple(chosen), self._fast_read_back(fast, by_kind, row, nodes))

    def _pipeline(self, kind: int, tau_ns: int) -> SlowPipeline:
        """Return the pipeline of a kind that gets through most."""
        first, end = self._firsts[kind : kind + 2].tolist()
        index = first + int(self._lines.capacities(tau_ns)[first:end].argmax())
        index -= len(self._lines.fill)
        for each in reversed(self._slow_lines):
            index += len(each.sizes)
            if index >= 0:
                return each.pipelines.pipeline(index)
        raise AssertionError("a kind without slow nodes")

    def _fast_read_back(self, fast: Ints, by_kind: Ints, row: int, nodes: int) -> tuple[int, ...]:
        """Walk the table from the most nodes that get through as much to none."""
        most = fast[row, : nodes + 1].max()
        nodes = int(np.flatnonzero(fast[row, : nodes + 1] == most)[-1])
        values = by_kind[: len(self._fast_sizes)]
        chosen: Ints = compiled(_read_counted)(fast, values, self._smallest, not self._counts_all, row, nodes)
        return tuple(sorted(chosen.tolist(), reverse=True))


def _get_through(
    fill: Ints, slowest: Ints, round_size: Ints, firsts: Ints, tau_ns: int, num_microbatches: int
) -> tuple[Ints, int, int]:
    """Return what pipelines of each kind get through by a time, when the last round until then ends, and the next one.

    Args:
        fill: Of the lines, kind by kind.
        slowest: Likewise.
        round_size: Likewise.
        firsts: Where those of each kind begin, and the last ones end.
        tau_ns: The time.
        num_microbatches: The most that one pipeline can get.
    """
    by_kind = np.full(len(firsts) - 1, _IMPOSSIBLE)
    before, after = -_NEVER, _NEVER
    for kind in range(len(by_kind)):
        for line in range(firsts[kind], firsts[kind + 1]):
            rounds = (tau_ns - fill[line]) // slowest[line]
            ends = fill[line] + rounds * slowest[line]
            before, after = max(before, ends), min(after, ends + slowest[line])
            if rounds > 0:
                by_kind[kind] = max(by_kind[kind], min(rounds * round_size[line], num_microbatches))
    return by_kind, before, after


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


def _read_counted(best: Ints, values: Ints, smallest: int, saturates: bool, row: int, nodes: int) -> Ints:
    """Return the sizes that make up a cell of :func:`_fill_counted`; of several choices the largest comes first."""
    chosen, number = np.empty(nodes // smallest, dtype=np.int64), 0
    while nodes:
        index, earlier = min(len(values) - 1, nodes - smallest), row - 1
        while values[index] <= 0 or best[earlier, nodes - smallest - index] + values[index] != best[row, nodes]:
            if earlier < row and saturates and row + 1 == len(best):
                earlier = row
            else:
                index, earlier = index - 1, row - 1
        chosen[number], number = smallest + index, number + 1
        row, nodes = earlier, nodes - smallest - index
    return chosen[:number]


def _fill_beside(tables: Ints, steps: Ints, values: Ints, others: Ints, saturates: bool) -> None:
    """Fill in what is got through beside slow nodes; the last row as of :func:`_fill_counted`.

    Args:
        tables: What is filled in, the first of them is. [tables, pipelines, nodes]
        steps: How, in the order of the tables (:attr:`_Table._steps`).
        values: What a pipeline of each kind gets through.
        others: The nodes that are not slow in one of each kind.
        saturates: Whether the last row counts what has more pipelines.
    """
    _, num_rows, num_columns = tables.shape
    so_far = 0
    for number, without, rest, first, end in steps:
        if number > so_far:
            tables[number] = tables[without]
            so_far = number
        for kind in range(first, end):
            if values[kind] > 0:
                for row in range(num_rows if saturates else num_rows - 1):
                    grown, before = tables[number, min(row + 1, num_rows - 1), others[kind] :], tables[rest, row]
                    for i in range(num_columns - others[kind]):
                        grown[i] = max(grown[i], before[i] + values[kind])


def _step_back(
    tables: Ints, steps: Ints, values: Ints, others: Ints, saturates: bool, number: int, row: int, column: int
) -> tuple[int, int, int]:
    """Return the kind of pipeline that the slowest node is in, and the table and the row that its cell is made of.

    The kind is negative where that node stands by. Of several choices the first step comes first, and of that the
    largest pipeline.

    Args:
        tables: As of :func:`_fill_beside`, as are all others but the cell.
        steps: Likewise.
        values: Likewise.
        others: Likewise.
        saturates: Likewise.
        number: The table of the cell.
        row: Its row.
        column: Its column.
    """
    reached, latest = tables[number, row, column], row if saturates and row + 1 == tables.shape[1] else row - 1
    without = 0
    for step in range(len(steps)):
        if steps[step, 0] != number:
            continue
        _, without, rest, first, end = steps[step]
        for kind in range(end - 1, first - 1, -1):
            for earlier in range(max(row - 1, 0), latest + 1):
                if others[kind] <= column and tables[rest, earlier, column - others[kind]] + values[kind] == reached:
                    return kind, rest, earlier
    return -1, without, row
