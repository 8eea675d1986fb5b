from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan import replan as module
from resilient.templates.replan.placement import Placer
from resilient.templates.replan.replan import first_plan, prepare, replan, templates_for
from resilient.templates.replan.way import ReplanCandidate
from resilient.templates.search.template_sizes import TooFewNodes, usable_nodes
from tests.templates.jobs import MIB, cut, enough_nodes, layout, plan_of, problems, profile, repairs_of


def replan_candidates(*args: Any, **kwargs: Any) -> list[ReplanCandidate]:
    return list(module.replan_candidates(*args, **kwargs))


def sizes(plan: Plan) -> list[int]:
    return [pipeline.template.num_nodes for pipeline in plan.pipelines]


def made_of(problem: PlanningProblem, *pipelines: tuple[int, ...]) -> Plan:
    """A plan on the given nodes, with one microbatch per pipeline."""
    templates = templates_for(problem, 8)
    return plan_of(*((templates.best(len(nodes), problem.num_microbatches // 2), nodes) for nodes in pipelines))


def small_job(num_layers: int = 6, smallest: int = 2, **more: Any) -> PlanningProblem:
    return PlanningProblem(
        profile=profile([1.0] * num_layers), num_microbatches=12, min_pipeline_nodes=smallest, **more
    )


def check(problem: PlanningProblem, plan: Plan, live: Sequence[int]) -> None:
    templates = templates_for(problem, len(live))
    assert set(plan.nodes) <= set(live)
    assert len(set(plan.nodes)) == len(plan.nodes) <= usable_nodes(problem, templates, len(live))
    assert all(pipeline.template.num_nodes == len(pipeline.nodes) for pipeline in plan.pipelines)
    assert len(plan.pipelines) >= problem.max_failures + 1
    assert min(sizes(plan)) >= templates.sizes[0]
    assert sum(pipeline.num_microbatches for pipeline in plan.pipelines) == problem.num_microbatches
    assert min(pipeline.num_microbatches for pipeline in plan.pipelines) >= 1
    assert plan.redundancy(problem.profile) >= problem.max_failures + 1


def check_local(problem: PlanningProblem, before: Plan, live: Sequence[int]) -> None:
    """Each repair is among the candidates, with the layouts of the pipelines that it does not concern as they were."""
    alive = set(live)
    ways = repairs_of(
        before,
        live,
        templates_for(problem, len(live)).sizes,
        min_pipelines=problem.max_failures + 1,
        max_pipelines=problem.num_microbatches,
    )
    found = replan_candidates(problem, before, live)
    usable = usable_nodes(problem, templates_for(problem, len(live)), len(live))
    for _, pipelines in ways:
        if sum(size for _, size in pipelines) == usable:
            kept = Counter(
                before.pipelines[index].template
                for index, size in pipelines
                if index is not None and alive.issuperset(before.pipelines[index].nodes)
                if size == len(before.pipelines[index].nodes)
            )
            assert any(kept <= Counter(each.template for each in candidate.plan.pipelines) for candidate in found)


@settings(max_examples=40)
@given(st.data(), problems())
def test_a_plan_exists_through_any_failures_and_joins(data: st.DataObject, problem: PlanningProblem) -> None:
    nodes = list(range(enough_nodes(problem) + data.draw(st.integers(0, 4))))
    least = (problem.max_failures + 1) * templates_for(problem, len(nodes)).sizes[0]
    live = nodes[: least + data.draw(st.integers(0, len(nodes) - least))]
    plan = first_plan(problem, live)
    check(problem, plan, live)
    next_node = len(live)
    for _ in range(data.draw(st.integers(1, 4))):
        joiners = data.draw(st.integers(0, 3))
        lost = data.draw(st.sets(st.sampled_from(live), max_size=max(0, len(live) + joiners - least)))
        live = [node for node in live if node not in lost] + list(range(next_node, next_node + joiners))
        next_node += joiners
        slowdowns = data.draw(st.dictionaries(st.sampled_from(live), st.floats(1, 4), max_size=2))
        domains = data.draw(st.dictionaries(st.sampled_from(live), st.sampled_from("ab"), max_size=len(live)))
        before, plan = plan, replan(problem, plan, live, domains=domains, slowdowns=slowdowns)
        check(problem, plan, live)
        shuffled = data.draw(st.permutations(live))
        assert replan(problem, before, shuffled, domains=domains, slowdowns=slowdowns) == plan
        check_local(problem, before, live)


@given(st.data(), problems(), st.integers(1, 10**6))
def test_the_candidate_with_which_the_job_is_furthest_comes_first(
    data: st.DataObject, problem: PlanningProblem, failure_interval_ms: int
) -> None:
    problem = replace(problem, failure_interval_s=failure_interval_ms / 1e3)
    nodes = range(enough_nodes(problem) + 3)
    lost = data.draw(st.sets(st.sampled_from(nodes), max_size=3))
    live = [node for node in range(len(nodes) + 1) if node not in lost]
    domains = data.draw(st.dictionaries(st.sampled_from(live), st.sampled_from("ab"), max_size=len(live)))
    slowdowns = data.draw(st.dictionaries(st.sampled_from(live), st.floats(1, 4), max_size=1))
    found = replan_candidates(problem, first_plan(problem, nodes), live, domains=domains, slowdowns=slowdowns)
    copies, steps = (
        [nanoseconds(each) for each in of] for of in zip(*((c.copy_ms, c.step_ms) for c in found), strict=True)
    )
    interval, fastest = nanoseconds(failure_interval_ms), min(steps)
    costs = [copy * fastest + interval * step for copy, step in zip(copies, steps, strict=True)]
    ranks = [(each.lacking_domains, cost) for each, cost in zip(found, costs, strict=True)]
    assert ranks == sorted(ranks)


def test_first_plan_fills_pipelines_with_the_nodes_in_order() -> None:
    assert layout(first_plan(small_job(), [7, 3, 5, 1, 9])) == [((1, 3, 5), 7), ((7, 9), 5)]


def test_simple_only_the_concerned_pipeline_shrinks() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    found = replan_candidates(problem, before, [0, 1, 3, 4])
    assert found[0].kind == "simple"
    assert found[0].plan.pipelines[1].nodes == (3, 4)
    assert layout(found[0].plan) == [((0, 1), 6), ((3, 4), 6)]


def test_borrow_takes_the_node_that_saves_most_from_the_pipeline_that_can_spare_one() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    found = replan_candidates(problem, before, [0, 1, 2, 4])
    assert found[0].kind == "borrow"
    # Places for layers 0-2 and 3-5, twice; node 4 holds 3-5, and the others 0-1, 2-3 and 4-5: they lack 1, 2 and 1.
    assert found[0].copied_bytes == 4 * MIB
    assert 4 in {pipeline.nodes[1] for pipeline in found[0].plan.pipelines}


def test_merge_when_nobody_can_spare_a_node() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3), (4, 5))
    found = replan_candidates(problem, before, [0, 1, 2, 3, 5])
    assert found[0].kind == "merge"
    assert sizes(found[0].plan) == [3, 2]
    assert found[0].plan.pipelines[1].nodes == (2, 3)
    assert found[0].copied_bytes == MIB  # the middle one of three stages lacks one layer


def test_a_pipeline_that_lost_all_nodes_goes_where_enough_are_left() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3), (4, 5))
    found = replan_candidates(problem, before, [0, 1, 2, 3])
    assert (found[0].kind, found[0].copied_bytes) == ("simple", 0)
    assert layout(found[0].plan) == [((0, 1), 6), ((2, 3), 6)]


