"""The ways to go on from a plan, after nodes were lost or joined or turned out to be slow; :mod:`.replan` chooses.

Candidates are made of precomputed templates:

- *local* ones change only the pipelines concerned (:mod:`resilient.templates.replan.repair`); all others keep their
nodes and
  their layout, and copy nothing;
- *composed* ones have the best composition for the number of nodes, whatever the pipelines were before: once with the
  pipelines that can stay as they are, once with the layouts that are best for the final split of the batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from resilient.templates.composition.batch_split import Lines, finish_ns, lines, slowed_line, split_microbatches
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.placement import Placer, Target
from resilient.templates.replan.repair import RepairKind, repairs
from resilient.templates.template import PipelineTemplate, TemplateSet

# Copying over a link of unknown bandwidth is taken to be as fast as over 10 Gbit/s.
_NOMINAL_BYTES_PER_S = 1.25e9

CandidateKind = RepairKind | Literal["composed"]

_Wanted = tuple[tuple[PipelineTemplate, ...], int | None]
"""The layouts a pipeline may take, and the index of the pipeline that it continues."""


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
    """

    kind: CandidateKind
    plan: Plan
    copied_bytes: int
    copy_ms: float
    step_ms: float
    lacking_domains: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A candidate before its nodes are in their places: that takes longest, and most ways are out without it.

    Args:
        step_ms: The candidate's.
        candidate: Places the nodes and returns the candidate.
    """

    step_ms: float
    candidate: Callable[[], ReplanCandidate]


class Situation:
    """The plan and the nodes that the next plan starts from.

    Args:
        problem: The job.
        templates: Its templates.
        composition: The sizes of the best composition for the number of live nodes.
        plan: The plan whose states the surviving nodes hold; without pipelines at the start.
        live: The live nodes; of equally good ones earlier ones are taken first.
        domains: Label of the failure domain of nodes.
        slowdowns: Nodes that are slow, and by what factor.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        templates: TemplateSet,
        composition: Sequence[int],
        plan: Plan,
        live: Sequence[int],
        domains: Mapping[int, str],
        slowdowns: Mapping[int, float],
    ) -> None:
        self._problem, self._composition = problem, composition
        self._sizes, self._layouts = templates.sizes, cache(templates.of)
        self._plan = _with_templates_of(templates, plan)
        self._live, self._slowdowns = live, slowdowns
        self._any_slow = not slowdowns.keys().isdisjoint(live)
        self._placer = Placer(problem, self._plan, live, domains)
        self._known_lines: dict[tuple[int, int, bool], Lines] = {}

    def ways(self) -> Iterator[Way]:
        """Yield the ways to go on, local ones first; no two with equal layouts that go on from the same pipelines."""
        seen: set[tuple[tuple[int, int], ...]] = set()
        for kind, wanted in self._changes():
            targets = self._targets(wanted)
            # Equal templates are one object here.
            key = tuple(
                sorted((id(each.template), -1 if each.continues is None else each.continues) for each in targets)
            )
            if key not in seen:
                seen.add(key)
                yield self._way(kind, targets)

    def composed(self) -> ReplanCandidate:
        """Return the best composition, free in its layouts."""
        return self._way("composed", self._targets(self._composed())).candidate()

    def _changes(self) -> Iterator[tuple[CandidateKind, list[_Wanted]]]:
        changes = repairs(
            self._plan,
            self._live,
            self._sizes,
            min_pipelines=self._problem.max_failures + 1,
            max_pipelines=self._problem.num_microbatches,
        )
        for change in changes:
            if sum(size for _, size in change.pipelines) == sum(self._composition):
                yield change.kind, [self._kept_or_new(index, size) for index, size in change.pipelines]
        yield "composed", [self._kept_or_new(index, size) for index, size in self._with_intact()]
        yield "composed", self._composed()

    def _composed(self) -> list[_Wanted]:
        return [(self._layouts(size), None) for size in self._composition]

    def _with_intact(self) -> Iterator[tuple[int | None, int]]:
        """Yield the best composition; pipelines that lost no node are continued where their size is wanted."""
        intact: dict[int, deque[int]] = defaultdict(deque)
        live = set(self._live)
        for index, pipeline in enumerate(self._plan.pipelines):
            if live.issuperset(pipeline.nodes):
                intact[len(pipeline.nodes)].append(index)
        for size in self._composition:
            yield (intact[size].popleft() if intact[size] else None), size

    def _kept_or_new(self, index: int | None, size: int) -> _Wanted:
        if index is not None and self._plan.pipelines[index].template.num_nodes == size:
            return (self._plan.pipelines[index].template,), index
        return self._layouts(size), index

    def _targets(self, wanted: Sequence[_Wanted]) -> list[Target]:
        """Choose the layouts for the split of the batch over nodes as fast as profiled.

        Which nodes are slow shows only when they are in their places.
        """
        alone = len(wanted) == 1
        choices = [self._lines(of, alone=alone) for of, _ in wanted]
        counts = split_microbatches(choices, self._problem.num_microbatches)
        best: dict[tuple[int, int, int], PipelineTemplate] = {}
        targets: list[Target] = []
        for (layouts, index), count in zip(wanted, counts, strict=True):
            key = (id(layouts[0]), len(layouts), count)
            if key not in best:
                times = [finish_ns((line,), count) for line in self._lines(layouts, alone=alone)]
                best[key] = layouts[times.index(min(times))]
            targets.append(Target(template=best[key], continues=index))
        return self._placer.continuing(targets)

    def _way(self, kind: CandidateKind, targets: Sequence[Target]) -> Way:
        """Split the batch over the pipelines, as fast as their nodes are."""
        place, alone = cache(lambda: self._placer.place(targets)), len(targets) == 1
        if self._any_slow:
            speeds = [
                self._speed(target.template, on, alone=alone) for target, on in zip(targets, place().nodes, strict=True)
            ]
        else:
            speeds = [self._lines((target.template,), alone=alone) for target in targets]
        counts = split_microbatches(speeds, self._problem.num_microbatches)
        step_ms = max(map(finish_ns, speeds, counts)) / 1e6

        def candidate() -> ReplanCandidate:
            placement = place()
            pipelines = tuple(
                Pipeline(template=target.template, nodes=on, num_microbatches=count)
                for target, on, count in zip(targets, placement.nodes, counts, strict=True)
            )
            return ReplanCandidate(
                kind=kind,
                plan=Plan(pipelines=pipelines, schedule_kind=self._problem.schedule),
                copied_bytes=placement.copied_bytes,
                copy_ms=_copy_ms(self._problem.cluster.inter_node, placement.busiest_bytes),
                step_ms=step_ms,
                lacking_domains=placement.lacking_domains,
            )

        return Way(step_ms=step_ms, candidate=candidate)

    def _lines(self, layouts: Sequence[PipelineTemplate], *, alone: bool) -> Lines:
        # By identity: the layouts of a size are one tuple, and a kept one stands for itself.
        key = (id(layouts[0]), len(layouts), alone)
        if key not in self._known_lines:
            self._known_lines[key] = lines(layouts, alone=alone)
        return self._known_lines[key]

    def _speed(self, template: PipelineTemplate, nodes: Sequence[int], *, alone: bool) -> Lines:
        if self._slowdowns.keys().isdisjoint(nodes):
            return self._lines((template,), alone=alone)
        return (slowed_line(template, [self._slowdowns.get(node, 1.0) for node in nodes], alone=alone),)


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
    pipelines = tuple(replace(each, template=known[id(each.template)]) for each in plan.pipelines)
    return replace(plan, pipelines=pipelines)


def _of_size(templates: TemplateSet, size: int) -> tuple[PipelineTemplate, ...]:
    return templates.of(size) if size in templates.sizes else ()


def _copy_ms(link: Link, num_bytes: int) -> float:
    known = link if link.bytes_per_s is not None else replace(link, bytes_per_s=_NOMINAL_BYTES_PER_S)
    return known.transfer_ms(num_bytes) if num_bytes else 0.0
