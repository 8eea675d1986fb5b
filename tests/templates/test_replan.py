from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import MIB, layout, problems, profile, survivors

from resilient.templates.nodespec import TooFewNodes, usable_nodes
from resilient.templates.partition import plan_templates
from resilient.templates.plan import Pipeline, Plan, Problem
from resilient.templates.replan import first_plan, prepare, replan
from resilient.templates.transfer import plan_transfers


def sizes(plan: Plan) -> list[int]:
    return [pipeline.template.num_nodes for pipeline in plan.pipelines]


def made_of(problem: Problem, *pipelines: tuple[int, ...]) -> Plan:
    """A plan on the given nodes, with one microbatch per pipeline."""
    templates = plan_templates(problem, [len(nodes) for nodes in pipelines])
    return Plan(pipelines=tuple(Pipeline(template=templates[len(n)], nodes=n, num_microbatches=1) for n in pipelines))


def check(problem: Problem, plan: Plan, live: list[int]) -> None:
    assert set(plan.nodes) <= set(live)
    assert len(set(plan.nodes)) == len(plan.nodes) == usable_nodes(problem, len(live))
    assert len(plan.pipelines) >= problem.max_failures + 1
    assert min(sizes(plan)) >= problem.min_pipeline_nodes
    assert sum(pipeline.num_microbatches for pipeline in plan.pipelines) == problem.num_microbatches
    assert min(pipeline.num_microbatches for pipeline in plan.pipelines) >= 1
    node_of = {slot.rank: slot.node for slot in plan.slots}
    for ranks in plan.holders(problem.profile).values():
        assert len({node_of[rank] for rank in ranks}) >= problem.max_failures + 1


def copied(problem: Problem, before: Plan, after: Plan) -> int:
    transfers, _ = plan_transfers(problem, after, survivors(problem, before, after))
    return sum(transfer.end_byte - transfer.first_byte for transfer in transfers)


@given(st.data(), problems())
def test_a_plan_exists_through_any_failures_and_joins(data: st.DataObject, problem: Problem):
    live = list(range(problem.min_nodes + data.draw(st.integers(0, 5))))
    plan = first_plan(problem, live)
    check(problem, plan, live)
    next_node = len(live)
    for _ in range(data.draw(st.integers(1, 6))):
        joiners = data.draw(st.integers(0, 3))
        nodes = live + list(range(next_node, next_node + joiners))
        next_node += joiners
        most_lost = max(0, len(nodes) - problem.min_nodes)
        lost = data.draw(st.sets(st.sampled_from(live), max_size=most_lost))
        live = data.draw(st.permutations([node for node in nodes if node not in lost]))
        before, plan = plan, replan(problem, plan, live)
        check(problem, plan, live)
        assert replan(problem, before, sorted(live)) == plan


def small_job(num_layers: int = 6, smallest: int = 2, **more: int) -> Problem:
    return Problem(profile=profile([1.0] * num_layers), num_microbatches=12, min_pipeline_nodes=smallest, **more)


def test_first_plan_fills_pipelines_with_the_nodes_in_order():
    assert layout(first_plan(small_job(), [7, 3, 5, 1, 9])) == [((1, 3, 5), 7), ((7, 9), 5)]


def test_simple_only_the_concerned_pipeline_shrinks():
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    assert sorted(sorted(p.nodes) for p in replan(problem, before, [0, 1, 3, 4]).pipelines) == [[0, 1], [3, 4]]


def test_borrow_takes_a_node_from_the_pipeline_that_can_spare_one():
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    after = replan(problem, before, [0, 1, 2, 4])
    assert sizes(after) == [2, 2]
    assert any(4 in pipeline.nodes and len(pipeline.nodes) == 2 for pipeline in after.pipelines)


def test_borrowing_keeps_pipelines_that_merging_would_give_up():
    problem = small_job()
    before = made_of(problem, (0, 1, 2, 3), (4, 5), (6, 7))
    assert sizes(replan(problem, before, [0, 1, 2, 3, 4, 6, 7])) == [3, 2, 2]


def test_merge_when_nobody_can_spare_a_node():
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3), (4, 5))
    after = replan(problem, before, [0, 1, 2, 3, 5])
    assert sizes(after) == [3, 2]
    assert copied(problem, before, after) == MIB  # the middle one of three stages lacks one layer


def test_pipeline_that_lost_all_nodes_goes_where_enough_are_left():
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3), (4, 5))
    after = replan(problem, before, [0, 1, 2, 3])
    assert [pipeline.nodes for pipeline in after.pipelines] == [(0, 1), (2, 3)]
    assert copied(problem, before, after) == 0


