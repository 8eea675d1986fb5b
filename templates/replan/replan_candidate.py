"""The ways to go on from a plan, after nodes were lost or joined or turned out to be slow; :mod:`.replan` chooses.

Candidates are made of precomputed templates:

- *local* ones change only the pipelines concerned (:mod:`resilient.templates.replan.repair`); all others keep their
  layout and, unless the busiest node then receives less, their nodes;
- *composed* ones have the best composition for the number of nodes, whatever the pipelines were before: once with the
  pipelines that can stay as they are, once with the layouts that are best for the final split of the batch.

Where fewer nodes are faster than all, because some are slow or because all are too many, there are candidates that let
nodes stand by: without the slowest ones, with the best composition of any number, and with slow nodes at places that
suit them (:mod:`resilient.templates.composition.slow_nodes`). They keep f + 1 pipelines as all others do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Ints, alike_parts
from resilient.templates.common.durations import nanoseconds
from resilient.templates.composition.batch_split import Line, LineTable, slowed_line, split_rows
from resilient.templates.composition.compose import Compositions, least_step_ns
from resilient.templates.composition.slow_groups import num_of_any
from resilient.templates.composition.slow_lines import SlowPipeline
from resilient.templates.composition.slow_nodes import compose_with_slow
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.layout_choices import LayoutChoices, with_templates_of
from resilient.templates.replan.placement import Placer, Seats, Targets
from resilient.templates.replan.repair import NEW, repairs
from resilient.templates.replan.topology_spread import FailureDomains
from resilient.templates.replan.way import (
    CandidateKind,
    ReplanCandidate,
    StepBound,
    StepBounds,
    Way,
    WayCost,
    copy_ms,
    fastest_ms,
    likely_ways,
    soon_known_ms,
)
from resilient.templates.search.template_sizes import TooFewNodes
from resilient.templates.template import TemplateSet

_FEW_NODES = 64
"""Of more nodes, slow ones are taken to stay in pipelines that go on, and ways that ask for luck are left out."""
_MOST_PARTS_OF_FEW = 5
"""In so many parts slow nodes are told apart, and it is tried to let the slowest parts stand by. Where nodes are many,
each pipeline is a small part of all: what is between none and all of the slow ones makes no step shorter."""
_LITTLE_SLOWER = 1.5
"""Of many nodes it makes a step shorter in rare cases alone that the slowest ones have places of their own and the
others may be anywhere: where none is slower than that."""


class _Wanted(NamedTuple):
    """Pipelines to be made.

    Args:
        choices: The layouts that each may take (:class:`LayoutChoices`).
        continues: Index of the pipeline that each continues.
        slow: The first ones, where their layouts were chosen for slow nodes at some of their places.
    """

    choices: Ints
    continues: Ints
    slow: Sequence[SlowPipeline] = ()


class _Change(NamedTuple):
    """What a way does, and which nodes stand by though there may be a place for them."""

    kind: CandidateKind
    wanted: _Wanted
    without: frozenset[int] = frozenset()


class Situation:
    """The plan and the nodes that the next plan starts from.

    Args:
        problem: The job.
        templates: Its templates.
        compositions: Returns the best compositions for a number of nodes up to that of the live ones.
        plan: The plan whose states the surviving nodes hold; without pipelines at the start.
        live: The live nodes; of equally good ones earlier ones are taken first.
        domains: Label of the failure domain of nodes.
        slowdowns: Nodes that are slow, and by what factor.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        templates: TemplateSet,
        compositions: Callable[[int], Compositions],
        plan: Plan,
        live: Sequence[int],
        domains: Mapping[int, str],
        slowdowns: Mapping[int, float],
    ) -> None:
        self._problem, self._templates, self._compositions = problem, templates, compositions
        self._plan = with_templates_of(templates, plan)
        self._layouts = LayoutChoices(templates, self._plan)
        self._live, self._slowdowns, self._has_domains = live, slowdowns, bool(domains)
        self._are_few = len(live) <= _FEW_NODES
        self._factors = np.array([slowdowns.get(node, 1.0) for node in live], dtype=np.float64)
        slow = [live[index] for index in np.flatnonzero(self._factors > 1).tolist()]
        self._slowest_first = sorted(slow, key=lambda node: (-slowdowns[node], node))
        self._placer = Placer(problem, self._plan, live, FailureDomains(live, domains, problem.max_failures + 1, slow))
        self._left, self._slowed = cache(self._placer.left), cache(self._slowed_line)
        self._bounds = StepBounds(self._layouts, self._plan, live, slowdowns, problem.num_microbatches, self._slowed)

    def ways(self) -> Iterator[Way]:
        """Yield the ways to go on, local ones first; no two with equal layouts that go on from the same pipelines.

        Nodes that there is a place for stand by only where that makes the step shorter than any way with all of them.
        """
        most = sum(self._compositions(len(self._live)).every)
        found, seen = list[Way](), set[object]()
        numbers = deque(self._numbers_without())
        while numbers and len(self._live) - numbers[0] >= most:
            found.extend(self._distinct(self._changes(numbers.popleft()), seen))
        if numbers and (with_most := [way for way in found if way.num_nodes == most]):
            self._drop_longer(numbers, with_most)
        for number in numbers:
            found.extend(self._distinct(self._changes(number), seen))
        shortest_ms = fastest_ms if self._are_few else soon_known_ms
        for number in self._numbers_mixed() if self._slowest_first else ():
            within = self._least_ns(most), nanoseconds(shortest_ms(found)) - 1
            mixed = self._mixed(self._slowest_first[:number], within) if within[0] <= within[1] else None
            found.extend(self._distinct([mixed] if mixed else [], set()))
        with_most = [way for way in found if way.num_nodes == most]
        found = found if self._are_few else likely_ways(found)
        likely = [way for way in found if way.num_nodes == most]
        known_ms = min((way.step_ms for way in likely if way.is_known), default=inf)
        for way in found:
            if way.num_nodes == most:
                yield way
            elif way.known_step_ms < known_ms:
                yield way.shorter_than(likely, with_most)

    def _drop_longer(self, numbers: deque[int], ways: Sequence[Way]) -> None:
        """Drop, from the end, how many nodes stand by with which no step is shorter: others may do what fewer do."""
        while numbers:
            least_ms = self._least_ns(len(self._live) - numbers[-1]) / 1e6
            if soon_known_ms(ways, least_ms) > least_ms:
                return
            numbers.pop()

    def _least_ns(self, num_nodes: int) -> int:
        """Return a time that no step on up to so many of the nodes is shorter than."""
        num_microbatches, min_pipelines = self._problem.num_microbatches, self._problem.max_failures + 1
        if not self._layouts.are_of_set:
            return 0
        return least_step_ns(self._templates, num_nodes, num_microbatches, min_pipelines)

    def _distinct(self, changes: Iterable[_Change], seen: set[object]) -> Iterator[Way]:
        for change in changes:
            targets = self._targets(change.wanted)
            places = np.sort(targets.numbers * (len(self._plan.pipelines) + 1) + targets.continues + 1)
            key = places.tobytes(), change.without
            if key not in seen:
                seen.add(key)
                yield self._way(change, targets)

    def _changes(self, number: int) -> Iterator[_Change]:
        """Yield what may be done while so many of the slowest nodes stand by."""
        without = frozenset(self._slowest_first[:number])
        num_nodes = len(self._live) - number
        try:
            best = self._compositions(num_nodes)
        except TooFewNodes:
            return
        left = self._left(without)
        if self._plan.pipelines:
            may_stand_by = bool(self._slowest_first) or best.every != best.fastest
            for sizes_of, most_pipelines in self._sizes_of_repairs():
                for kind, continues, sizes in repairs(
                    left,
                    self._layouts.num_nodes[self._layouts.of_plan],
                    num_nodes - int(left.sum()),
                    sizes_of,
                    min_pipelines=self._problem.max_failures + 1,
                    max_pipelines=most_pipelines,
                    may_stand_by=may_stand_by,
                ):
                    if (self._keeps_layout(continues, sizes) | (sizes <= self._templates.sizes[-1])).all():
                        yield _Change(kind, self._going_on(continues, sizes), without)
        for composition in dict.fromkeys(best):
            if not self._plan.pipelines:  # nobody holds anything: the fastest nodes are taken, first ones first
                without = frozenset(self._fastest_first[sum(composition) :])
            sizes = np.array(composition)
            yield _Change("composed", self._going_on(self._with_intact(sizes, left), sizes), without)
            yield _Change("composed", self._going_on(np.full(len(sizes), NEW), sizes), without)

    def _sizes_of_repairs(self) -> Iterator[tuple[range, int]]:
        """Yield the sizes that pipelines may be repaired to, and how many there may be of these."""
        beside = self._templates.sizes_beside
        if beside:
            yield beside, self._problem.num_microbatches
        if beside != self._templates.sizes and len(self._plan.pipelines) == 1:
            yield self._templates.sizes, 1

    @cached_property
    def _fastest_first(self) -> list[int]:
        return sorted(self._live, key=lambda node: (self._slowdowns.get(node, 1.0), node))

    def _numbers_without(self) -> list[int]:
        """Return how many of the slowest nodes stand by."""
        most = _MOST_PARTS_OF_FEW if self._are_few else 1
        return alike_parts([self._slowdowns[node] for node in self._slowest_first], most)

    def _numbers_mixed(self) -> list[int]:
        """Return how many of the slowest nodes have places of their own, most first."""
        num_slow = len(self._slowest_first)
        few = num_of_any(self._templates, num_slow)
        is_tried = self._are_few or self._slowdowns[self._slowest_first[0]] <= _LITTLE_SLOWER
        return [num_slow, few] if is_tried and few < num_slow else [num_slow]

    def _mixed(self, slowest: Sequence[int], within: tuple[int, int]) -> _Change | None:
        """Return the best composition in which some, as slow as they are, have places of their own, if it is better."""
        found = compose_with_slow(
            self._templates,
            len(self._live) - len(slowest),
            [self._slowdowns[node] for node in slowest],
            self._problem.num_microbatches,
            self._problem.max_failures + 1,
            within,
        )
        if found is None or not found.slow:
            return None
        left = Counter(self._slowdowns[node] for node in slowest)
        left.subtract(factor for pipeline in found.slow for factor in pipeline.factors if factor > 1)
        without: set[int] = set()
        for node in reversed(slowest):  # of equally slow nodes the first take part
            if left[self._slowdowns[node]]:
                left[self._slowdowns[node]] -= 1
                without.add(node)
        slow = self._layouts.single(np.array([pipeline.layout for pipeline in found.slow], dtype=np.int64))
        choices = np.concatenate((slow, self._layouts.of_sizes(np.array(found.fast, dtype=np.int64))))
        wanted = _Wanted(choices, np.full(len(choices), NEW), found.slow)
        return _Change("composed", wanted, frozenset(without))

    def _with_intact(self, sizes: Ints, left: Ints) -> Ints:
        """Return which pipelines go on, those that have all their nodes where their size is wanted.

        Args:
            sizes: The sizes that are wanted, descending.
            left: How many nodes each pipeline has left.
        """
        had = self._layouts.num_nodes[self._layouts.of_plan]
        intact = np.flatnonzero(left == had)
        intact = intact[np.argsort(-had[intact], kind="stable")]
        first, end = (np.searchsorted(-had[intact], -sizes, side=side) for side in ("left", "right"))
        number = first + np.arange(len(sizes)) - np.searchsorted(-sizes, -sizes)
        continues = np.full(len(sizes), NEW)
        continues[number < end] = intact[number[number < end]]
        return continues

    def _going_on(self, continues: Ints, sizes: Ints) -> _Wanted:
        """Return pipelines of some sizes; those that keep their size keep their layout, where it may be in the plan."""
        same = self._keeps_layout(continues, sizes)
        choices = self._layouts.of_sizes(sizes)
        choices[same] = self._layouts.single(self._layouts.of_plan[continues[same]])
        return _Wanted(choices, continues)

    def _keeps_layout(self, continues: Ints, sizes: Ints) -> Flags:
        """Return which pipelines keep their size, and may keep their layout."""
        if not len(self._layouts.of_plan):
            return np.zeros(len(sizes), dtype=np.bool_)
        had = self._layouts.of_plan[continues]
        same = (continues != NEW) & (self._layouts.num_nodes[had] == sizes)
        return same & ~self._layouts.only_alone[had] if len(sizes) > 1 else same

    def _targets(self, wanted: _Wanted) -> Targets:
        """Choose the layouts for the split of the batch over nodes as fast as profiled, or as they are wanted.

        Which other nodes are slow shows only when they are in their places.
        """
        counts = split_rows(*self._as_wanted(wanted, wanted.choices), self._problem.num_microbatches)
        numbers = self._layouts.fastest(wanted.choices, counts, alone=len(wanted.choices) == 1)
        return self._placer.continuing(Targets(self._layouts.layouts, numbers, wanted.continues))

    def _as_wanted(self, wanted: _Wanted, choices: Ints) -> tuple[LineTable, Ints]:
        """Return lines, and which of them pipelines of some choices have that are as slow as they are wanted."""
        alone = len(choices) == 1
        table, lines = self._layouts.lines(alone=alone), [self._slowed(*each, alone) for each in wanted.slow]
        if not lines:
            return table, choices
        of_slow = len(table.fill) + np.arange(len(lines))
        return table.with_lines(lines), np.concatenate((of_slow, choices[len(lines) :]))

    def _pinned(self, slow: Sequence[SlowPipeline], without: Collection[int]) -> dict[int, int]:
        """Return the slow nodes by the places, among those of all pipelines, that are meant for them."""
        left = [node for node in self._slowest_first if node not in without] if slow else []
        pinned: dict[int, int] = {}
        for place, factor in enumerate(chain.from_iterable(pipeline.factors for pipeline in slow)):
            if factor > 1:
                pinned[place] = next(node for node in left if self._slowdowns[node] == factor)
                left.remove(pinned[place])
        return pinned

    def _way(self, change: _Change, targets: Targets) -> Way:
        """Split the batch over the pipelines, as fast as their nodes are."""
        pinned = self._pinned(change.wanted.slow, change.without)
        settled = change.without.union(pinned.values())
        # Who stands by may be placed after all where domains need it.
        is_known = (frozenset() if self._has_domains else settled).issuperset(self._slowest_first)
        # No slow node comes into a pipeline that nothing else changes.
        keeps_whole = change.kind != "composed" and not is_known
        layouts = self._layouts.single(targets.numbers)
        seats = cache(lambda: self._placer.seats(targets, pinned, change.without, keeps_whole=keeps_whole))

        @cache
        def split() -> tuple[Ints, float]:
            if is_known:
                table, rows = self._as_wanted(change.wanted, layouts)
            else:  # not all are where they are wanted: domains move them, too
                table, rows = self._as_placed(targets, seats(), layouts)
            counts = split_rows(table, rows, self._problem.num_microbatches)
            return counts, table.rows(rows).latest_ns(counts) / 1e6

        if is_known:
            bound = StepBound(split()[1], True)
        elif self._has_domains and self._are_few:
            bound = self._bounds.bound(targets, np.full(len(self._plan.pipelines), NEW), ())
        else:
            none_moves = not self._are_few
            stays = self._stays(targets, settled, keeps_whole=keeps_whole or none_moves)
            of_slow = change.wanted.slow, pinned.values()
            bound = self._bounds.bound(targets, stays, change.without, *of_slow, none_moves=none_moves)

        def copies(bound: Callable[[], tuple[int, int]]) -> tuple[float, int]:
            busiest, copied = bound()
            return copy_ms(self._problem.cluster.inter_node, busiest), copied

        @cache
        def cost() -> WayCost:
            copied, busiest = self._placer.volume(seats())
            link = self._problem.cluster.inter_node
            return WayCost(split()[1], copy_ms(link, busiest), copied, seats().lacking_domains)

        def candidate() -> ReplanCandidate:
            placement, (counts, _) = self._placer.placement(seats()), split()
            pipelines = tuple(
                Pipeline(template=targets.layouts[number], nodes=on, num_microbatches=count)
                for number, on, count in zip(targets.numbers.tolist(), placement.nodes, counts.tolist(), strict=True)
            )
            return ReplanCandidate(
                kind=change.kind,
                plan=Plan(pipelines=pipelines, schedule_kind=self._problem.schedule),
                **cost()._asdict(),
            )

        return Way(
            **bound._asdict(),
            num_nodes=int(self._layouts.num_nodes[targets.numbers].sum()),
            placed_step_ms=None if is_known else lambda: split()[1],
            copy_bounds=tuple(partial(copies, each) for each in self._placer.copy_bounds(targets, change.without)),
            cost=cost,
            candidate=candidate,
        )

    def _as_placed(self, targets: Targets, seats: Seats, rows: Ints) -> tuple[LineTable, Ints]:
        """Return lines, and which of them targets have with their nodes; ``rows`` are those of fast nodes alone."""
        factors, ends, alone = self._factors[seats.nodes], seats.sizes.cumsum(), len(rows) == 1
        slow = np.unique(np.searchsorted(ends, np.flatnonzero(factors > 1), "right"))
        table = self._layouts.lines(alone=alone)
        if not len(slow):
            return table, rows
        places = zip((ends - seats.sizes)[slow].tolist(), ends[slow].tolist(), strict=True)
        theirs = [tuple(factors[first:end].tolist()) for first, end in places]
        of_slow = zip(targets.numbers[slow].tolist(), theirs, strict=True)
        rows = rows.copy()
        rows[slow] = len(table.fill) + np.arange(len(slow))
        return table.with_lines([self._slowed(layout, each, alone) for layout, each in of_slow]), rows

    def _stays(self, targets: Targets, without: frozenset[int], *, keeps_whole: bool) -> Ints:
        """Return which target each pipeline is that the placement leaves as it is, :data:`NEW` for none."""
        stays = np.full(len(self._plan.pipelines), NEW)
        if keeps_whole:
            going_on = np.flatnonzero(targets.continues != NEW)
            old = targets.continues[going_on]
            had = self._layouts.of_plan[old]
            same = (targets.numbers[going_on] == had) & (self._left(without)[old] == self._layouts.num_nodes[had])
            stays[old[same]] = going_on[same]
        return stays

    def _slowed_line(self, layout: int, factors: tuple[float, ...], alone: bool) -> Line:
        return slowed_line(self._layouts.layouts[layout], factors, alone=alone)
