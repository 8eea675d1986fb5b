"""Nodes stand by exactly where that is faster: plans are as fast as the best use of any of the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.common.durations import nanoseconds
from resilient.templates.composition.batch_split import Lines, finish_ns, lines, slowed_line
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import cluster_of
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.placement import Placer, Seats, Targets
from resilient.templates.replan.replan import (
    first_candidate,
    first_plan,
    replan_candidates,
    templates_for,
)
from resilient.templates.template import TemplateSet
from tests.templates.jobs import enough_nodes, problems, profile, step_ns

MOST_NODES = 6
NEVER_S = 1e9
"""Nothing fails, so that no copying is too much."""


def divisions(nodes: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put some of the nodes into groups."""
    if not nodes:
        yield []
        return
    first, *others = nodes
    for groups in divisions(others):
        yield groups
        yield [[first], *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], [first, *group], *groups[index + 1 :]]


def fastest_step_ns(problem: PlanningProblem, nodes: Sequence[int], slowdowns: Mapping[int, float]) -> int:
    """The shortest step of all: any of the nodes, in any groups, at any places of any layouts."""
    templates = templates_for(problem, len(nodes))
    known: dict[tuple[tuple[float, ...], bool], Lines] = {}

    def choices(group: Sequence[int], *, alone: bool) -> Lines:
        factors = tuple(sorted(slowdowns.get(node, 1.0) for node in group))
        if (factors, alone) not in known:
            known[factors, alone] = every_line(templates, factors, alone=alone)
        return known[factors, alone]

    steps = (
        step_ns([choices(group, alone=len(groups) == 1) for group in groups], problem.num_microbatches)
        for groups in divisions(nodes)
        if problem.max_failures + 1 <= len(groups) <= problem.num_microbatches
        and all(len(group) in templates.sizes for group in groups)
    )
    return min(steps)


def every_line(templates: TemplateSet, factors: Sequence[float], *, alone: bool) -> Lines:
    orders = set(permutations(factors))
    return tuple(slowed_line(layout, order, alone=alone) for layout in templates.of(len(factors)) for order in orders)


def planned_step_ns(plan: Plan, slowdowns: Mapping[int, float]) -> int:
    """What a plan's step takes on its nodes."""
    alone = len(plan.pipelines) == 1
    return max(
        finish_ns(
            (slowed_line(each.template, [slowdowns.get(node, 1.0) for node in each.nodes], alone=alone),),
            each.num_microbatches,
        )
        for each in plan.pipelines
    )


def check_as_fast_as_can_be(
    problem: PlanningProblem, plan: Plan, live: Sequence[int], slow: Mapping[int, float]
) -> None:
    assert len(plan.pipelines) > problem.max_failures
    assert set(plan.nodes) <= set(live)
    assert plan.redundancy(problem.profile) > problem.max_failures
    # The sums of the search differ from those of a line by less than a nanosecond, and are rounded.
    assert planned_step_ns(plan, slow) <= fastest_step_ns(problem, live, slow) + 2


_FACTORS = st.sampled_from([1.25, 1.5, 2.0, 3.0, 10.0])


@settings(max_examples=60)
@given(st.data(), problems(max_degree=2))
def test_no_use_of_some_of_the_nodes_is_faster_than_the_plan(data: st.DataObject, problem: PlanningProblem) -> None:
    least = (problem.max_failures + 1) * templates_for(problem, enough_nodes(problem)).sizes[0]
    if least > MOST_NODES:
        return
    problem = replace(problem, failure_interval_s=NEVER_S)
    nodes = range(data.draw(st.integers(least, MOST_NODES)))
    slow = data.draw(st.dictionaries(st.sampled_from(nodes), _FACTORS, max_size=MOST_NODES))
    plan = first_plan(problem, nodes, slowdowns=slow)
    check_as_fast_as_can_be(problem, plan, nodes, slow)
    for _ in range(2):
        live = sorted(data.draw(st.sets(st.sampled_from(range(len(nodes) + 2)), min_size=least, max_size=MOST_NODES)))
        slow = data.draw(st.dictionaries(st.sampled_from(live), _FACTORS, max_size=MOST_NODES))
        found = list(replan_candidates(problem, plan, live, slowdowns=slow))
        plan = found[0].plan
        check_as_fast_as_can_be(problem, plan, live, slow)
        for candidate in found:
            assert candidate.step_ms * 1e6 == pytest.approx(planned_step_ns(candidate.plan, slow))