def test_a_joiner_replaces_the_lost_node_and_nothing_else_moves() -> None:
    problem = small_job(num_layers=6, smallest=3)
    before = made_of(problem, (0, 1, 2), (3, 4, 5))
    found = replan_candidates(problem, before, [0, 2, 3, 4, 5, 8])
    assert found[0].kind == "join"
    assert [pipeline.nodes for pipeline in found[0].plan.pipelines] == [(0, 8, 2), (3, 4, 5)]


def test_several_failures_are_handled_at_once() -> None:
    problem = small_job(smallest=1)
    before = made_of(problem, (0, 1, 2), (3, 4), (5, 6))
    found = replan_candidates(problem, before, [0, 2, 4, 5])
    local = next(candidate for candidate in found if candidate.kind == "simple")
    assert sizes(local.plan) == [2, 1, 1]
    # Nodes 4 and 5 hold 3-5 and 0-2, nodes 0 and 2 hold 0-1 and 4-5. Whichever two share a pipeline, 8 layers lack.
    assert local.copied_bytes == 8 * MIB


def test_a_leaver_that_is_not_among_the_nodes_is_planned_without() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    assert 1 not in replan(problem, before, [0, 2, 3, 4]).nodes


def test_no_change_of_nodes_is_no_change_of_plan() -> None:
    problem = small_job()
    before = first_plan(problem, range(7))
    found = replan_candidates(problem, before, range(7))
    assert [candidate.kind for candidate in found] == ["keep"]
    assert found[0].plan == before
    assert (found[0].copied_bytes, found[0].copy_ms) == (0, 0.0)


