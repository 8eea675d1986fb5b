"""Rectangular grids: equal pipelines with equal shares of the batch, as systems without pipeline templates run them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from resilient.templates.common.durations import nanoseconds
from resilient.templates.template import PipelineTemplate, TemplateSet


class TemplateTime(Protocol):
    """What a step of a pipeline takes."""

    def __call__(self, template: PipelineTemplate, num_microbatches: int, *, alone: bool) -> int:
        """Return nanoseconds; ``alone`` where there is no other pipeline to sum gradients with."""
        ...


@dataclass(frozen=True, kw_only=True)
class Grid:
    """``num_pipelines`` pipelines of one template, the last of which may have fewer microbatches than the others.

    Args:
        template: Of all of them.
        num_pipelines: How many.
        num_microbatches: The most that one of them has.
        step_ns: Time of a step.
    """

    template: PipelineTemplate
    num_pipelines: int
    num_microbatches: int
    step_ns: int

    @property
    def num_nodes(self) -> int:
        """Nodes that take part."""
        return self.num_pipelines * self.template.num_nodes


def plain_ns(template: PipelineTemplate, num_microbatches: int, *, alone: bool) -> int:
    """Return the time of a step without redundancy."""
    return max(1, nanoseconds(template.iteration_ms(num_microbatches, alone=alone)))


class Grids:
    """The fastest grid for each number of nodes.

    Args:
        templates: Of one pipeline; the sizes decide how deep grids can be.
        num_microbatches: Of a step over all pipelines.
        time: What a step takes.
    """

    def __init__(self, templates: TemplateSet, num_microbatches: int, time: TemplateTime = plain_ns) -> None:
        self._templates = templates
        self._num_microbatches = num_microbatches
        self._time = time
        self.best = cache(self._best)

    def _best(self, num_nodes: int) -> Grid | None:
        """Return the grid of at most ``num_nodes`` nodes with the shortest step; None where none is so small.

        Ties: the fewest nodes, then the shallowest pipelines.
        """
        beside = self._templates.sizes_beside
        grids = [
            self._grid(size, min(num_nodes // size, self._num_microbatches) if size in beside else 1)
            for size in self._templates.sizes
            if size <= num_nodes
        ]
        return min(grids, key=lambda grid: (grid.step_ns, grid.num_nodes), default=None)

    def _grid(self, size: int, num_pipelines: int) -> Grid:
        count = -(-self._num_microbatches // num_pipelines)
        alone = num_pipelines == 1
        step_ns, index = min(
            (self._time(layout, count, alone=alone), i) for i, layout in enumerate(self._templates.of(size))
        )
        return Grid(
            template=self._templates.of(size)[index],
            num_pipelines=num_pipelines,
            num_microbatches=count,
            step_ns=step_ns,
        )
