"""A way to go on from a plan: what it takes at least, and the candidate that it is with all nodes in their places.

Placing the nodes takes longest. Bounds that need no places say which ways can be best, and only these are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from resilient.templates.common.arrays import Floats, Ints, distinct
from resilient.templates.composition.batch_split import (
    Line,
    LineTable,
    latest_ns,
    latest_with_slow_ns,
    least_finish_ns,
    least_line,
)
from resilient.templates.composition.slow_lines import SlowPipeline
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Plan
from resilient.templates.replan.layout_choices import LayoutChoices
from resilient.templates.replan.placement import Targets
from resilient.templates.replan.repair import NEW, RepairKind

_NEVER = 2**62
_NOMINAL_BYTES_PER_S = 1.25e9

CandidateKind = RepairKind | Literal["composed"]


@dataclass(frozen=True, kw_only=True)
class ReplanCandidate:
    """One way to go on.

    Args:
        kind: ``composed``, or what is done to the pipelines concerned.
        plan: The plan.
        copied_bytes: What nodes must receive from other nodes before the next step.
        copy_ms: How long that takes: as long as the node that receives or sends most.
        step_ms: How long a step takes, slow nodes considered.
        lacking_domains: In how many more failure domains states should be held, summed over the states.
        with_more: Where nodes stand by that there is a place for, returns how long a step takes at best that uses all
            of these; else None.
    """

    kind: CandidateKind
    plan: Plan
    copied_bytes: int
    copy_ms: float
    step_ms: float
    lacking_domains: int
    with_more: Callable[[], float] | None = field(default=None, repr=False, compare=False)

    @property
    def with_more_ms(self) -> float | None:
        """What :attr:`with_more` returns. Nodes may have to be placed for it, which was not needed to decide."""
        return None if self.with_more is None else self.with_more()


class WayCost(NamedTuple):
    """What a :class:`ReplanCandidate` takes, before its plan is written out.

    Args:
        step_ms: As there.
        copy_ms: Likewise.
        copied_bytes: Likewise.
        lacking_domains: Likewise.
    """

    step_ms: float
    copy_ms: float
    copied_bytes: int
    lacking_domains: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A candidate before its nodes are in their places.

    Args:
        least_step_ms: How long a step takes at least: whichever of its nodes are slow, or if the slow ones stay in the
            pipelines that go on.
        is_met: Whether it takes no longer where these stay at their places or take those that are meant for them.
        num_nodes: How many nodes it uses.
        placed_step_ms: Places the nodes and returns how long a step takes; None where that is ``least_step_ms``.
        copy_bounds: Each returns how long copies take at least, in ms, and how many bytes are copied at least; the
            later, the higher, and the longer it takes.
        cost: Places the nodes and returns what the candidate takes; None where the step shows to be too long.
        candidate: Likewise returns the candidate.
    """

    least_step_ms: float
    is_met: bool
    num_nodes: int
    placed_step_ms: Callable[[], float] | None
    copy_bounds: Sequence[Callable[[], tuple[float, int]]]
    cost: Callable[[], WayCost | None]
    candidate: Callable[[], ReplanCandidate | None]

    @cached_property
    def step_ms(self) -> float:
        """How long a step takes."""
        return self.least_step_ms if self.placed_step_ms is None else self.placed_step_ms()

    @property
    def is_known(self) -> bool:
        """Whether it is known how long a step takes: that was asked for before, or is what it takes at least."""
        return self.placed_step_ms is None or "step_ms" in self.__dict__

    @property
    def known_step_ms(self) -> float:
        """How long a step takes where that :attr:`is_known`, else at least."""
        return self.step_ms if self.is_known else self.least_step_ms

    def shorter_than(self, likely: Sequence[Way], with_more: Sequence[Way]) -> Way:
        """Return this way, in which nodes stand by, but only if a step is shorter than those with them.

        Args:
            likely: Those with them that may be as short.
            with_more: All with them.
        """

        def is_shorter() -> bool:
            if any(way.is_known and way.step_ms <= self.least_step_ms for way in likely):
                return False
            return not takes_at_most(likely, self.step_ms)

        def candidate() -> ReplanCandidate | None:
            found = self.candidate() if is_shorter() else None
            return found and replace(found, with_more=lambda: fastest_ms(with_more))

        def cost() -> WayCost | None:
            return self.cost() if is_shorter() else None

        return replace(self, least_step_ms=self.known_step_ms, cost=cost, candidate=candidate)


class StepBound(NamedTuple):
    """How long a step takes at least, and whether it takes no longer; of a :class:`Way` before it is made."""

    least_step_ms: float
    is_met: bool