def test_copying_must_pay_until_the_next_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_job(num_layers=8, smallest=1)
    before = made_of(problem, (0, 1, 2, 3), (4, 5, 6, 7))
    live = [0, 1, 2, 3, 4, 5, 6]
    by_kind = {candidate.kind: candidate for candidate in replan_candidates(problem, before, live)}
    local, composed = by_kind["simple"], by_kind["composed"]
    assert sizes(local.plan) == [4, 3]
    assert sizes(composed.plan) == [1] * 7
    # Stages of 2 ms and of 3 ms: 6 + 7 x 2 = 5 + 5 x 3; two microbatches of 8 ms.
    assert (local.step_ms, composed.step_ms) == (20.0, 16.0)
    # All nodes lack six of eight layers; node 3 alone holds the last two, and sends them to six.
    assert composed.copied_bytes == 7 * 6 * MIB
    assert composed.copy_ms == pytest.approx(12 * MIB / 1.25e9 * 1e3)
    breaks_even_s = (composed.copy_ms - local.copy_ms) / (20 / 16 - 1) / 1e3
    for interval_s, kind in ((breaks_even_s * 1.01, "composed"), (breaks_even_s * 0.99, "simple")):
        assert replan_candidates(replace(problem, failure_interval_s=interval_s), before, live)[0].kind == kind
    # Where failures are rare, the shorter step cannot be caught up with: the nodes of no other way are placed.
    placed: list[int] = []
    seats = Placer.seats
    monkeypatch.setattr(Placer, "seats", lambda *args, **more: placed.append(1) or seats(*args, **more))
    replan(replace(problem, failure_interval_s=breaks_even_s * 9), before, live)
    assert len(placed) == 1


