"""A job on a kind of cluster: runs policies on traces, and shares between runs what they plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from resilient.errors import ArgumentError
from resilient.simulation.availability.traces import AvailabilityTrace
from resilient.simulation.policies.bamboo import Bamboo, redundant_ns
from resilient.simulation.policies.resilient import RememberedPlans, Resilient
from resilient.simulation.policies.restart import Restart
from resilient.simulation.policies.varuna import Varuna
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import Policy, replay
from resilient.simulation.replay.grids import Grids, TemplateTime, plain_ns
from resilient.simulation.replay.outcome import ReplayOutcome
from resilient.templates.common.words import look_up
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.replan import templates_for

PUBLISHED = ("bamboo", "varuna", "restart")
"""Policies that keep checkpoints every ``checkpoint_steps``, as published; each ``-tuned`` one by cost and risk."""

POLICIES = ("resilient", *(f"{name}{how}" for name in PUBLISHED for how in ("", "-tuned")))


_UNSEEN = 0.5
"""Losses that count beside those that a trace has or leads to expect: none in so long a time does not mean never.
Source: the prior of Jeffreys for a rate."""


class DoesNotFit(ValueError):  # noqa: N818
    """A policy can never train here: the memory is too small, or the nodes too few.

    Args:
        reason: What is wrong.
        about: What it is wrong for, before the reason.
    """

    def __init__(self, reason: ValueError, about: str = "") -> None:
        super().__init__(reason, about)
        self._reason = reason
        self._about = about

    def told(self, named: Callable[[str], str]) -> str:
        """Return the message with every argument called what ``named`` calls it."""
        reason = self._reason
        return self._about + (reason.told(named) if isinstance(reason, ArgumentError | DoesNotFit) else str(reason))

    def __str__(self) -> str:
        return self.told(str)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The job that traces are replayed for, and what changes cost it.

    Args:
        problem: The job.
        batch: Samples of a step.
        max_nodes: The most nodes of any trace; decides how deep pipelines may be.
        costs: What changes and checkpoints cost.
        node_hour_dollars: Price of a node for an hour.
        announced: Whether nodes are told before they are taken and stay until the step under way is finished.
        restart_nodes: Nodes that the policy ``restart`` needs; by default as many as a trace begins with.
    """

    problem: PlanningProblem
    batch: int
    max_nodes: int
    costs: ChangeCosts = field(default_factory=ChangeCosts)
    node_hour_dollars: float = 0.0
    announced: bool = False
    restart_nodes: int | None = None

    def run(self, trace: AvailabilityTrace, policy: str) -> ReplayOutcome:
        """Replay a trace.

        Args:
            trace: What happens.
            policy: One of :data:`POLICIES`.

        Raises:
            DoesNotFit: The policy can never train here.
            ValueError: There is no such policy.
        """
        return ReplayOutcome(
            policy=policy,
            trace=trace.name,
            stretches=replay(trace, self._policy(policy, trace), announced=self.announced),
            batch=self.batch,
            node_hour_dollars=self.node_hour_dollars,
        )

    def _policy(self, name: str, trace: AvailabilityTrace) -> Policy:
        look_up("policy", name, dict.fromkeys(POLICIES))
        costs = self.costs
        if name in PUBLISHED:
            costs = replace(costs, risk_s=None)
        elif costs.risk_s is None:
            costs = replace(costs, risk_s=self._risk_s(trace, name))
        make: dict[str, Callable[[ChangeCosts], Policy]] = {
            "resilient": self._resilient,
            "bamboo": lambda costs: Bamboo(self._redundant_grids, costs),
            "varuna": lambda costs: Varuna(self._grids, costs),
            "restart": lambda costs: self._restart(costs, trace.first_nodes),
        }
        return make[name.removesuffix("-tuned")](costs)

    def _risk_s(self, trace: AvailabilityTrace, policy: str) -> float:
        """Return the mean time between losses after which a policy goes back to a checkpoint, as the trace has them.

        Those of any node, and under ``bamboo`` those of several at once. The policy ``resilient`` goes back if they
        were all holders of a state: expected is how often that is if which nodes are lost at once is chance.
        """
        lost = [(len(change.lost), before) for change, before in zip(trace.changes, _before(trace), strict=True)]
        if policy == "resilient":
            times = 0.0 if self.announced else sum(self._part_losing_a_state(*each) for each in lost)
        else:
            times = sum(number > (policy == "bamboo-tuned") for number, _ in lost)
        return (trace.end_ms - trace.changes[0].time_ms) / 1e3 / (times + _UNSEEN)

    def _part_losing_a_state(self, num_lost: int, num_live: int) -> float:
        """Return how likely it is that so many of the live nodes are all holders of some state."""
        if num_lost <= self.problem.max_failures:
            return 0.0
        plan = self._first_plan()
        size = len(plan.nodes) / len(plan.pipelines)
        num_holders = max(self.problem.max_failures + 1, round(num_live / size))
        all_lost = math.prod(max(0, num_lost - i) / max(1, num_live - i) for i in range(num_holders))
        return min(1.0, size * all_lost)

    @cached_property
    def _planner(self) -> RememberedPlans:
        return RememberedPlans(self.problem)

    @cached_property
    def _grids(self) -> Grids:
        return self._make_grids(replace(self.problem, max_failures=0), plain_ns)

    @cached_property
    def _redundant_grids(self) -> Grids:
        """Of two nodes or more, each with half of its memory for the layers of its successor."""
        cluster = self.problem.cluster
        if cluster.memory_bytes is not None:
            cluster = replace(cluster, memory_bytes=cluster.memory_bytes // 2)
        least = max(2, self.problem.min_pipeline_nodes)
        problem = replace(self.problem, max_failures=0, cluster=cluster, min_pipeline_nodes=least)
        try:
            return self._make_grids(problem, redundant_ns)
        except DoesNotFit as error:
            raise DoesNotFit(error, "half of the memory is for the next node's layers: ") from None

    def _make_grids(self, problem: PlanningProblem, time: TemplateTime) -> Grids:
        try:
            return Grids(templates_for(problem, self.max_nodes), problem.num_microbatches, time)
        except ValueError as error:
            raise DoesNotFit(error) from None

    def _resilient(self, costs: ChangeCosts) -> Resilient:
        self._first_plan()
        return Resilient(self._planner, costs)

    def _first_plan(self) -> Plan:
        try:
            return self._planner.first(self.max_nodes).plan
        except ValueError as error:
            raise DoesNotFit(error) from None

    def _restart(self, costs: ChangeCosts, first_nodes: int) -> Restart:
        if self.restart_nodes is not None and self.restart_nodes > self.max_nodes:
            most = f"be at most {self.max_nodes}, the most nodes that there ever are"
            raise DoesNotFit(
                ArgumentError("restart_nodes", most, self.restart_nodes, "say fewer, or replay more nodes")
            )
        try:
            return Restart(self._grids, costs, self.restart_nodes or first_nodes)
        except ArgumentError as error:
            fix = error.fix
            if self.restart_nodes is None:
                fix = "that is how many the trace begins with; say from how many on to train, or replay more nodes"
            raise DoesNotFit(ArgumentError("restart_nodes", error.constraint, error.value, fix)) from None
        except ValueError as error:
            raise DoesNotFit(error) from None


def _before(trace: AvailabilityTrace) -> Iterator[int]:
    """Yield the live nodes before each change."""
    live = 0
    for _, after in trace.counts():
        yield live
        live = after