@pytest.mark.parametrize(
    ("layers_ms", "num_microbatches", "slow", "step_ms"),
    [
        ((5.0, 2.0, 1.0, 5.0, 2.0, 5.0), 4, {0: 3.0, 7: 1.5, 5: 2.0, 3: 2.0, 6: 1.25}, 32.0),
        ((2.0, 1.0, 1.0, 5.0, 5.0, 5.0), 3, {3: 3.0, 6: 1.5, 4: 10.0, 0: 2.0, 2: 1.25}, 28.0),
    ],
)
def test_some_slow_nodes_stand_by_where_it_would_be_slower_without_all_of_them(
    layers_ms: tuple[float, ...], num_microbatches: int, slow: dict[int, float], step_ms: float
) -> None:
    problem = PlanningProblem(
        profile=profile([*layers_ms]),
        num_microbatches=num_microbatches,
        max_failures=1,
        min_pipeline_nodes=2,
        failure_interval_s=NEVER_S,
    )
    best = next(replan_candidates(problem, first_plan(problem, range(8)), range(8), slowdowns=slow))
    assert best.step_ms == step_ms
    left_out = set(range(8)) - {*best.plan.nodes}
    assert left_out
    assert left_out < {*slow}


@settings(max_examples=80)
@given(st.data(), problems(max_degree=2))
def test_in_zones_a_step_takes_what_it_is_said_to_take(data: st.DataObject, problem: PlanningProblem) -> None:
    """Also where nodes leave the places that are meant for them; the batch is split for who is there."""
    least = enough_nodes(problem)
    plan = Plan(pipelines=(), schedule_kind=problem.schedule)
    for _ in range(2):
        live = sorted(data.draw(st.sets(st.integers(0, least + 5), min_size=least)))
        slow = data.draw(st.dictionaries(st.sampled_from(live), _FACTORS, max_size=4))
        domains = {node: data.draw(st.sampled_from("abc")) for node in live}
        found = list(replan_candidates(problem, plan, live, domains=domains, slowdowns=slow))
        for each in (first_candidate(problem, live, domains=domains, slowdowns=slow), *found):
            assert each.step_ms * 1e6 == pytest.approx(planned_step_ns(each.plan, slow), abs=1)
            pipelines, alone = each.plan.pipelines, len(each.plan.pipelines) == 1
            own = [[slow.get(node, 1.0) for node in pipeline.nodes] for pipeline in pipelines]
            slowed = [
                (slowed_line(pipeline.template, factors, alone=alone),)
                for pipeline, factors in zip(pipelines, own, strict=True)
            ]
            assert planned_step_ns(each.plan, slow) == step_ns(slowed, problem.num_microbatches)
        plan = found[0].plan


@pytest.mark.parametrize(
    ("layers_ms", "num_microbatches", "zones", "slow"),
    [
        ((9.0, 12.0, 3.0), 12, "bbba", {3: 2.0, 1: 2.0}),
        ((3.0, 9.0, 12.0, 3.0), 12, "babba", {4: 4.0, 1: 4.0}),
        ((6.0, 12.0, 3.0), 5, "babb", {0: 4.0, 1: 2.0}),
    ],
)
def test_a_pipeline_that_zones_take_a_slow_node_from_is_as_fast_as_its_nodes(
    layers_ms: tuple[float, ...], num_microbatches: int, zones: str, slow: dict[int, float]
) -> None:
    problem = PlanningProblem(
        profile=profile([*layers_ms]), num_microbatches=num_microbatches, max_failures=1, min_pipeline_nodes=2
    )
    nodes = range(len(zones))
    found = first_candidate(problem, nodes, domains=dict(zip(nodes, zones, strict=True)), slowdowns=slow)
    assert found.step_ms * 1e6 == planned_step_ns(found.plan, slow)


@pytest.mark.parametrize(
    ("layers_ms", "min_pipeline_nodes", "zones", "slow", "step_ms"),
    [((6.0, 12.0), 1, "bbbba", {1: 4.0}, 18.0), ((3.0, 9.0, 3.0), 2, "aaab", {0: 4.0}, 24.0)],
)
def test_where_zones_cannot_have_every_state_slow_nodes_are_where_they_would_be_without_zones(
    layers_ms: tuple[float, ...], min_pipeline_nodes: int, zones: str, slow: dict[int, float], step_ms: float
) -> None:
    problem = PlanningProblem(
        profile=profile([*layers_ms]), num_microbatches=2, max_failures=1, min_pipeline_nodes=min_pipeline_nodes
    )
    nodes = range(len(zones))
    found = first_candidate(problem, nodes, domains=dict(zip(nodes, zones, strict=True)), slowdowns=slow)
    assert (found.lacking_domains, found.step_ms) == (1, step_ms)
    assert first_candidate(problem, nodes, slowdowns=slow).step_ms == step_ms


