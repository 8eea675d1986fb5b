"""Layers -> stages -> devices, for rounds of one size: for each number of nodes the layouts with the shortest step.

Objective: ``sum(t) + sync + (N - 1) max(t)`` for N rounds of microbatches, exactly the least of all layouts; without
sync for a pipeline that is to be the only one. A size has a layout for each N that it can expect. These are corners of
the lower hull of all (max(t), sum(t) + sync). The compiled search finds the shortest sum under a bound on max(t), which
no smaller bound undercuts. So a range of bounds needs no search where even the shortest sum of its largest, with the
smallest, would be the shortest step for no N.

Times are compared as whole nanoseconds and ties are broken by rule (:mod:`resilient.templates.search.bounded_search`),
so every machine finds the same layouts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from resilient.errors import ArgumentError, literal
from resilient.templates.common.words import counted
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import LATER_KINDS
from resilient.templates.search.stage_cost_model import StageCosts, Tables
from resilient.templates.search.stage_reach import HeldRounds
from resilient.templates.template import PipelineTemplate, StageSpec

if TYPE_CHECKING:
    from resilient.templates.search.bounded_search import Found

_UNLIMITED = 1 << 62
"""More than any time."""

_GROWTH = 1.125
"""Of the bound on the slowest stage, from the devices' even share of the work up, until there is a template."""


class Corner(NamedTuple):
    """Of the hull: the shortest step with ``extra`` or more rounds beyond the first, up to the next corner's."""

    slowest: int
    total: int
    extra: int


