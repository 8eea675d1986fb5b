"""This project's own way: the planner of the runtime decides, and only what is missing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import LiveNodes, When
from resilient.simulation.replay.job import Response, SteadyWork
from resilient.templates.common.durations import nanoseconds
from resilient.templates.composition.batch_split import finish_ns, lines
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan, replan_candidates
from resilient.templates.search.template_sizes import TooFewNodes


class Resilient:
    """Survivors go on from the last finished step with the plan that :mod:`resilient.templates.replan.replan` makes.

    A change costs regrouping and the time of the node that copies most. Joiners and nodes that announce their
    departure cost no work. When a state is lost with all its holders, everybody loads the last checkpoint; when too few
    nodes are left, the job stores its progress and waits to be restarted.

    Args:
        planner: Of the job; runs that share one need not plan again what another has planned.
        costs: ``regroup_ms``, ``restart_s``, ``load_s``, ``checkpoint_s``, ``insurance_steps``,
            ``risk_s``.
    """

    name = "resilient"

    def __init__(self, planner: RememberedPlans, costs: ChangeCosts) -> None:
        self._planner = planner
        self._costs = costs
        self._arrangement: Arrangement | None = None
        self._nodes: tuple[int, ...] = ()
        self._started = False

    def when(self, change: LiveNodes) -> When:
        """A loss in a pipeline is answered at once, a join between two steps; standby nodes do not count."""
        if not set(self._nodes).isdisjoint(change.lost):
            return When.NOW
        return When.STEP if change.joined else When.NEVER

    def respond(self, change: LiveNodes) -> Response:
        """Go on with the next plan, from the checkpoint if need be; the first start is free."""
        before = self._arrangement
        try:
            if before is None:
                self._arrangement = self._planner.first(len(change.live))
                self._nodes = change.live[: self._arrangement.num_nodes]
                pause_ns = self._costs.restart_ns(len(self._nodes)) if self._started else 0
                self._started = True
                return Response(work=self._work(self._arrangement), pause_ns=pause_ns)
        except TooFewNodes:
            return Response(work=None)
        return self._go_on(before, change)

    def _go_on(self, before: Arrangement, change: LiveNodes) -> Response:
        live = set(change.live)
        gone = [place for place, node in enumerate(self._nodes) if node not in live]
        placed = set(self._nodes)
        spare = [node for node in change.live if node not in placed]
        rolls_back = not change.announced and self._planner.loses_state(before, gone)
        try:
            move = self._planner.next(before, gone, len(spare))
        except TooFewNodes:
            self._arrangement, self._nodes = None, ()
            return Response(work=None, rolls_back=rolls_back)
        named = (*self._nodes, *spare)
        self._arrangement = move.arrangement
        self._nodes = tuple(named[place] for place in move.places)
        pause_ns = self._costs.regroup_ns + (self._costs.load_ns(len(self._nodes)) if rolls_back else move.copy_ns)
        return Response(work=self._work(move.arrangement), pause_ns=pause_ns, rolls_back=rolls_back)

    def _work(self, arrangement: Arrangement) -> SteadyWork:
        step_ns, num_nodes = self._costs.step_ns(arrangement.step_ns), arrangement.num_nodes
        return SteadyWork(
            step_ns=step_ns,
            num_nodes=num_nodes,
            checkpoint_steps=self._costs.steps_between_insurances(step_ns, num_nodes),
            checkpoint_ns=self._costs.checkpoint_ns(num_nodes),
        )


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A plan whose nodes are called 0, 1, 2, ... in the order of their places, and what its step takes."""

    plan: Plan
    num_nodes: int
    step_ns: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """The next plan of a job, and what it takes to get there.

    Args:
        arrangement: The next plan.
        places: Which node is in each of its places: a place of the plan before, or one after these for a spare node.
        copy_ns: Time for copying states.
    """

    arrangement: Arrangement
    places: tuple[int, ...]
    copy_ns: int


_Key = tuple[tuple[int, int], ...]


class RememberedPlans:
    """The runtime's planner, which need not plan twice what differs in the names of nodes only.

    Args:
        problem: The job.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._arrangements: dict[_Key, Arrangement] = {}
        self._next: dict[tuple[_Key, tuple[int, ...], int], Move] = {}

    def first(self, num_nodes: int) -> Arrangement:
        """Return the plan of a job that starts.

        Raises:
            TooFewNodes: It cannot.
        """
        plan = first_plan(self._problem, range(num_nodes))
        alone = len(plan.pipelines) == 1
        step_ns = max(finish_ns(lines([p.template], alone=alone), p.num_microbatches) for p in plan.pipelines)
        return self._arrangement(plan, step_ns)

    def next(self, before: Arrangement, gone: Sequence[int], num_spare: int) -> Move:
        """Return the best way to go on.

        Args:
            before: What the job did.
            gone: Places whose nodes are gone, ascending.
            num_spare: Live nodes without a place: joiners and those that stood by.

        Raises:
            TooFewNodes: There is none.
        """
        key = _key(before.plan), tuple(gone), num_spare
        if key not in self._next:
            lost = set(gone)
            live = [place for place in range(before.num_nodes + num_spare) if place not in lost]
            best = next(replan_candidates(self._problem, before.plan, live))
            self._next[key] = Move(
                arrangement=self._arrangement(best.plan, nanoseconds(best.step_ms)),
                places=best.plan.nodes,
                copy_ns=nanoseconds(best.copy_ms),
            )
        return self._next[key]

    def loses_state(self, before: Arrangement, gone: Sequence[int]) -> bool:
        """Return whether all holders of some state are among the places that are gone."""
        if len(gone) <= self._problem.max_failures:
            return False
        lost = set(gone)
        held = {
            (stage.first_layer, stage.end_layer)
            for pipeline in before.plan.pipelines
            for stage in pipeline.template.stages
            if pipeline.nodes[stage.node_index] not in lost
        }
        profile = self._problem.profile
        return len({state for layers in held for state in profile.states(*layers)}) < len(profile.layers)

    def _arrangement(self, plan: Plan, step_ns: int) -> Arrangement:
        """Return the plan with its nodes named by their places; equal plans are one object."""
        key = _key(plan)
        if key not in self._arrangements:
            ends = list(accumulate((len(p.nodes) for p in plan.pipelines), initial=0))
            renamed = tuple(
                Pipeline(template=p.template, nodes=tuple(range(first, end)), num_microbatches=p.num_microbatches)
                for p, (first, end) in zip(plan.pipelines, pairwise(ends), strict=True)
            )
            self._arrangements[key] = Arrangement(
                plan=Plan(pipelines=renamed, schedule_kind=plan.schedule_kind),
                num_nodes=ends[-1],
                step_ns=max(1, step_ns),
            )
        return self._arrangements[key]


def _key(plan: Plan) -> _Key:
    # Templates are compared by identity: those of a job come from one cached set, and hashing them is slow.
    return tuple((id(pipeline.template), pipeline.num_microbatches) for pipeline in plan.pipelines)