def sixteen() -> PlanningProblem:
    """The job of `resilient plan --model llama3-8b --nodes 16 --device a100-80gb --max-failures 1`."""
    return PlanningProblem(
        profile=derive_profile("llama3-8b", "a100-80gb", microbatch=1),
        num_microbatches=1024,
        cluster=cluster_of("a100-80gb", 1),
        max_failures=1,
        failure_interval_s=NEVER_S,
    )


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_a_slow_node_of_sixteen_stands_by_and_comes_in_when_another_is_lost(factor: float) -> None:
    problem, slow = sixteen(), {5: factor}
    plain = first_plan(problem, range(16))
    without = max(first_plan(problem, range(15)).finish_ms)
    for found in (
        first_candidate(problem, range(16), slowdowns=slow),
        next(replan_candidates(problem, plain, range(16), slowdowns=slow)),
    ):
        assert found.step_ms <= without
        assert planned_step_ns(found.plan, slow) / 1e6 == pytest.approx(found.step_ms)


def sums(total: int, sizes: range, largest: int) -> Iterator[tuple[int, ...]]:
    """All sums of some sizes, descending."""
    if total == 0:
        yield ()
    for size in range(min(total, largest, sizes[-1]), sizes[0] - 1, -1):
        for others in sums(total - size, sizes, size):
            yield (size, *others)


@pytest.mark.parametrize(("num_slow", "factor"), [(5, 3.0), (8, 1.5), (8, 3.0), (12, 2.0), (12, 3.0)])
def test_many_slow_nodes_are_as_fast_as_where_they_are_kept_together(num_slow: int, factor: float) -> None:
    problem, slow = sixteen(), dict.fromkeys(range(num_slow), factor)
    templates = templates_for(problem, 16)
    slowed = {
        size: tuple(slowed_line(layout, [factor] * size) for layout in templates.of(size)) for size in templates.sizes
    }
    together = min(
        step_ns(
            [*(slowed[size] for size in of_slow), *(lines(templates.of(size)) for size in of_others)],
            problem.num_microbatches,
        )
        for of_slow in sums(num_slow, templates.sizes, 16)
        for of_others in sums(16 - num_slow, templates.sizes, 16)
        if len(of_slow) + len(of_others) >= 2
    )
    for found in (
        first_candidate(problem, range(16), slowdowns=slow),
        next(replan_candidates(problem, first_plan(problem, range(16)), range(16), slowdowns=slow)),
    ):
        assert nanoseconds(found.step_ms) <= together
        assert planned_step_ns(found.plan, slow) / 1e6 == pytest.approx(found.step_ms)


def test_a_slow_node_whose_part_suits_it_stays() -> None:
    """The second stage has so little to do that a node twice as slow is soon enough done with it."""
    uneven = PlanningProblem(
        profile=profile([8.0, 4.0]), num_microbatches=12, min_pipeline_nodes=2, failure_interval_s=NEVER_S
    )
    plan = first_plan(uneven, range(4))
    found = next(replan_candidates(uneven, plan, range(4), slowdowns={plan.nodes[0]: 2.0}))
    assert set(found.plan.nodes) == set(range(4))
    (slow,) = (pipeline for pipeline in found.plan.pipelines if plan.nodes[0] in pipeline.nodes)
    assert slow.nodes[1] == plan.nodes[0]
    assert found.with_more_ms is None


def test_redundancy_comes_before_speed() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 4), num_microbatches=8, min_pipeline_nodes=2, failure_interval_s=NEVER_S
    )
    plan = first_plan(problem, range(4), slowdowns={0: 100.0})
    assert set(plan.nodes) == set(range(4))


def test_what_stands_by_takes_the_place_of_what_is_lost() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 4), num_microbatches=8, min_pipeline_nodes=2, failure_interval_s=NEVER_S
    )
    slow = {4: 20.0}
    plan = first_candidate(problem, range(5), slowdowns=slow)
    assert set(plan.plan.nodes) == set(range(4))
    assert plan.with_more_ms is not None
    assert plan.with_more_ms > plan.step_ms
    after = next(replan_candidates(problem, plan.plan, [0, 2, 3, 4], slowdowns=slow))
    assert (after.kind, set(after.plan.nodes), after.with_more_ms) == ("join", {0, 2, 3, 4}, None)