class LayoutSearch:
    """The search for all sizes of one problem.

    Args:
        problem: The job.
        round_size: Microbatches of a round.
    """

    def __init__(self, problem: PlanningProblem, round_size: int = 1) -> None:
        self.problem = problem
        self.costs = StageCosts(problem, round_size)
        self._tables: dict[tuple[bool, HeldRounds | None], Tables] = {}
        self._impossible: dict[int, dict[int, int]] = {}
        self._times: list[int] = self.costs.times().tolist()

    @property
    def sizes(self) -> range:
        """The numbers of nodes whose devices the layers suffice for."""
        return range(self.problem.min_pipeline_nodes, self.costs.num_layers // self.costs.fewest_per_node + 1)

    def fits(self, size: int) -> bool:
        """Return whether there is a template for a number of nodes."""
        return self._least_sum(size, self._times[-1], with_sync=False) is not None

    def corners(self, size: int, extra: range, *, with_sync: bool) -> list[Corner]:
        """Return the best layouts for a number of nodes and each number of rounds beyond the first."""
        corners: list[Corner] = []
        bound = self.costs.least_total / (size * self.problem.cluster.devices_per_node)
        ranges = [(0, len(self._times), self.costs.least_total)]
        while ranges:
            first, end, least = ranges.pop()
            end = min(end, bisect_right(self._times, _worth(corners, least, extra)))
            if first >= end:
                continue
            middle = (first + end - 1) // 2
            if not corners:
                bound *= _GROWTH
                middle = min(max(first, bisect_left(self._times, bound)), end - 1)
            found = self._least_sum(
                size,
                self._times[middle],
                with_sync=with_sync,
                most_total=_most_total(corners, self._times[first], extra),
            )
            ranges.append((middle + 1, end, least))
            if found is not None:
                points = [(corner.slowest, corner.total) for corner in corners]
                corners = _hull([*points, (found.slowest, found.total)], extra)
                ranges.append((first, bisect_left(self._times, found.slowest), found.total))
        return corners

    def misfit(self) -> ArgumentError:
        """Return why no number of nodes has a template."""
        problem, costs = self.problem, self.costs
        devices, degrees = problem.cluster.devices_per_node, problem.profile.tp_degrees
        if costs.fewest_per_node > costs.num_layers:
            return ArgumentError(
                "devices_per_node",
                f"be filled by stages of {counted(costs.num_layers, 'layer')} at tensor-parallel degrees "
                f"{', '.join(map(str, degrees))}",
                devices,
                "lower it, or profile other degrees",
            )
        if not self.sizes:
            return ArgumentError(
                "min_pipeline_nodes",
                f"be at most {self.sizes.stop - 1} ({counted(costs.num_layers, 'layer')}, at least "
                f"{counted(costs.fewest_per_node, 'stage')} in a node)",
                problem.min_pipeline_nodes,
                "lower it",
            )
        memory = problem.cluster.memory_bytes
        assert memory is not None
        fixes = "use smaller microbatches" + ", activation checkpointing" * (not problem.activation_checkpointing)
        largest = max(degree for degree in degrees if degree <= devices)
        fixes += f", higher tensor-parallel degrees than {largest}" * (largest < devices)
        fixes += ", schedule 1f1b" * (problem.schedule not in LATER_KINDS)
        fixes += " or devices with more memory"
        num_stages = self.sizes.start * costs.fewest_per_node
        needed, layer = max((costs.least_memory_bytes(i, num_stages), -i) for i in range(costs.num_layers))
        if needed > memory:
            return ArgumentError(
                "memory_bytes",
                literal(f"hold layer {problem.profile.layers[-layer].name!r} alone in a stage, ")
                + f"{needed} bytes on each device",
                memory,
                fixes,
            )
        enough, size = _enough_memory(problem, memory)
        return ArgumentError(
            "memory_bytes",
            f"hold the stages of a pipeline of {self.sizes.start} to {self.sizes.stop - 1} nodes with what they have "
            f"in flight",
            memory,
            f"{fixes}: {enough} bytes would do for {counted(size, 'node')}",
        )

    def _least_sum(self, size: int, bound: int, *, with_sync: bool, most_total: int = _UNLIMITED) -> Found | None:
        """Return the template with the shortest sum under a bound; where it is above ``most_total``, None will do."""
        from resilient.templates.search.bounded_search import BoundedSearch, least_sum_of_depths

        num_devices = size * self.problem.cluster.devices_per_node
        depths = range(size * self.costs.fewest_per_node, min(self.costs.num_layers, num_devices) + 1)

        def search(num_stages: int, like: BoundedSearch | None = None) -> BoundedSearch:
            tables = self._tables_of(self.costs.held_rounds(num_stages), with_sync=with_sync)
            return BoundedSearch(tables, bound, num_devices, like)

        if self.costs.held_rounds(depths.start) == self.costs.held_rounds(depths.stop - 1):
            return search(depths.start).best()
        impossible = self._impossible.setdefault(size, {})
        return least_sum_of_depths(search, depths, most_total, bound=bound, impossible=impossible)

    def _tables_of(self, held: HeldRounds | None, *, with_sync: bool) -> Tables:
        if (with_sync, held) not in self._tables:
            self._tables[with_sync, held] = self.costs.tables(with_sync=with_sync, held=held)
        return self._tables[with_sync, held]

    def template(self, size: int, slowest: int, *, with_sync: bool) -> PipelineTemplate:
        """Return the layout of a corner."""
        found = self._least_sum(size, slowest, with_sync=with_sync)
        assert found is not None
        stages: list[StageSpec] = []
        first = device = 0
        for (end, option), held in zip(found.stages, self.costs.held_of_stages(len(found.stages)), strict=True):
            stages.append(self.costs.stage(first, end, option, device, held))
            first, device = end, device + self.costs.options[option].num_devices
        end, option = found.stages[0]
        return PipelineTemplate(num_nodes=size, stages=tuple(stages), sync_ms=self.costs.sync_ms(end, option))


def _hull(points: Iterable[tuple[int, int]], extra: range) -> list[Corner]:
    """Return the ``(slowest, total)`` that are the shortest step for some number in ``extra``, by falling ``slowest``.

    Of equal steps the shorter sum.
    """
    corners: list[Corner] = []
    for slowest, total in sorted(points, key=lambda point: (-point[0], point[1])):
        start = extra.start
        while corners:
            last = corners[-1]
            if total <= last.total and slowest < last.slowest:
                start = extra.start
            elif slowest < last.slowest:
                start = max(extra.start, (total - last.total) // (last.slowest - slowest) + 1)
            else:
                start = extra.stop
            if start > last.extra:
                break
            corners.pop()
        if start < extra.stop:
            corners.append(Corner(slowest, total, start))
    return corners


def _worth(corners: Sequence[Corner], total: int, extra: range) -> int:
    """Return the greatest time of a slowest stage with which a sum would make a shorter step than all found so far."""
    if not corners:
        return _UNLIMITED
    worth = -1
    for corner, count in _ends(corners, extra):
        less = corner.total + count * corner.slowest - total - 1
        if count:
            worth = max(worth, less // count)
        elif less >= 0:
            return _UNLIMITED
    return worth


def _most_total(corners: Sequence[Corner], slowest: int, extra: range) -> int:
    """Return the greatest sum with which a slowest stage would make a step no longer than all found so far."""
    if not corners:
        return _UNLIMITED
    return max(corner.total + count * (corner.slowest - slowest) for corner, count in _ends(corners, extra))


def _ends(corners: Sequence[Corner], extra: range) -> Iterator[tuple[Corner, int]]:
    """Yield each corner with the first and with the last number of rounds that it is the shortest step for."""
    stops = [corner.extra for corner in corners[1:]] + [extra.stop]
    for corner, stop in zip(corners, stops, strict=True):
        yield corner, corner.extra
        yield corner, stop - 1


def _enough_memory(problem: PlanningProblem, too_little: int) -> tuple[int, int]:
    """Return how much memory suffices, within 2 % of the least, and for how many nodes. Not all sizes are tried."""
    enough = 2 * too_little
    while (size := _first_fit(problem, enough)) is None:
        too_little, enough = enough, 2 * enough
    while enough > too_little + max(1, too_little // 50):
        middle = (too_little + enough) // 2
        fit = _first_fit(problem, middle)
        if fit is None:
            too_little = middle
        else:
            enough, size = middle, fit
    return enough, size


def _first_fit(problem: PlanningProblem, memory_bytes: int) -> int | None:
    search = LayoutSearch(replace(problem, cluster=replace(problem.cluster, memory_bytes=memory_bytes)))
    sizes = (search.sizes.start << k for k in range(search.sizes.stop.bit_length()))
    return next((size for size in sizes if size in search.sizes and search.fits(size)), None)