def test_copying_takes_as_long_as_the_link_takes_for_the_busiest_node() -> None:
    frozen = profile([1.0] * 6).frozen([f"l{i}" for i in range(6)])
    link = Link(latency_ms=0.001, bytes_per_s=1e6)
    problem = replace(small_job(), profile=frozen, cluster=Cluster(inter_node=link))
    before = made_of(problem, (0, 1), (2, 3), (4, 5))
    found = replan_candidates(problem, before, [0, 1, 2, 3, 5])[0]
    assert found.copied_bytes == MIB // 3
    assert found.copy_ms == pytest.approx(0.001 + MIB // 3 / 1e3)


def test_pipelines_stay_as_they_are_in_one_best_composition_and_not_in_the_other() -> None:
    problem = small_job()
    old, even = cut(1, 6), cut(3, 6)
    before = plan_of((old, (0, 1)), (cut(1, 2, 3, 4, 6), (2, 3, 4, 5, 6)))
    found = replan_candidates(problem, before, range(7))
    best = [candidate.plan for candidate in found if candidate.kind == "composed"]
    assert [sizes(plan) for plan in best] == [[3, 2, 2], [3, 2, 2]]
    stages = [[stage.end_layer for stage in of.stages] for of in (old, even)]
    cuts = [sorted([s.end_layer for s in p.template.stages] for p in plan.pipelines[1:]) for plan in best]
    assert sorted(cuts) == [[stages[0], stages[1]], [stages[1], stages[1]]]
    assert (0, 1) in [pipeline.nodes for plan in best for pipeline in plan.pipelines]


def test_a_slow_node_shifts_microbatches_to_the_other_pipelines() -> None:
    problem = small_job()
    before = first_plan(problem, range(4))
    assert layout(before) == [((0, 1), 6), ((2, 3), 6)]
    # A stage takes 3 ms. With one twice as slow: 3 + 8 x 3 = 27 and 3 + 4 x 6 = 27.
    after = replan_candidates(problem, before, range(4), slowdowns={2: 2.0})[0]
    assert (after.kind, layout(after.plan), after.step_ms) == ("keep", [((0, 1), 8), ((2, 3), 4)], 27.0)


def test_slow_nodes_share_a_pipeline_from_the_start_or_stand_by() -> None:
    problem = small_job()
    assert [p.nodes for p in first_plan(problem, range(4), slowdowns={0: 2.0, 2: 1.5}).pipelines] == [(1, 3), (2, 0)]
    exactly_three = small_job(num_layers=3, smallest=3)
    assert first_plan(exactly_three, range(7), slowdowns={1: 1.1}).nodes == (0, 2, 3, 4, 5, 6)


def test_first_pipelines_lie_within_zones_and_states_in_two() -> None:
    problem = small_job()
    zones = {node: "ab"[node % 2] for node in range(4)}
    assert [p.nodes for p in first_plan(problem, range(4), domains=zones).pipelines] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("labels", ["aabb", "abba", "aaabbb", "abcabc", "aaaabb"])
def test_no_zone_is_the_only_one_with_a_state(labels: str) -> None:
    problem = small_job()
    zones = dict(enumerate(labels))
    plan = first_plan(problem, range(len(labels)), domains=zones)
    for step in range(3):
        node_of = {slot.rank: slot.node for slot in plan.slots}
        for ranks in plan.holders(problem.profile).values():
            assert len({zones[node_of[rank]] for rank in ranks}) >= 2
        lost = plan.nodes[step]
        joiner = 100 + step
        zones[joiner] = zones[lost]
        plan = replan(problem, plan, [*(node for node in plan.nodes if node != lost), joiner], domains=zones)


def test_spreading_over_zones_comes_before_copying_less() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3))
    assert replan_candidates(problem, before, range(4))[0].copied_bytes == 0
    found = replan_candidates(problem, before, range(4), domains={0: "a", 2: "a", 1: "b", 3: "b"})
    assert [candidate.lacking_domains for candidate in found] == [0] * len(found)
    assert found[0].copied_bytes == 6 * MIB


def test_a_candidate_that_spreads_comes_before_one_that_copies_less() -> None:
    problem = small_job(smallest=1, failure_interval_s=1e-9)
    before = made_of(problem, (0, 1), (2, 3))
    assert replan_candidates(problem, before, range(4))[0].kind == "keep"
    # The only node of the other zone can hold everything if it is a pipeline of its own.
    found = replan_candidates(problem, before, range(4), domains=dict(enumerate("aaab")))
    assert [(candidate.kind, candidate.lacking_domains) for candidate in found] == [("composed", 0), ("keep", 3)]


def test_a_plan_is_made_even_where_a_state_has_no_live_holder() -> None:
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3))
    check(problem, replan(problem, before, [0, 2, 8, 9]), [0, 2, 8, 9])
    check(problem, replan(problem, before, [6, 7, 8, 9]), [6, 7, 8, 9])