def test_a_joiner_too_many_stands_by_and_nothing_is_copied() -> None:
    """Messages take as long as a layer: a third node makes a pipeline slower."""
    problem = PlanningProblem(
        profile=profile([4.0] * 3, input_bytes=4000),
        num_microbatches=2,
        cluster=Cluster(inter_node=Link(latency_ms=3.0)),
        failure_interval_s=NEVER_S,
    )
    plan = first_plan(problem, range(2))
    found = next(replan_candidates(problem, plan, range(3)))
    assert (found.kind, found.plan, found.copied_bytes) == ("keep", plan, 0)
    assert found.with_more_ms is not None


def test_what_a_step_takes_with_all_nodes_is_found_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That eight nodes are faster without the slow one is known before any is in its place."""
    problem = PlanningProblem(profile=profile([1.0] * 8), num_microbatches=32, failure_interval_s=NEVER_S)
    plan, seats, placed = first_plan(problem, range(9)), Placer.seats, list[int]()

    def place(placer: Placer, targets: Targets, *more: Any, **settings: Any) -> Seats:
        found = seats(placer, targets, *more, **settings)
        placed.append(len(found.nodes))
        return found

    monkeypatch.setattr(Placer, "seats", place)
    found = next(replan_candidates(problem, plan, range(9), slowdowns={3: 30.0}))
    assert (set(found.plan.nodes), found.step_ms, placed) == ({*range(9)} - {3}, 32.0, [8])
    assert (found.with_more_ms, placed) == (240.0, [8, 9])


def test_slow_nodes_share_what_they_can_where_none_may_stand_by() -> None:
    problem = PlanningProblem(
        profile=profile([1.0] * 4), num_microbatches=12, min_pipeline_nodes=2, failure_interval_s=NEVER_S
    )
    plan = first_plan(problem, range(4))
    together = next(replan_candidates(problem, plan, range(4), slowdowns={0: 3.0, 2: 3.0}))
    assert {0, 2} in [set(pipeline.nodes) for pipeline in together.plan.pipelines]


def test_slow_nodes_have_layouts_of_the_templates_at_hand_where_others_are_equal() -> None:
    """Templates for up to eight nodes and for up to sixteen are equal here, and not the same objects."""
    layers = profile([4.0, 4.0, 2.0])
    problem = PlanningProblem(profile=layers, num_microbatches=26, max_failures=2, min_pipeline_nodes=2)
    assert templates_for(problem, 8) == templates_for(problem, 9)
    slow = {0: 1.5}
    before = first_plan(problem, range(8), slowdowns=slow)
    following = next(replan_candidates(problem, before, range(9), slowdowns=slow))
    assert nanoseconds(following.step_ms) == fastest_step_ns(problem, range(9), slow)


def test_zones_bring_in_no_slow_node_where_others_can_exchange_their_places() -> None:
    """Every node with the first layers is in zone a. Node 8 would bring them to b, for less than two that exchange."""
    problem = PlanningProblem(profile=profile([1.0] * 4), num_microbatches=24, min_pipeline_nodes=2)
    before, zones = first_plan(problem, range(8)), dict(enumerate("abababaab"))
    assert [pipeline.nodes for pipeline in before.pipelines] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    fast, slow = (
        next(replan_candidates(problem, before, range(9), domains=zones, slowdowns=slowdowns))
        for slowdowns in ({}, {8: 10.0})
    )
    assert (8 in fast.plan.nodes, fast.lacking_domains) == (True, 0)
    assert (8 in slow.plan.nodes, slow.lacking_domains, slow.step_ms) == (False, 0, fast.step_ms)


@pytest.mark.parametrize(
    ("num_nodes", "standing_by"), [(64, [1, 2, 3, 4]), (65, [4])], ids=["as many as differ", "all or none"]
)
def test_of_many_nodes_all_slow_ones_stand_by_or_none(num_nodes: int, standing_by: list[int]) -> None:
    problem = PlanningProblem(profile=profile([1.0] * 4), num_microbatches=2 * num_nodes, min_pipeline_nodes=2)
    slow = {5: 2.0, 11: 3.0, 20: 5.0, 31: 8.0}
    found = replan_candidates(problem, first_plan(problem, range(num_nodes)), range(num_nodes), slowdowns=slow)
    numbers = {len(slow.keys() - {*each.plan.nodes}) for each in found}
    assert sorted(numbers - {0}) == standing_by
