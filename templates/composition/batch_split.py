"""How the step's microbatches are split over pipelines of unequal speed.

A pipeline is described by its *lines*: of each layout that its nodes could take, the time a step costs beside its
microbatches (fill), the time of one round of microbatches more (slowest), and how many these are (1, unless stages are
sharded). It takes the layout that suits its share, so m microbatches take ``min(fill + ceil(m / round) slowest)``: a
time that grows with m, and all that the split needs to know.

Which split is best: the step ends with the latest pipeline, so the latest finish must be as early as can be; then the
second latest, then the third, and so on (lexicographically smallest finishing times, latest first). No pipeline then
finishes later than the split of the others demands. The variance of the finishing times, which Oobleck minimises, is
no better guide to the second place: to lower it, pipelines that are done early would be given slower work. Where rounds
have several microbatches, the latest finish is as early as can be, and as few pipelines as can be finish then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.durations import nanoseconds
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.template import PipelineTemplate, TemplateSet


class Line(NamedTuple):
    """The time of a layout, by its microbatches.

    Args:
        fill_ns: Of a step, beside its microbatches.
        slowest_ns: Of one round of them.
        round_size: Microbatches of a round.
    """

    fill_ns: int
    slowest_ns: int
    round_size: int = 1

    def finish_ns(self, num_microbatches: int) -> int:
        """Return the time of a step with so many microbatches."""
        return self.fill_ns + -(-num_microbatches // self.round_size) * self.slowest_ns


Lines = tuple[Line, ...]
"""The layouts among which a pipeline may choose, one or more."""


class LineTable(NamedTuple):
    """The lines of several pipelines. Each [pipelines, most lines]; rows are filled up with a pipeline's last line."""

    fill: Ints
    slowest: Ints
    round_size: Ints

    def rows(self, indices: Sequence[int] | Ints) -> LineTable:
        """Return a table of some of the rows, in this order."""
        chosen = np.asarray(indices)
        return LineTable(*(column[chosen] for column in self))

    def with_lines(self, more: Sequence[Line]) -> LineTable:
        """Return the table with rows of one line each behind it."""
        added = np.array(more, dtype=np.int64).T[:, :, None].repeat(self.fill.shape[1], axis=2)
        return LineTable(*map(np.concatenate, zip(self, added, strict=True)))

    def capacities(self, tau_ns: int) -> Ints:
        """Return how many microbatches each pipeline gets through by ``tau_ns``; below 1 means none. [pipelines]"""
        return ((tau_ns - self.fill) // self.slowest * self.round_size).max(axis=1)

    def finish_ns(self, num_microbatches: int) -> Ints:
        """Return the time of a step with so many microbatches, by line. [pipelines, most lines]"""
        return self.fill + -(-num_microbatches // self.round_size) * self.slowest

    def latest_ns(self, counts: Ints) -> int:
        """Return the time of a step in which each pipeline has its own number of microbatches. [pipelines]"""
        return int((self.fill + -(-counts[:, None] // self.round_size) * self.slowest).min(axis=1).max())


def lines(layouts: Iterable[PipelineTemplate], *, alone: bool = False) -> Lines:
    """Return the lines of a pipeline that may take any of the layouts. A round counts for 1 ns at least.

    Args:
        layouts: The layouts.
        alone: Whether it is the only pipeline of a plan.
    """
    return tuple(Line(*(layout.lone_line_ns if alone else layout.line_ns), layout.round_size) for layout in layouts)


def slowed_line(template: PipelineTemplate, node_factors: Sequence[float], *, alone: bool = False) -> Line:
    """Return a layout's line on nodes that were seen to be slow.

    Args:
        template: The layout.
        node_factors: For each of its nodes, by how much the stages on it take longer; 1 as profiled.
        alone: Whether it is the only pipeline of a plan.

    Raises:
        ValueError: Not one factor per node.
    """
    fill_ms, slowest_ms = template.line_ms(node_factors, alone=alone)
    return Line(nanoseconds(fill_ms), max(1, nanoseconds(slowest_ms)), template.round_size)


def least_line(template: PipelineTemplate, *, alone: bool = False) -> Line:
    """Return a line that no :func:`slowed_line` of a layout is below, whichever of its nodes are slow.

    The slowest row adds nothing to what the others fill; when a node is slow, that may be another one.
    """
    fill_ms, slowest_ms = template.line_ms(alone=alone)
    if template.lanes == (CHAIN,):
        _, busy, filling = template.row_times
        fill_ms -= float(filling.max() - filling[busy == busy.max()].max()) / template.num_chunks
    else:
        fill_ms = template.lone_sync_ms if alone else template.sync_ms
    return Line(max(0, nanoseconds(fill_ms)), max(1, nanoseconds(slowest_ms)), template.round_size)


def least_finish_ns(template: PipelineTemplate, factor: float, *, alone: bool = False) -> int:
    """Return a time that a round takes at least where one of a layout's nodes is so slow, or slower.

    Args:
        template: The layout.
        factor: By how much the stages on that node take longer at least, wherever it is, and whichever others are slow.
        alone: Whether it is the only pipeline of a plan.
    """
    if template.lanes != (CHAIN,):
        return least_line(template, alone=alone).finish_ns(1)
    node, busy, filling = template.row_times
    factors = np.where(node == np.arange(template.num_nodes)[:, None], factor, 1.0)  # [slow node, rows]
    busy, filling = busy * factors, filling * factors
    times = (filling.sum(axis=1) - filling.max(axis=1)) / template.num_chunks + busy.max(axis=1)
    # Not more than what is rounded twice.
    return int((times.min() + (template.lone_sync_ms if alone else template.sync_ms)) * 1e6) - 2


def finish_ns(pipeline: Lines, num_microbatches: int) -> int:
    """Return the time of a pipeline's share of the step."""
    return min(line.finish_ns(num_microbatches) for line in pipeline)


def split_microbatches(pipelines: Sequence[Lines], num_microbatches: int) -> tuple[int, ...]:
    """Return the microbatches of each pipeline, at least one each.

    The latest finish is as early as can be, and as few pipelines as can be finish then. Where all rounds are of one
    microbatch, the second latest finish is as early as can be after that, and so on. Of pipelines for which that leaves
    the choice, earlier ones get more.

    Args:
        pipelines: The pipelines.
        num_microbatches: Of the step.

    Raises:
        ValueError: There are no pipelines, or more pipelines than microbatches.
    """
    # Pipelines with the same lines get through the same number, so only one of them is looked at.
    kinds = {id(of): of for of in pipelines}
    numbers = dict(zip(kinds, range(len(kinds)), strict=True))
    table = line_table(list(kinds.values()) or [(Line(0, 1),)])
    return tuple(split_rows(table, np.array([numbers[id(of)] for of in pipelines]), num_microbatches).tolist())


def split_rows(table: LineTable, rows: Ints, num_microbatches: int) -> Ints:
    """Return :func:`split_microbatches` of pipelines whose lines are in a table. [pipelines]

    Below the least time by which all microbatches can be done, every pipeline has time for a number that is then
    fixed; the few that are left over go to pipelines that finish exactly at that time with a round more. Those of them
    with the largest rounds take it, and of these those that would finish latest without it.

    Args:
        table: The lines.
        rows: The row of each pipeline.
        num_microbatches: Of the step.

    Raises:
        ValueError: As there.
    """
    if not len(rows) or num_microbatches < len(rows):
        raise ArgumentError(
            "num_microbatches",
            "be at least the number of pipelines, one or more",
            f"{num_microbatches} for {len(rows)}",
            "raise the global batch, lower the microbatch, or make fewer pipelines",
        )
    # Imported late: it loads numba, and most processes that import the planner never split a batch.
    from resilient.templates.composition.split_time import split

    return split(*table, rows, num_microbatches)


def latest_ns(table: LineTable, rows: Ints, num_microbatches: int) -> int:
    """Return when the last pipeline is done under :func:`split_rows`, with its arguments, which must be right."""
    from resilient.templates.composition.split_time import latest_finish

    return latest_finish(*table, rows, num_microbatches)


def latest_with_slow_ns(
    table: LineTable,
    rows: Ints,
    num_microbatches: int,
    slow_rows: Ints,
    fast_rows: Ints,
    idlest: Ints,
    factors: Floats,
    most_slow: int,
) -> int:
    """Return a time before which the last pipeline is not done, where some of them have slow nodes.

    Args:
        table: The lines; of pipelines that may have slow nodes those of :func:`least_line`.
        rows: As of :func:`split_rows`.
        num_microbatches: Likewise.
        slow_rows: As of :func:`.split_time.latest_finish_with_slow`.
        fast_rows: Likewise.
        idlest: Likewise (:func:`idlest_ns`).
        factors: Likewise.
        most_slow: Likewise.
    """
    from resilient.templates.composition.split_time import latest_finish_with_slow

    return latest_finish_with_slow(*table, rows, num_microbatches, slow_rows, fast_rows, idlest, factors, most_slow)


def idlest_ns(template: PipelineTemplate) -> int:
    """Return what the node takes for a round whose longest row is the shortest; where it is slow, a round takes more.

    That is by as much as it is slow; not more than what is rounded.
    """
    node, busy, _ = template.row_times
    longest = np.zeros(template.num_nodes)
    np.maximum.at(longest, node, busy)
    return int(longest.min() * 1e6) - 1


@lru_cache(maxsize=16)
def lines_of_sizes(templates: TemplateSet) -> LineTable:
    """Return the lines of pipelines of each size, where there are several pipelines. [sizes, most lines]"""
    return line_table([lines(layouts) for layouts in templates.layouts])


@lru_cache(maxsize=16)
def lone_lines_of_sizes(templates: TemplateSet) -> LineTable:
    """Return the lines of a pipeline of each size, where it is the only one. [sizes, most lines]"""
    return line_table([lines(layouts, alone=True) for layouts in templates.layouts])


@lru_cache(maxsize=32)
def least_lines_of_sizes(templates: TemplateSet, *, alone: bool = False) -> LineTable:
    """Return :func:`least_line` of the layouts of each size. [sizes, most lines]"""
    return line_table([tuple(least_line(each, alone=alone) for each in layouts) for layouts in templates.layouts])


@lru_cache(maxsize=16)
def lines_of_layouts(templates: TemplateSet) -> LineTable:
    """Return the line of each layout of each size, where there are several pipelines. [layouts, 1]"""
    return line_table([(line,) for layouts in templates.layouts for line in lines(layouts)])


def line_table(pipelines: Sequence[Lines]) -> LineTable:
    """Return the lines of pipelines as a table."""
    width = max(map(len, pipelines))
    table = np.array([(*of, *(of[-1:] * (width - len(of)))) for of in pipelines], dtype=np.int64)
    return LineTable(*np.ascontiguousarray(np.moveaxis(table, 2, 0)))


def check_batch(global_batch: int, microbatch: int, num_pipelines: int) -> None:
    """Check that a global batch can be split, without ever changing it.

    Args:
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.
        num_pipelines: Pipelines that each need at least one microbatch.

    Raises:
        ValueError: It cannot; the message recommends the nearest global batches that can.
    """
    if microbatch < 1:
        raise ArgumentError("microbatch", "be >= 1", microbatch, "give the samples of one microbatch")
    if global_batch % microbatch == 0 and global_batch >= num_pipelines * microbatch:
        return
    smallest = num_pipelines * microbatch
    below = global_batch // microbatch * microbatch
    nearest = sorted({max(smallest, below), max(smallest, below + microbatch)})
    raise ArgumentError(
        "global_batch",
        f"be a multiple of {{microbatch}} {microbatch}, at least {smallest} (one microbatch for each of "
        f"{num_pipelines} pipelines)",
        global_batch,
        f"use {' or '.join(map(str, nearest))}",
    )