def test_pipeline_that_lost_all_nodes_is_made_anew_where_redundancy_needs_it():
    problem = small_job()
    before = made_of(problem, (0, 1), (2, 3, 4, 5))
    assert sizes(replan(problem, before, [2, 3, 4, 5])) == [2, 2]


def test_joiner_replaces_the_lost_node_and_nothing_else_moves():
    problem = small_job()
    before = made_of(problem, (0, 1, 2), (3, 4))
    after = replan(problem, before, [0, 2, 3, 4, 8])
    assert [pipeline.nodes for pipeline in after.pipelines] == [(0, 8, 2), (3, 4)]


def test_joiner_goes_to_the_pipeline_that_lost_a_node_though_another_is_smaller():
    problem = Problem(profile=profile([1.0] * 6), num_microbatches=2, min_pipeline_nodes=2)
    before = made_of(problem, (0, 1, 2, 3), (4, 5))
    after = replan(problem, before, [0, 1, 2, 4, 5, 8])
    assert [pipeline.nodes for pipeline in after.pipelines] == [(0, 1, 2, 8), (4, 5)]


def test_joiners_extend_the_plan_to_all_nodes():
    problem = small_job()
    before = first_plan(problem, range(4))
    assert sizes(replan(problem, before, range(5))) == [3, 2]
    assert sizes(replan(problem, before, range(6))) == [3, 3]
    assert sizes(replan(problem, before, range(8))) == [2, 2, 2, 2]


def test_no_change_of_nodes_is_no_change_of_plan():
    problem = small_job()
    before = first_plan(problem, range(7))
    assert replan(problem, before, range(7)) == before


def test_composition_is_preferred_where_the_local_change_is_clearly_slower():
    problem = small_job(num_layers=8, smallest=1)
    before = made_of(problem, (0,), (1, 2, 3, 4, 5, 6, 7))
    assert sizes(replan(problem, before, range(1, 8))) == [1] * 7


@given(st.data())
def test_placement_copies_no_more_than_any_other(data: st.DataObject):
    state_bytes = data.draw(st.integers(1, 10**6))
    shares = {5: (0,)} if data.draw(st.booleans()) else {}
    problem = Problem(profile=profile([1.0] * 6, state_bytes, shares), num_microbatches=12, min_pipeline_nodes=2)
    before = first_plan(problem, range(6))
    dead = data.draw(st.sets(st.integers(0, 5), max_size=2))
    live = [node for node in range(6) if node not in dead]
    after = replan(problem, before, live)

    def moved(order: tuple[int, ...]) -> Plan:
        nodes = iter(order)
        return Plan(
            pipelines=tuple(
                Pipeline(
                    template=pipeline.template,
                    nodes=tuple(next(nodes) for _ in pipeline.nodes),
                    num_microbatches=pipeline.num_microbatches,
                )
                for pipeline in after.pipelines
            )
        )

    least = min(copied(problem, before, moved(order)) for order in permutations(after.nodes))
    assert copied(problem, before, after) == least


def test_nodes_left_out_are_not_the_only_holders():
    # Three layers and pipelines of exactly three nodes: one of seven nodes stands by.
    problem = Problem(profile=profile([1.0] * 3), num_microbatches=8, min_pipeline_nodes=3)
    before = first_plan(problem, range(6))
    live = [0, 1, 5, 6, 7, 8, 9]  # of the old nodes, 5 alone holds the last layer
    after = replan(problem, before, live)
    assert {0, 1, 5} <= set(after.nodes)
    assert len(after.nodes) == 6


def test_left_out_nodes_are_the_highest_in_the_first_plan():
    problem = Problem(profile=profile([1.0] * 3), num_microbatches=8, min_pipeline_nodes=3)
    assert first_plan(problem, [4, 9, 2, 0, 7, 1, 3]).nodes == (0, 1, 2, 3, 4, 7)


def test_too_few_nodes_are_refused_in_first_and_next_plan():
    problem = small_job()
    with pytest.raises(TooFewNodes, match=r"got 3; add 1 node$"):
        first_plan(problem, range(3))
    with pytest.raises(TooFewNodes, match=r"got 2; add 2 nodes$"):
        replan(problem, first_plan(problem, range(4)), [0, 1])
    with pytest.raises(TooFewNodes, match=r"got 1; add 3 nodes$"):
        prepare(problem, 1)


def test_a_node_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"^nodes must be distinct, got \[0, 1, 1, 2\]; name each live node once$"):
        first_plan(small_job(), [0, 1, 1, 2])


def test_planning_imports_neither_torch_nor_scipy():
    modules = "batch, compose, nodespec, partition, plan, profile, replan, schedule, template, transfer"
    code = f"import sys; from resilient.templates import {modules}; print({{'torch', 'scipy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
