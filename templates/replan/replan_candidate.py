"""The ways to go on from a plan, after nodes were lost or joined or turned out to be slow; :mod:`.replan` chooses.

Candidates are made of precomputed templates:

- *local* ones change only the pipelines concerned (:mod:`resilient.templates.replan.repair`); all others keep their
nodes and
  their layout, and copy nothing;
- *composed* ones have the best composition for the number of nodes, whatever the pipelines were before: once with the
  pipelines that can stay as they are, once with the layouts that are best for the final split of the batch.

Where fewer nodes are faster than all, because some are slow or because all are too many, there are candidates that let
nodes stand by: without the slowest ones, with the best composition of any number of nodes, and with slow nodes at
places that suit them (:mod:`resilient.templates.composition.slow_nodes`). They keep f + 1 pipelines as all others do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from resilient.templates.common.durations import nanoseconds
from resilient.templates.composition.batch_split import (
    Lines,
    finish_ns,
    least_line,
    lines,
    slowed_line,
    split_microbatches,
)
from resilient.templates.composition.compose import Compositions, may_take
from resilient.templates.composition.slow_nodes import compose_with_slow, searched
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.placement import Placer, Target
from resilient.templates.replan.repair import Repair, repairs
from resilient.templates.replan.way import CandidateKind, ReplanCandidate, Way, fastest_ms
from resilient.templates.search.template_sizes import TooFewNodes
from resilient.templates.template import PipelineTemplate, TemplateSet

# Copying over a link of unknown bandwidth is taken to be as fast as over 10 Gbit/s.
_NOMINAL_BYTES_PER_S = 1.25e9

_MOST_EXCLUSIONS = 8
"""Of how many different numbers of slow nodes it is tried to let them stand by."""


class _Wanted(NamedTuple):
    """A pipeline to be made.

    Args:
        layouts: The layouts it may take.
        continues: Index of the pipeline that it continues.
        factors: By how much each of its nodes is to be slower, where its only layout was chosen for slow nodes.
    """

    layouts: tuple[PipelineTemplate, ...]
    continues: int | None = None
    factors: tuple[float, ...] | None = None


class _Change(NamedTuple):
    """What a way does, and which nodes stand by though there may be a place for them."""

    kind: CandidateKind
    wanted: Sequence[_Wanted]
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
        self._new = cache(lambda size: _Wanted(templates.of(size)))
        self._kept = cache(self._continuing)
        self._plan = _with_templates_of(templates, plan)
        known = {id(layout) for layouts in templates.layouts for layout in layouts}
        self._all_known = all(id(pipeline.template) in known for pipeline in self._plan.pipelines)
        self._live, self._slowdowns, self._has_domains = live, slowdowns, bool(domains)
        slow = {node for node in live if slowdowns.get(node, 1.0) > 1}
        self._slowest_first = sorted(slow, key=lambda node: (-slowdowns[node], node))
        self._placer = Placer(problem, self._plan, live, domains)
        self._single: dict[int, tuple[PipelineTemplate]] = {}
        self._known_lines: dict[tuple[int, bool], Lines] = {}
        self._least_lines: dict[tuple[int, bool], Lines] = {}
        self._slowed_lines: dict[tuple[int, tuple[float, ...], bool], Lines] = {}

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
            self._drop_longer(numbers, fastest_ms(with_most))
        for number in numbers:
            found.extend(self._distinct(self._changes(number), seen))
        if self._slowest_first:
            shortest_ms = fastest_ms(found)
            if self._may_take_less(shortest_ms, most):
                mixed = self._mixed(nanoseconds(shortest_ms) - 1)
                found.extend(self._distinct([mixed] if mixed else [], set()))
        with_most = [way for way in found if way.num_nodes == most]
        with_most_ms = fastest_ms(with_most)
        for way in found:
            if way.num_nodes == most:
                yield way
            elif way.least_step_ms < with_most_ms:
                yield way.shorter_than(with_most_ms)

    def _drop_longer(self, numbers: deque[int], step_ms: float) -> None:
        """Drop, from the end, how many nodes stand by with which no step is shorter: others may do what fewer do."""
        while numbers and not self._may_take_less(step_ms, len(self._live) - numbers[-1]):
            numbers.pop()

    def _may_take_less(self, step_ms: float, num_nodes: int) -> bool:
        """Return False only where no step on up to so many of the nodes is shorter."""
        num_microbatches, min_pipelines = self._problem.num_microbatches, self._problem.max_failures + 1
        most_ns = nanoseconds(step_ms) - 1
        return not self._all_known or may_take(self._templates, num_nodes, num_microbatches, min_pipelines, most_ns)

    def _distinct(self, changes: Iterable[_Change], seen: set[object]) -> Iterator[Way]:
        for change in changes:
            targets = self._targets(change.wanted)
            # Equal templates are one object here.
            places = sorted((id(each.template), -1 if each.continues is None else each.continues) for each in targets)
            key = tuple(places), change.without
            if key not in seen:
                seen.add(key)
                yield self._way(change, targets)

    def _changes(self, number: int) -> Iterator[_Change]:
        """Yield what may be done while so many of the slowest nodes stand by."""
        without = frozenset(self._slowest_first[:number])
        live = [node for node in self._live if node not in without]
        try:
            best = self._compositions(len(live))
        except TooFewNodes:
            return
        may_stand_by = bool(self._slowest_first) or best.every != best.fastest
        for change in self._repairs(live, may_stand_by=may_stand_by):
            wanted = [self._kept_or_new(index, size) for index, size in change.pipelines]
            yield _Change(change.kind, wanted, without)
        for composition in dict.fromkeys(best):
            if not self._plan.pipelines:  # nobody holds anything: the fastest nodes are taken, first ones first
                without = frozenset(self._fastest_first[sum(composition) :])
            kept = [self._kept_or_new(index, size) for index, size in self._with_intact(composition, live)]
            yield _Change("composed", kept, without)
            yield _Change("composed", [*map(self._new, composition)], without)

    @cached_property
    def _fastest_first(self) -> list[int]:
        return sorted(self._live, key=lambda node: (self._slowdowns.get(node, 1.0), node))

    def _numbers_without(self) -> list[int]:
        """Return how many of the slowest nodes stand by."""
        slow = len(self._slowest_first)
        parts = min(slow, _MOST_EXCLUSIONS)
        return [0, *(round(part * slow / parts) for part in range(1, parts + 1))]

    def _repairs(self, live: Sequence[int], *, may_stand_by: bool) -> tuple[Repair, ...]:
        if not self._plan.pipelines:
            return ()
        return repairs(
            self._plan,
            live,
            self._templates.sizes,
            min_pipelines=self._problem.max_failures + 1,
            max_pipelines=self._problem.num_microbatches,
            may_stand_by=may_stand_by,
        )

    def _mixed(self, most_ns: int) -> _Change | None:
        """Return the best composition in which nodes as slow as they are take places of their own, if it is better."""
        slowest = self._slowest_first[: searched(self._templates, len(self._slowest_first))]
        if not slowest:
            return None
        found = compose_with_slow(
            self._templates,
            len(self._live) - len(slowest),
            [self._slowdowns[node] for node in slowest],
            self._problem.num_microbatches,
            self._problem.max_failures + 1,
            most_ns,
        )
        if found is None:
            return None
        slow = [_Wanted(self._only(pipeline.template), factors=pipeline.factors) for pipeline in found.slow]
        fast = map(self._new, found.fast)
        left = Counter(self._slowdowns[node] for node in slowest)
        left.subtract(factor for pipeline in found.slow for factor in pipeline.factors if factor > 1)
        without: set[int] = set()
        for node in reversed(slowest):  # of equally slow nodes the first take part
            if left[self._slowdowns[node]]:
                left[self._slowdowns[node]] -= 1
                without.add(node)
        return _Change("composed", [*slow, *fast], frozenset(without))

    def _with_intact(self, composition: Sequence[int], nodes: Sequence[int]) -> Iterator[tuple[int | None, int]]:
        """Yield a composition; pipelines that have all their nodes are continued where their size is wanted."""
        intact: dict[int, deque[int]] = defaultdict(deque)
        there = set(nodes)
        for index, pipeline in enumerate(self._plan.pipelines):
            if there.issuperset(pipeline.nodes):
                intact[len(pipeline.nodes)].append(index)
        for size in composition:
            yield (intact[size].popleft() if intact[size] else None), size

    def _kept_or_new(self, index: int | None, size: int) -> _Wanted:
        return self._new(size) if index is None else self._kept(index, size)

    def _continuing(self, index: int, size: int) -> _Wanted:
        template = self._plan.pipelines[index].template
        return _Wanted(self._only(template) if template.num_nodes == size else self._new(size).layouts, index)

    def _only(self, template: PipelineTemplate) -> tuple[PipelineTemplate]:
        """Return a layout as the only one to choose: the same tuple each time."""
        found = self._single.get(id(template))
        if found is None:
            found = self._single[id(template)] = (template,)
        return found

    def _targets(self, wanted: Sequence[_Wanted]) -> list[Target]:
        """Choose the layouts for the split of the batch over nodes as fast as profiled, or as they are wanted.

        Which other nodes are slow shows only when they are in their places.
        """
        alone = len(wanted) == 1
        known = {id(each.layouts): each.layouts for each in wanted}
        by_layouts = {key: self._lines(layouts, alone=alone) for key, layouts in known.items()}
        choices = [
            by_layouts[id(layouts)] if factors is None else self._slowed(layouts[0], factors, alone=alone)
            for layouts, _, factors in wanted
        ]
        counts = split_microbatches(choices, self._problem.num_microbatches)
        best: dict[tuple[int, int], Target] = {}  # there are far fewer than pipelines
        targets: list[Target] = []
        for (layouts, index, _), count in zip(wanted, counts, strict=True):
            key = id(layouts), count
            target = best.get(key)
            if target is None:
                times = [finish_ns((line,), count) for line in by_layouts[key[0]]]
                target = best[key] = Target(layouts[times.index(min(times))])
            targets.append(target if index is None else Target(target.template, index))
        return self._placer.continuing(targets)

    def _pinned(self, wanted: Sequence[_Wanted], without: Collection[int]) -> dict[int, int]:
        """Return the slow nodes by the places, among those of all pipelines, that are meant for them."""
        left = [node for node in self._slowest_first if node not in without]
        pinned: dict[int, int] = {}
        for place, factor in enumerate(factor for each in wanted for factor in each.factors or ()):
            if factor > 1:
                pinned[place] = next(node for node in left if self._slowdowns[node] == factor)
                left.remove(pinned[place])
        return pinned

    def _way(self, change: _Change, targets: Sequence[Target]) -> Way:
        """Split the batch over the pipelines, as fast as their nodes are."""
        pinned, alone = self._pinned(change.wanted, change.without), len(targets) == 1
        keeps_whole = change.kind != "composed"
        # Who stands by may be placed after all where domains need it.
        is_known = not self._has_domains and change.without.issuperset(self._slowest_first)
        at_least = self._split(
            [
                self._lines(self._only(template), alone=alone) if is_known else self._least(template, alone=alone)
                for template, _ in targets
            ]
        )
        place = cache(lambda: self._placer.place(targets, pinned, change.without, keeps_whole=keeps_whole))

        @cache
        def split() -> tuple[Sequence[int], float]:
            on = zip(targets, place().nodes, strict=True)
            return self._split([self._speed(target.template, nodes, alone=alone) for target, nodes in on])

        def copies(bound: Callable[[], tuple[int, int]]) -> tuple[float, int]:
            busiest, copied = bound()
            return _copy_ms(self._problem.cluster.inter_node, busiest), copied

        def candidate() -> ReplanCandidate:
            placement = place()
            counts, step_ms = at_least if is_known else split()
            pipelines = tuple(
                Pipeline(template=target.template, nodes=on, num_microbatches=count)
                for target, on, count in zip(targets, placement.nodes, counts, strict=True)
            )
            return ReplanCandidate(
                kind=change.kind,
                plan=Plan(pipelines=pipelines, schedule_kind=self._problem.schedule),
                copied_bytes=placement.copied_bytes,
                copy_ms=_copy_ms(self._problem.cluster.inter_node, placement.busiest_bytes),
                step_ms=step_ms,
                lacking_domains=placement.lacking_domains,
            )

        return Way(
            least_step_ms=at_least[1],
            num_nodes=sum(target.template.num_nodes for target in targets),
            placed_step_ms=None if is_known else lambda: split()[1],
            copy_bounds=tuple(partial(copies, each) for each in self._placer.copy_bounds(targets, change.without)),
            candidate=candidate,
        )

    def _split(self, speeds: Sequence[Lines]) -> tuple[Sequence[int], float]:
        """Return the microbatches of each pipeline, and how long the step takes."""
        counts = split_microbatches(speeds, self._problem.num_microbatches)
        return counts, max(finish_ns(speed, count) for speed, count in set(zip(speeds, counts, strict=True))) / 1e6

    def _lines(self, layouts: Sequence[PipelineTemplate], *, alone: bool) -> Lines:
        # By identity: equal choices are one tuple, which is kept.
        key = id(layouts), alone
        found = self._known_lines.get(key)
        if found is None:
            found = self._known_lines[key] = lines(layouts, alone=alone)
        return found

    def _least(self, template: PipelineTemplate, *, alone: bool) -> Lines:
        self._only(template)  # its identity stands for it as long as it is kept
        key = id(template), alone
        found = self._least_lines.get(key)
        if found is None:
            found = self._least_lines[key] = (least_line(template, alone=alone),)
        return found

    def _speed(self, template: PipelineTemplate, nodes: Sequence[int], *, alone: bool) -> Lines:
        if self._slowdowns.keys().isdisjoint(nodes):
            return self._lines(self._only(template), alone=alone)
        return self._slowed(template, tuple(self._slowdowns.get(node, 1.0) for node in nodes), alone=alone)

    def _slowed(self, template: PipelineTemplate, factors: tuple[float, ...], *, alone: bool) -> Lines:
        self._only(template)  # its identity stands for it as long as it is kept
        key = id(template), factors, alone
        found = self._slowed_lines.get(key)
        if found is None:
            found = self._slowed_lines[key] = (slowed_line(template, factors, alone=alone),)
        return found


def _with_templates_of(templates: TemplateSet, plan: Plan) -> Plan:
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


def _copy_ms(link: Link, num_bytes: int) -> float:
    known = link if link.bytes_per_s is not None else replace(link, bytes_per_s=_NOMINAL_BYTES_PER_S)
    return known.transfer_ms(num_bytes) if num_bytes else 0.0
