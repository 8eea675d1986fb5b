"""The layouts among which pipelines of the next plan choose, by number, and the lines of each choice.

A choice is one of the template sizes, with all layouts of that size, or a single layout. Choices and layouts are
numbers and their lines are tables, so that what is asked of hundreds of pipelines is asked of a few arrays.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

from resilient.templates.common.arrays import Ints, ranges
from resilient.templates.composition.batch_split import (
    LineTable,
    idlest_ns,
    least_line,
    least_lines_of_sizes,
    lines,
    lines_of_sizes,
    lone_lines_of_sizes,
)
from resilient.templates.plan import Plan
from resilient.templates.template import PipelineTemplate, TemplateSet


class LayoutChoices:
    """Choices among the layouts of a set, and those of a plan before.

    Args:
        templates: The set.
        plan: The plan; where it has a layout of the set, it is that object.

    Attributes:
        layouts: The layouts.
        num_nodes: Of each layout.
        only_alone: Which of the layouts are a plan's only pipeline or none.
        of_plan: The layout of each of the plan's pipelines.
        are_of_set: Whether all of the plan's layouts are the set's.
    """

    def __init__(self, templates: TemplateSet, plan: Plan) -> None:
        self._templates = templates
        self.layouts = list(chain.from_iterable(templates.layouts))
        numbers = {id(layout): number for number, layout in enumerate(self.layouts)}
        self._num_of_set = len(self.layouts)
        for pipeline in plan.pipelines:
            if id(pipeline.template) not in numbers:
                numbers[id(pipeline.template)] = len(self.layouts)
                self.layouts.append(pipeline.template)
        self.are_of_set = len(self.layouts) == self._num_of_set
        self.num_nodes = np.array([layout.num_nodes for layout in self.layouts])
        self.only_alone = np.array([layout.only_alone for layout in self.layouts])
        of_sizes = np.cumsum([0, *map(len, templates.layouts)])[:-1]
        self.of_plan = np.array([numbers[id(each.template)] for each in plan.pipelines], dtype=np.int64)
        self._firsts = np.concatenate((of_sizes, np.arange(len(self.layouts))))
        # By whether a pipeline is the plan's only one.
        self._lines: dict[bool, LineTable] = {}
        self._with_least: dict[bool, tuple[LineTable, int]] = {}

    def of_sizes(self, sizes: Ints) -> Ints:
        """Return the choices among all layouts of template sizes."""
        return sizes - self._templates.sizes[0]

    def single(self, layouts: Ints) -> Ints:
        """Return the choices that are one layout each."""
        return layouts + len(self._templates.sizes)

    def lines(self, *, alone: bool) -> LineTable:
        """Return the lines of all choices, of a plan's only pipeline or not. [choices, most lines]"""
        if alone not in self._lines:
            more = [lines((layout,), alone=alone)[0] for layout in self.layouts[self._num_of_set :]]
            table = _lines_of(self._templates, alone=alone)
            self._lines[alone] = table.with_lines(more) if more else table
        return self._lines[alone]

    def lines_and_least(self, *, alone: bool) -> tuple[LineTable, int]:
        """Return :meth:`lines` and behind them those of layouts that no slow node makes faster.

        Returns:
            The table, and the row of the first layout's least line (:func:`.batch_split.least_line`).
        """
        if alone not in self._with_least:
            table, least = self.lines(alone=alone), _least_lines_of(self._templates, alone=alone)
            widened = LineTable(*(each.repeat(table.fill.shape[1], axis=1) for each in least))
            both = LineTable(*map(np.concatenate, zip(table, widened, strict=True)))
            more = [least_line(layout, alone=alone) for layout in self.layouts[self._num_of_set :]]
            self._with_least[alone] = (both.with_lines(more) if more else both), len(table.fill)
        return self._with_least[alone]

    @cached_property
    def idlest_ns(self) -> Ints:
        """What the idlest node of each layout takes for a round (:func:`.batch_split.idlest_ns`). [layouts]"""
        more = [idlest_ns(layout) for layout in self.layouts[self._num_of_set :]]
        return np.append(_idlest_of_layouts(self._templates), np.array(more, dtype=np.int64))

    def fastest(self, choices: Ints, counts: Ints, *, alone: bool) -> Ints:
        """Return the layout of each pipeline that is done first.

        Args:
            choices: Of the pipelines.
            counts: Their microbatches.
            alone: Whether there is only one.
        """
        # Imported late: it loads numba, and most processes that import the planner never split a batch.
        from resilient.templates.composition.split_time import first_done

        return self._firsts[choices] + first_done(*self.lines(alone=alone), choices, counts)


def prepare_lines(templates: TemplateSet) -> None:
    """Do ahead of time what :class:`LayoutChoices` needs of a set, whatever the plan before."""
    _lines_of(templates, alone=False)
    _least_lines_of(templates, alone=False)
    _idlest_of_layouts(templates)


@lru_cache(maxsize=16)
def _idlest_of_layouts(templates: TemplateSet) -> Ints:
    """Return :func:`idlest_ns` of all layouts, size by size. [layouts]"""
    return np.array([idlest_ns(layout) for layout in chain.from_iterable(templates.layouts)], dtype=np.int64)


@lru_cache(maxsize=32)
def _lines_of(templates: TemplateSet, *, alone: bool) -> LineTable:
    of_sizes = (lone_lines_of_sizes if alone else lines_of_sizes)(templates)
    width = of_sizes.fill.shape[1]
    singles = (each.repeat(width, axis=1) for each in _layout_by_layout(templates, of_sizes))
    return LineTable(*map(np.concatenate, zip(of_sizes, singles, strict=True)))


@lru_cache(maxsize=32)
def _least_lines_of(templates: TemplateSet, *, alone: bool) -> LineTable:
    return _layout_by_layout(templates, least_lines_of_sizes(templates, alone=alone))


def _layout_by_layout(templates: TemplateSet, of_sizes: LineTable) -> LineTable:
    """Return the line of each layout, of those of all sizes. [layouts, 1]"""
    lengths = np.array(list(map(len, templates.layouts)))
    size = np.repeat(np.arange(len(lengths)), lengths)
    return LineTable(*(each[size, ranges(np.zeros_like(lengths), lengths)][:, None] for each in of_sizes))


def with_templates_of(templates: TemplateSet, plan: Plan) -> Plan:
    """Return an equal plan, in which equal templates are one object: that of the set, if it has one.

    A plan may be from a file, or made of another set of templates of the job.
    """
    known: dict[int, PipelineTemplate] = {}
    others: dict[int, list[PipelineTemplate]] = defaultdict(list)
    for pipeline in plan.pipelines:
        template = pipeline.template
        if id(template) not in known:
            size = template.num_nodes
            same = (
                each for each in (*_of_size(templates, size), *others[size]) if each is template or each == template
            )
            known[id(template)] = next(same, template)
            others[size].append(known[id(template)])
    if all(known[id(each.template)] is each.template for each in plan.pipelines):
        return plan
    pipelines = tuple(replace(each, template=known[id(each.template)]) for each in plan.pipelines)
    return replace(plan, pipelines=pipelines)


def _of_size(templates: TemplateSet, size: int) -> tuple[PipelineTemplate, ...]:
    return templates.of(size) if size in templates.sizes else ()