class StepBounds:
    """Bounds of the step of pipelines whose nodes are not in their places.

    Pipelines that stay as they are keep their slow nodes. All others that must be in use are in the other pipelines: in
    as few of these, and in such, that least is lost.

    Args:
        layouts: The choices among layouts, and the plan's.
        plan: The plan before.
        live: The live nodes.
        slowdowns: Nodes that are slow, and by what factor.
        num_microbatches: Of a step.
        slowed: Returns the line of a layout on nodes of some factors, of a plan's only pipeline or not.
    """

    def __init__(
        self,
        layouts: LayoutChoices,
        plan: Plan,
        live: Sequence[int],
        slowdowns: Mapping[int, float],
        num_microbatches: int,
        slowed: Callable[[int, tuple[float, ...], bool], Line],
    ) -> None:
        self._layouts, self._num_microbatches, self._slowed = layouts, num_microbatches, slowed
        self._slowdowns = slowdowns
        self._num_live, there = len(live), frozenset(live)
        slow = {node for node in slowdowns if node in there and slowdowns[node] > 1}
        self._slowest_first = sorted(slow, key=lambda node: -slowdowns[node])
        self._num_pipelines = len(plan.pipelines)
        self._pipeline_of = {
            node: index
            for index, pipeline in enumerate(plan.pipelines if slow else ())
            for node in slow.intersection(pipeline.nodes)
        }
        # The pipelines with slow nodes that have all of their nodes, and these.
        self._slow_pipelines = {
            index: pipeline.nodes
            for index, pipeline in enumerate(plan.pipelines)
            if not slow.isdisjoint(pipeline.nodes) and there.issuperset(pipeline.nodes)
        }
        self._slow_indices = np.array(list(self._slow_pipelines), dtype=np.int64)
        self._lines = cache(self._all_lines)
        self._least_finish_ns = cache(
            lambda layout, factor, alone: least_finish_ns(layouts.layouts[layout], factor, alone=alone)
        )

    def bound(
        self,
        targets: Targets,
        stays: Ints,
        without: Collection[int],
        slow: Sequence[SlowPipeline] = (),
        pinned: Collection[int] = (),
        *,
        none_moves: bool = False,
    ) -> StepBound:
        """Return how long a step takes at least.

        Args:
            targets: The pipelines to be made.
            stays: Of each pipeline of the plan before the target that it is, with the same nodes in the same places,
                negative where it is not known to be one.
            without: Nodes that take no place.
            slow: The first targets, where some of their places are meant for slow nodes.
            pinned: These nodes. In other places of these targets others may be slow, too.
            none_moves: Whether slow nodes are taken to be in what goes on from their pipeline, at any place.
        """
        numbers, alone = targets.numbers, len(targets.numbers) == 1
        table, first_least, first_slow = self._lines(alone)
        rows = first_least + numbers
        known = stays[stays >= 0]
        rows[known] = self._layouts.single(numbers[known])
        of_slow = stays[self._slow_indices]
        are_known = of_slow >= 0
        rows[of_slow[are_known]] = first_slow + np.flatnonzero(are_known)
        settled = set[int]().union(*(self._slow_pipelines[index] for index in self._slow_indices[are_known].tolist()))
        hidden = self._num_live - len(without) - int(self._layouts.num_nodes[numbers].sum())
        if slow:
            rows[: len(slow)] = len(table.fill) + np.arange(len(slow))
            table = table.with_lines([self._least_slowed(each, alone) for each in slow])
            settled = settled.union(pinned)
            hidden += int(self._layouts.num_nodes[numbers[: len(slow)]].sum()) - len(pinned)
        may_be = [node for node in self._slowest_first if node not in without and node not in settled]
        is_met = not may_be
        are_others = np.arange(len(numbers)) >= len(slow)
        are_others[known] = False
        if none_moves:
            going_on = np.flatnonzero(are_others & (targets.continues != NEW))
            going_on, factors = self._slowest_in(going_on, targets.continues[going_on], may_be)
            rows[going_on] = len(table.fill) + np.arange(len(going_on))
            table = self._with_slowest(table, first_least, numbers[going_on], factors)
            are_others[going_on] = False
            stay_in = frozenset(targets.continues[going_on].tolist())
            may_be = [node for node in may_be if self._pipeline_of.get(node) not in stay_in]
        others = numbers[are_others]
        if not len(others):
            least_ns = latest_ns(table, rows, self._num_microbatches)
        else:
            least_ns = self._with_slow_ns(table, rows, others, first_least, may_be, hidden)
        return StepBound(least_ns / 1e6, is_met)

    def _slowest_in(self, targets: Ints, continues: Ints, slow: Sequence[int]) -> tuple[Ints, Floats]:
        """Return those of the targets that continue a pipeline which some nodes are in, and how slow the slowest is."""
        slowest = np.ones(self._num_pipelines)
        for node in reversed(slow):
            if node in self._pipeline_of:
                slowest[self._pipeline_of[node]] = self._slowdowns[node]
        factors = slowest[continues]
        return targets[factors > 1], factors[factors > 1]

    def _with_slowest(self, table: LineTable, first_least: int, layouts: Ints, factors: Floats) -> LineTable:
        """Return the lines, and behind them the least ones of layouts in which a node is so slow."""
        least = table.rows(first_least + layouts)
        slowest = np.maximum(least.slowest, (self._layouts.idlest_ns[layouts] * factors).astype(np.int64)[:, None])
        return LineTable(*map(np.concatenate, zip(table, least._replace(slowest=slowest), strict=True)))

    def _least_slowed(self, pipeline: SlowPipeline, alone: bool) -> Line:
        """Return a line that no other one of a pipeline is below, whichever more of its nodes are slow."""
        least = least_line(self._layouts.layouts[pipeline.layout], alone=alone)
        return least._replace(slowest_ns=self._slowed(*pipeline, alone).slowest_ns)

    def _all_lines(self, alone: bool) -> tuple[LineTable, int, int]:
        """Return the lines of all choices, then the least ones of layouts, then those of the pipelines with slow nodes.

        Returns:
            The table, and where the second and the third begin.
        """
        table, first_least = self._layouts.lines_and_least(alone=alone)
        factors = (tuple(self._slowdowns.get(node, 1.0) for node in nodes) for nodes in self._slow_pipelines.values())
        layouts = self._layouts.of_plan[self._slow_indices].tolist()
        lines = [self._slowed(layout, each, alone) for layout, each in zip(layouts, factors, strict=True)]
        return (table.with_lines(lines) if lines else table), first_least, len(table.fill)

    def _with_slow_ns(
        self, table: LineTable, rows: Ints, others: Ints, first_least: int, may_be: Sequence[int], hidden: int
    ) -> int:
        """Return how long a step takes at least, where pipelines that are not known to stay have slow nodes.

        These are in few pipelines at best: the slowest ones in the largest, and so on. No more pipelines have any than
        there are slow nodes.

        Args:
            table: The lines.
            rows: Of all pipelines.
            others: The layouts of those that are not known to stay.
            first_least: Where the least lines of layouts begin.
            may_be: The slow nodes that may be in them, the slowest first.
            hidden: How many of these need not be in any.
        """
        factors = np.array([self._slowdowns[node] for node in may_be[hidden:]], dtype=np.float64)
        ends = np.sort(self._layouts.num_nodes[others])[::-1].cumsum()
        firsts = np.append(0, ends)
        layouts, slowest_of_each = distinct(others)[0], factors[firsts[firsts < len(factors)]]
        rows_of, idlest = first_least + layouts, self._layouts.idlest_ns[layouts]
        least_ns = latest_with_slow_ns(
            table,
            rows,
            self._num_microbatches,
            rows_of,
            self._layouts.single(layouts),
            idlest,
            slowest_of_each,
            len(may_be),
        )
        if not len(factors):
            return least_ns
        slow_ns = _NEVER
        for layout in layouts.tolist():
            slow_ns = min(slow_ns, self._least_finish_ns(layout, factors[0], len(rows) == 1))
            if slow_ns <= least_ns:  # soon, as a rule
                return least_ns
        return slow_ns


