"""Layers -> stages -> devices: for each number of nodes the templates with the shortest step.

A template for n nodes uses all their devices in order. Each stage has contiguous layers and devices of one node, as
many as one of the profile's tensor-parallel degrees; a node may have several stages, of different degrees. Stages hold
what the schedule keeps in flight (:mod:`resilient.templates.search.stage_cost_model` has their times and bytes).

Where stages may be sharded, microbatches may go through a template in rounds, of as many as some number divides a
node's devices into. Each stage then has so many devices that divide its state, each with a microbatch of its own
(:mod:`resilient.templates.search.layer_costs`). For each size of rounds the search is the same,
:mod:`resilient.templates.search.layout_search`; the layouts of all are compared, so that some sizes and shares have
sharded stages and others tensor-parallel ones, as it is fastest or fits in memory.

How many microbatches a pipeline gets is decided when templates are composed, so a size has a layout for each number
that it can expect: from half its proportional share up to all. Some schedules have several stages on each device:
:mod:`resilient.templates.search.chunks` cuts for them.
"""

from __future__ import annotations

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.plan import PlanningProblem, Sharding
from resilient.templates.schedules.kind import CHUNK_KINDS, INTERLEAVED_KINDS
from resilient.templates.search.chunks import ChunkSearch
from resilient.templates.search.layout_search import Corner, LayoutSearch
from resilient.templates.search.template_sizes import node_counts
from resilient.templates.template import PipelineTemplate, TemplateSet


def plan_templates(problem: PlanningProblem, num_nodes: int) -> TemplateSet:
    """Return the templates for a cluster of up to ``num_nodes`` nodes.

    The sizes are consecutive: from n0, the first from ``min_pipeline_nodes`` on that fits in memory, to the last that
    leaves room for ``max_failures`` pipelines of n0 nodes, or that is before the first without a template (it would
    have more stages than layers, or too many microbatches in flight). Where a plan may have one pipeline, each size has
    a layout for that, too: it has all microbatches, and no gradients to sum with others. Some schedules keep more in
    flight of fewer microbatches, so that the first sizes may fit only so.

    Args:
        problem: Profile, cluster, microbatches.
        num_nodes: The most nodes the templates are to serve.

    Raises:
        TooFewNodes: ``num_nodes < (max_failures + 1) n0``.
        ValueError: No number of nodes has a template; the message says what to change.
    """
    search = lone = ChunkSearch(problem) if problem.schedule in CHUNK_KINDS else _RoundsSearch(problem)
    if isinstance(search, ChunkSearch) and problem.schedule in INTERLEAVED_KINDS:  # others hold most of most
        lone = ChunkSearch(problem, search)
    beside = next((size for size in search.sizes if search.fits(size)), None)
    smallest = beside if problem.max_failures else _first_alone(lone, beside, num_nodes)
    if smallest is None:
        raise search.misfit()
    layouts: list[tuple[PipelineTemplate, ...]] = []
    for size in node_counts(num_nodes, problem.max_failures, smallest):
        share = problem.num_microbatches * size // (2 * num_nodes)
        counts = range(max(1, share), problem.num_microbatches + 1)
        found: list[PipelineTemplate] = []
        has_others = beside is not None and beside <= size <= num_nodes - beside
        if has_others:
            found.extend(search.layouts(size, counts, alone=False))
        if problem.max_failures == 0:
            found.extend((search if has_others else lone).layouts(size, counts[-1:], alone=True))
        if not found:
            break
        found.sort(key=lambda each: (each.round_size, -each.slowest_ms, each.fill_ms))
        layouts.append(tuple(dict.fromkeys(found)))
    return TemplateSet(problem_digest=problem.digest, layouts=tuple(layouts))


def _first_alone(lone: ChunkSearch | _RoundsSearch, beside: int | None, num_nodes: int) -> int | None:
    """Return the first of the consecutive sizes whose only pipeline fits; None where none does.

    Args:
        lone: The search for a plan's only pipeline.
        beside: The first size that fits whatever its share of the microbatches is.
        num_nodes: The most nodes of a plan.
    """
    if beside is None or beside > num_nodes:
        return next((size for size in lone.sizes if lone.fits(size)), beside)
    first = beside
    while first - 1 in lone.sizes and lone.fits(first - 1):
        first -= 1
    return first


class _RoundsSearch:
    """The search for all sizes of templates and of rounds."""

    def __init__(self, problem: PlanningProblem) -> None:
        devices = problem.cluster.devices_per_node
        # a stage that is tensor parallel is not sharded
        may_shard = 1 in problem.profile.tp_degrees
        larger = [size for size in range(2, devices + 1) if devices % size == 0 and may_shard]
        round_sizes = {
            Sharding.OFF: [1],
            Sharding.AUTO: [1, *larger],
            Sharding.ON: larger or [1],
        }[problem.sharding]
        self._searches = {size: LayoutSearch(problem, size) for size in round_sizes}

    @property
    def sizes(self) -> range:
        """The numbers of nodes whose devices the layers suffice for."""
        return max((search.sizes for search in self._searches.values()), key=len)

    def fits(self, size: int) -> bool:
        """Return whether there is a template for a number of nodes."""
        return any(size in search.sizes and search.fits(size) for search in self._searches.values())

    def layouts(self, size: int, counts: range, *, alone: bool) -> tuple[PipelineTemplate, ...]:
        """Return the best templates for a number of nodes and each of these numbers of microbatches.

        Args:
            size: The number of nodes.
            counts: Of microbatches.
            alone: Whether there are no other pipelines to sum gradients with.
        """
        found: list[tuple[LayoutSearch, Corner]] = []
        times: list[Ints] = []
        for round_size, search in self._searches.items():
            if size not in search.sizes:
                continue
            extra = range(-(-counts.start // round_size) - 1, -(-(counts.stop - 1) // round_size))
            rounds = -(-np.arange(counts.start, counts.stop) // round_size)
            for corner in search.corners(size, extra, with_sync=not alone):
                found.append((search, corner))
                times.append(corner.total + (rounds - 1) * corner.slowest)
        # Of equal steps the first, with the smaller rounds.
        best = np.unique(np.argmin(times, axis=0)).tolist() if times else []
        return tuple(
            search.template(size, corner.slowest, with_sync=not alone)
            for search, corner in (found[index] for index in best)
        )

    def misfit(self) -> ArgumentError:
        """Return why no number of nodes has a template."""
        searches = tuple(self._searches.values())
        return next((s for s in searches if s.sizes), searches[0]).misfit()
