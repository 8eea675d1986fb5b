"""The plan of the next generation: templates for the cluster, and the choice among the ways to go on.

Chosen is the candidate (:mod:`resilient.templates.replan.replan_candidate`) with which the job is furthest at the next
expected failure. The fastest of them would, without any copying, do some amount of work until then. For the same amount
a candidate takes

    copy_ms + failure_interval x step_ms / fastest step_ms,

and the least of these wins. Before it comes the spread over failure domains: candidates that lack more of it than
others are out (:func:`resilient.templates.replan.topology_spread.lacking_domains`). Ties: fewer bytes copied; local
before composed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush

import numpy as np

from resilient.errors import ArgumentError
from resilient.templates.common.durations import nanoseconds
from resilient.templates.composition.batch_split import (
    Line,
    latest_with_slow_ns,
    line_table,
)
from resilient.templates.composition.compose import Compositions, compositions, least_step_ns
from resilient.templates.composition.slow_nodes import compose_with_slow, prepare_places
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.assigning.assignment import AmountBounds, assign
from resilient.templates.replan.layout_choices import prepare_lines
from resilient.templates.replan.replan_candidate import Situation
from resilient.templates.replan.transfer import transfers_between
from resilient.templates.replan.way import ReplanCandidate, Way, fastest_ms
from resilient.templates.search.partition import plan_templates
from resilient.templates.search.template_sizes import TooFewNodes, node_counts, usable_nodes
from resilient.templates.template import TemplateSet

_FEWEST_PLANNED_NODES = 8
# How many nodes more or less than now compositions are prepared for, where that is a quarter of them.
_LEAST_PREPARED_CHANGE = 4
_MOST_PREPARED_CHANGE = 256


def templates_for(problem: PlanningProblem, num_nodes: int) -> TemplateSet:
    """Return the templates for clusters of up to ``num_nodes`` nodes, rounded up to 8, 16, 32, ...

    Rounded, so that the loss or join of a node seldom asks for others. Templates too large for the nodes that are live
    are in no plan, because f + 1 pipelines must fit.

    Raises:
        TooFewNodes: Not even the rounded number holds f + 1 pipelines.
        ValueError: No number of nodes holds the model; the message says what to change.
    """
    try:
        return _templates(problem, max(_FEWEST_PLANNED_NODES, 1 << (num_nodes - 1).bit_length()))
    except TooFewNodes as error:
        raise TooFewNodes(num_nodes, problem.max_failures, error.needed // (problem.max_failures + 1)) from None


def prepare(problem: PlanningProblem, num_nodes: int) -> None:
    """Do ahead of time what a :func:`replan` around ``num_nodes`` nodes would otherwise do during a recovery.

    Computes compositions for up to a quarter of the nodes less and more (256 at most, f and 4 at least), templates and
    where slow nodes may be for half of them (as when one of two zones is lost), a quarter less and a quarter more, and
    makes a plan the first time, which loads and compiles what planning needs. The results are cached; calling it is
    optional and changes no plan.

    Raises:
        TooFewNodes: ``num_nodes`` nodes do not hold f + 1 pipelines.
    """
    _composed(problem, templates_for(problem, num_nodes), num_nodes)
    least, quarter = (problem.max_failures + 1) * templates_for(problem, num_nodes).sizes[0], num_nodes // 4
    change = max(min(quarter, _MOST_PREPARED_CHANGE), problem.max_failures, _LEAST_PREPARED_CHANGE)
    near = range(max(least, num_nodes - change), num_nodes + change + 1)
    for live in (max(least, num_nodes // 2), max(least, num_nodes - quarter), *near, num_nodes + quarter):
        templates = templates_for(problem, live)
        _composed(problem, templates, live)
        least_step_ns(templates, live, problem.num_microbatches, problem.max_failures + 1)
        prepare_lines(templates)
        prepare_places(templates, live)
    _load(problem, least)


@lru_cache(maxsize=64)
def _load(problem: PlanningProblem, num_nodes: int) -> None:
    """Make a plan and another one after it, only once: the event loop may be telling a thousand nodes of theirs."""
    # Imported late: it loads numba.
    from resilient.templates.replan.repair_loops import make_viable, use_spare

    plan = first_plan(problem, range(num_nodes))
    replan(problem, plan, range(1, num_nodes + 1))
    first, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    assign(one[None], first, first)
    AmountBounds().least(one[None], one, one)
    make_viable(first, one, 1, 1, 1, 1, False)
    use_spare(first, one, 1, 1, 1, 1, 1, False)
    latest_with_slow_ns(line_table([(Line(0, 1),)]), first, 1, first, first, one, np.ones(1), 1)


def warm_up() -> None:
    """Load and compile what a change needs, also with slow nodes and failure domains: it would wait for it else."""
    layers = tuple(
        LayerProfile(name=name, costs=(LayerCost(forward_ms=1.0),), parameter_bytes=1) for name in ("first", "last")
    )
    problem = PlanningProblem(profile=ModelProfile(layers=layers), num_microbatches=8, min_pipeline_nodes=2)
    prepare(problem, 4)
    plan = first_plan(problem, range(4))
    zones = {node: str(place) for pipeline in plan.pipelines for place, node in enumerate(pipeline.nodes)}
    replan(problem, plan, range(4), domains=zones)
    replan(problem, plan, range(4), slowdowns={0: 2.0})
    compose_with_slow(templates_for(problem, 4), 3, [2.0], problem.num_microbatches, 2, (0, nanoseconds(1e6)))
    first = layers[0]
    transfers_between({first.name: {0: first.whole}}, {first.name: {1: first.whole}})


def first_plan(
    problem: PlanningProblem,
    nodes: Sequence[int],
    *,
    domains: Mapping[int, str] | None = None,
    slowdowns: Mapping[int, float] | None = None,
) -> Plan:
    """Plan a job's first generation.

    Args:
        problem: The job.
        nodes: The live nodes, in any order.
        domains: Label of the failure domain (zone, rack) of nodes; a node without one shares its fate with no other.
        slowdowns: Nodes known to be slow, and by what factor (1 or more).

    Returns:
        The best composition; nodes stand by only where the step is shorter for it. The fastest nodes are taken, lower
        numbers first. Pipelines are filled domain by domain, so that few stretch over two.

    Raises:
        TooFewNodes: Not enough for f + 1 pipelines; the job cannot start yet.
    """
    return first_candidate(problem, nodes, domains=domains, slowdowns=slowdowns).plan


def first_candidate(
    problem: PlanningProblem,
    nodes: Sequence[int],
    *,
    domains: Mapping[int, str] | None = None,
    slowdowns: Mapping[int, float] | None = None,
) -> ReplanCandidate:
    """Return :func:`first_plan`, with its arguments and errors, and what there is to say of it."""
    live, labels, factors = _distinct(nodes), domains or {}, _checked(slowdowns)
    if labels or factors:
        live.sort(key=lambda node: (labels.get(node, ""), factors.get(node, 1.0), node))
    nothing = Plan(pipelines=(), schedule_kind=problem.schedule)
    ways = _situation(problem, nothing, live, labels, factors).ways()
    # Whatever the plan, all states are new: what counts is the step.
    found = [(cost, way) for way in ways if (cost := way.cost())]
    _, best = min(found, key=lambda each: (each[0].lacking_domains, nanoseconds(each[0].step_ms), -each[1].num_nodes))
    candidate = best.candidate()
    assert candidate is not None
    return candidate


def replan(
    problem: PlanningProblem,
    plan: Plan,
    nodes: Sequence[int],
    *,
    domains: Mapping[int, str] | None = None,
    slowdowns: Mapping[int, float] | None = None,
) -> Plan:
    """Plan the next generation: the first of :func:`replan_candidates`, with its arguments and errors.

    Returns:
        A plan on all nodes that pipelines can use, or on fewer where these are faster; the same for the same arguments,
        in whatever order ``nodes`` are.
        There is one even where a state has no live holder: that must then come from a checkpoint.
    """
    return next(replan_candidates(problem, plan, nodes, domains=domains, slowdowns=slowdowns)).plan


def replan_candidates(
    problem: PlanningProblem,
    plan: Plan,
    nodes: Sequence[int],
    *,
    domains: Mapping[int, str] | None = None,
    slowdowns: Mapping[int, float] | None = None,
) -> Iterator[ReplanCandidate]:
    """Return the ways to go on with the nodes that are live now, best first.

    Args:
        problem: The job.
        plan: The plan whose states the surviving nodes hold.
        nodes: The live nodes, survivors and joiners, in any order; without those that have announced to leave.
        domains: Label of the failure domain (zone, rack) of nodes; a node without one shares its fate with no other.
        slowdowns: Nodes that were seen to be slow, and by what factor (1 or more). Microbatches shift to the other
            pipelines, or the nodes to other places, or they stand by; layouts are for nodes as fast as profiled.

    Returns:
        An iterator: nodes are put into their places in those ways only that can be the next best.

    Raises:
        TooFewNodes: Not enough for f + 1 pipelines: store the progress and stop, or wait for nodes.
    """
    live, factors = _distinct(nodes), _checked(slowdowns)
    # Side by side before, of alike ones, is side by side afterwards: of a plan that differs so, little is to be told.
    there, before = set(live), set(plan.nodes)
    live = [*(node for node in plan.nodes if node in there), *(node for node in live if node not in before)]
    situation = _situation(problem, plan, live, domains or {}, factors)
    return _best_first(situation.ways(), nanoseconds(problem.failure_interval_s * 1e3))


def _situation(
    problem: PlanningProblem,
    plan: Plan,
    live: Sequence[int],
    domains: Mapping[int, str],
    slowdowns: Mapping[int, float],
) -> Situation:
    templates = templates_for(problem, len(live))
    _composed(problem, templates, len(live))  # raises what is wrong before anything else is computed
    return Situation(problem, templates, partial(_composed, problem, templates), plan, live, domains, slowdowns)


def _best_first(ways: Iterable[Way], interval_ns: int) -> Iterator[ReplanCandidate]:
    """Yield the candidates in order; each stands in the queue with what it is at least, until it is the first."""
    ways = list(ways)
    fastest_ns = nanoseconds(fastest_ms(ways))
    steps_ns = [nanoseconds(way.known_step_ms) for way in ways]
    num_equal = Counter(steps_ns)  # of those, copies decide
    # Lacking domains, the formula above times the fastest step (a whole number, so that no rounding decides), bytes.
    left = [(0, interval_ns * step_ns, 0, number, False) for number, step_ns in enumerate(steps_ns)]
    heapify(left)
    bounds = [
        iter(way.copy_bounds if num_equal[step_ns] > 1 else ()) for way, step_ns in zip(ways, steps_ns, strict=True)
    ]
    while left:
        *_, number, is_known = heappop(left)
        way, step_ns = ways[number], steps_ns[number]
        if is_known:
            candidate = way.candidate()
            assert candidate is not None
            yield candidate
            continue
        if bound := next(bounds[number], None):
            copy_ms, copied_bytes = bound()
            lacking = 0
        elif (cost := way.cost()) is not None:
            step_ms, copy_ms, copied_bytes, lacking = cost
            step_ns, is_known = nanoseconds(step_ms), True
        else:
            continue
        as_far_ns = nanoseconds(copy_ms) * fastest_ns + interval_ns * step_ns
        heappush(left, (lacking, as_far_ns, copied_bytes, number, is_known))


def _distinct(nodes: Sequence[int]) -> list[int]:
    live = sorted(set(nodes))
    if len(live) != len(nodes):
        raise ArgumentError("nodes", "be distinct", list(nodes), "name each live node once")
    return live


def _checked(slowdowns: Mapping[int, float] | None) -> Mapping[int, float]:
    for node, factor in (slowdowns or {}).items():
        if not factor >= 1:
            raise ValueError(f"slowdown of node {node} must be >= 1, got {factor}; 1 means as fast as profiled")
    return slowdowns or {}


@lru_cache(maxsize=64)
def _templates(problem: PlanningProblem, num_nodes: int) -> TemplateSet:
    if not problem.templates:
        return plan_templates(problem, num_nodes)
    sizes = node_counts(num_nodes, problem.max_failures, problem.templates[0].num_nodes)
    layouts = tuple((template,) for template in problem.templates if template.num_nodes in sizes)
    return TemplateSet(problem_digest=problem.digest, layouts=layouts)


@lru_cache(maxsize=1024)
def _composed(problem: PlanningProblem, templates: TemplateSet, num_nodes: int) -> Compositions:
    usable = usable_nodes(problem, templates, num_nodes)
    return compositions(templates, usable, problem.num_microbatches, problem.max_failures + 1)