def test_nodes_stand_by_where_no_template_has_a_place_for_them() -> None:
    # Three layers, one to a device, and pipelines of three nodes: one of seven nodes stands by until two more come.
    problem = PlanningProblem(profile=profile([1.0] * 3), num_microbatches=8, min_pipeline_nodes=3)
    before = first_plan(problem, [4, 9, 2, 0, 7, 1, 3])
    assert before.nodes == (0, 1, 2, 3, 4, 7)
    found = replan_candidates(problem, before, [0, 1, 2, 3, 4, 7, 9])
    assert (found[0].kind, found[0].plan) == ("keep", before)
    after = replan(problem, before, [0, 1, 2, 3, 4, 9])
    assert [pipeline.nodes for pipeline in after.pipelines] == [(0, 1, 2), (3, 4, 9)]
    assert sizes(replan(problem, before, [0, 1, 2, 3, 4, 7, 9, 10, 11])) == [3, 3, 3]


def test_templates_are_those_of_the_next_power_of_two() -> None:
    problem = small_job()
    assert templates_for(problem, 4) is templates_for(problem, 8)
    assert templates_for(problem, 9) is templates_for(problem, 16)
    assert templates_for(problem, 8).sizes == range(2, 7)


def test_after_preparing_nothing_is_computed_during_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_job(num_layers=7, smallest=1)
    prepare(problem, 7)
    plan = first_plan(problem, range(7))
    for name in ("plan_templates", "compositions"):
        monkeypatch.delattr(module, name)
    for live in (range(3, 7), range(2, 7), range(8), range(11)):
        check(problem, replan(problem, plan, live), live)


def test_preparing_changes_no_plan() -> None:
    first, second = small_job(num_layers=7), small_job(num_layers=7)
    plan = first_plan(first, range(6))
    prepare(second, 6)
    assert first_plan(second, range(6)) == plan
    assert replan(second, plan, range(1, 6)) == replan(first, plan, range(1, 6))


def test_preparing_at_the_least_number_of_nodes_looks_no_further_down() -> None:
    problem = small_job()
    prepare(problem, 4)
    check(problem, first_plan(problem, range(4)), range(4))
    with pytest.raises(TooFewNodes):
        first_plan(problem, range(3))


def test_the_same_plan_in_another_process() -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from tests.templates.replan.test_replan import small_job, first_plan, replan, layout
        problem = small_job(num_layers=9, smallest=1)
        zones = {{node: "abc"[node % 3] for node in range(10)}}
        plan = first_plan(problem, range(9), domains=zones)
        print(layout(plan), layout(replan(problem, plan, {{0, 2, 3, 5, 6, 8, 9}}, domains=zones, slowdowns={{3: 1.5}})))
    """
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    command = [sys.executable, "-c", code]
    first, second = (subprocess.check_output(command, env=each, text=True) for each in environments)
    assert first == second


def test_too_few_nodes_are_refused_in_first_and_next_plan() -> None:
    problem = small_job()
    message = (
        r"^the number of nodes must be at least 4 \(max_failures \+ 1 = 2 pipelines of 2 nodes, the fewest that hold "
        r"the model\), got {}; add {}$"
    )
    with pytest.raises(TooFewNodes, match=message.format(3, "1 node")):
        first_plan(problem, range(3))
    with pytest.raises(TooFewNodes, match=message.format(2, "2 nodes")):
        replan(problem, first_plan(problem, range(4)), [0, 1])
    with pytest.raises(TooFewNodes, match=message.format(1, "3 nodes")):
        prepare(problem, 1)


def test_too_few_nodes_names_the_live_ones_where_even_the_rounded_number_is_too_small() -> None:
    with pytest.raises(TooFewNodes, match=r"at least 10 .* got 3; add 7 nodes$"):
        first_plan(small_job(num_layers=12, smallest=5), range(3))


def test_a_node_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^nodes must be distinct, got \[0, 1, 1, 2\]; name each live node once$"):
        first_plan(small_job(), [0, 1, 1, 2])


def test_a_slowdown_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^slowdown of node 3 must be >= 1, got 0\.5; 1 means as fast as profiled$"):
        first_plan(small_job(), range(4), slowdowns={3: 0.5})