def takes_at_most(ways: Iterable[Way], step_ms: float) -> bool:
    """Return whether a step of any of some ways takes so long at most; only those are placed that may."""
    return any(way.least_step_ms <= step_ms and way.step_ms <= step_ms for way in _likely_first(ways))


def fastest_ms(ways: Iterable[Way]) -> float:
    """Return the shortest step of some ways, one or more; nodes are placed in those only that may have it."""
    found = inf
    for way in _likely_first(ways):
        if way.least_step_ms >= found:
            break
        found = min(found, way.step_ms)
    return found


def soon_known_ms(ways: Iterable[Way], most_ms: float = inf) -> float:
    """Return the shortest step of those ways that it is known of, or if of none, of the likeliest one to have it.

    Args:
        ways: The ways, one or more.
        most_ms: It need not be placed for a longer step.
    """
    ways = list(ways)
    if told := [way.known_step_ms for way in ways if way.is_met or way.is_known]:
        return min(told)
    likeliest = _likely_first(ways)[0]
    return likeliest.step_ms if likeliest.least_step_ms <= most_ms else inf


def likely_ways(ways: Sequence[Way]) -> Sequence[Way]:
    """Return some ways without those that ask for luck: that slow nodes happen to be in better places than known ones.

    Where these are compositions made for the slow nodes, that happens in rare cases alone.
    """
    soonest_ms = min((way.known_step_ms for way in ways if way.is_met), default=0.0)
    return [way for way in ways if way.is_met or way.is_known or way.least_step_ms >= soonest_ms]


def _likely_first(ways: Iterable[Way]) -> list[Way]:
    """Return some ways by their bounds.

    Of equal ones those come first that are met, or more likely so: the fewer nodes, the fewer slow ones.
    """
    return sorted(ways, key=lambda each: (each.least_step_ms, each.placed_step_ms is not None, each.num_nodes))


def copy_ms(link: Link, num_bytes: int) -> float:
    """Return how long copies take over a link; one of unknown bandwidth is taken to be as fast as 10 Gbit/s."""
    known = link if link.bytes_per_s is not None else replace(link, bytes_per_s=_NOMINAL_BYTES_PER_S)
    return known.transfer_ms(num_bytes) if num_bytes else 0.0
