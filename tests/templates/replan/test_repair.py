from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.plan import Plan
from resilient.templates.search.template_sizes import node_counts
from tests.templates.jobs import cut, plan_of, repairs_of


def plan_with(*sizes: int) -> Plan:
    """Pipelines of these sizes on nodes 0, 1, 2, ..."""
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return plan_of(*((cut(*range(1, size + 1)), range(ends[i], ends[i] + size)) for i, size in enumerate(sizes)))


def found(
    plan: Plan, nodes: list[int], n0: int, max_failures: int = 1, largest: int = 9, max_pipelines: int = 99
) -> list[tuple[str, list[tuple[int | None, int]]]]:
    ways = repairs_of(plan, nodes, range(n0, largest + 1), min_pipelines=max_failures + 1, max_pipelines=max_pipelines)
    return [(kind, list(pipelines)) for kind, pipelines in ways]


def without(plan: Plan, *lost: int, joined: int = 0) -> list[int]:
    return [node for node in range(len(plan.nodes) + joined) if node not in lost]


def test_nodes_that_are_left_over_may_stand_by() -> None:
    plan = plan_with(3, 2)
    live = without(plan, 0, joined=2)
    ways = repairs_of(plan, live, range(2, 10), min_pipelines=2, max_pipelines=99, may_stand_by=True)
    assert ways == [
        ("join", ((0, 3), (1, 3))),
        ("join", ((0, 3), (1, 2))),
    ]


def test_no_change_keeps_all() -> None:
    plan = plan_with(3, 2)
    assert found(plan, without(plan), n0=2) == [("keep", [(0, 3), (1, 2)])]


def test_simple_goes_on_with_the_nodes_that_are_left() -> None:
    plan = plan_with(4, 3)
    assert found(plan, without(plan, 1), n0=2) == [("simple", [(0, 3), (1, 3)])]


def test_simple_for_several_pipelines_at_once() -> None:
    plan = plan_with(4, 4, 3)
    assert found(plan, without(plan, 0, 1, 5), n0=2) == [("simple", [(0, 2), (1, 3), (2, 3)])]


def test_borrow_takes_from_the_largest_until_n0() -> None:
    plan = plan_with(4, 5, 2)
    assert found(plan, without(plan, 9, 10), n0=2, max_failures=2) == [("borrow", [(0, 3), (1, 4), (2, 2)])]


def test_the_pipeline_that_lacks_least_borrows_first() -> None:
    plan = plan_with(3, 3, 4)
    borrowed, given_up = found(plan, without(plan, 0, 1, 3), n0=3)
    # A node of the third completes the second; what the first has left then goes to another.
    assert borrowed == ("merge", [(1, 4), (2, 3)])
    assert given_up == ("merge", [(1, 3), (2, 4)])


def test_a_pipeline_may_be_given_up_although_others_could_lend() -> None:
    plan = plan_with(3, 2, 2)
    assert found(plan, without(plan, 6), n0=2) == [
        ("borrow", [(0, 2), (1, 2), (2, 2)]),
        ("merge", [(0, 3), (1, 3)]),
    ]


def test_merge_gives_all_nodes_to_one_pipeline_when_nobody_can_lend() -> None:
    plan = plan_with(3, 3, 3)
    assert found(plan, without(plan, 0), n0=3) == [("merge", [(1, 5), (2, 3)])]


def test_merge_fills_another_needy_pipeline_first() -> None:
    plan = plan_with(3, 3, 3, 3)
    assert found(plan, without(plan, 0, 1, 3), n0=3) == [("merge", [(1, 3), (2, 3), (3, 3)])]


def test_merged_nodes_that_do_not_fit_into_one_pipeline_are_shared() -> None:
    plan = plan_with(3, 3, 3)
    assert found(plan, without(plan, 0), n0=3, largest=4) == [("merge", [(1, 4), (2, 4)])]


def test_a_pipeline_without_nodes_is_gone_and_the_others_do_not_change() -> None:
    plan = plan_with(3, 2, 2)
    assert found(plan, without(plan, 3, 4), n0=2) == [("simple", [(0, 3), (2, 2)])]


def test_a_pipeline_without_nodes_is_made_anew_where_redundancy_needs_it() -> None:
    plan = plan_with(2, 4)
    assert found(plan, without(plan, 0, 1), n0=2) == [("borrow", [(0, 2), (1, 2)])]


def test_borrowing_and_merging_at_once() -> None:
    plan = plan_with(4, 3, 3, 3)
    # The second borrows the only node that can be lent; the third is given up to the first, the lender.
    assert found(plan, without(plan, 4, 7, 8), n0=3)[0] == ("merge", [(0, 4), (1, 3), (3, 3)])


def test_a_lender_that_gets_a_node_of_one_given_up_is_as_before() -> None:
    plan = plan_with(3, 2, 2, 2)
    assert found(plan, without(plan, 4, 8), n0=2) == [("merge", [(0, 3), (1, 2), (2, 2)])]


def test_joiners_first_replace_lost_nodes() -> None:
    plan = plan_with(4, 2)
    assert found(plan, without(plan, 2, joined=1), n0=2) == [("join", [(0, 4), (1, 2)])]


def test_too_few_joiners_go_where_they_save_a_pipeline_from_borrowing() -> None:
    plan = plan_with(4, 3)
    # The first lacks two nodes but can go on; the second is below n0.
    assert found(plan, without(plan, 0, 4, joined=1), n0=3) == [("simple", [(0, 3), (1, 3)])]
    assert found(plan, without(plan, 0, 1, 4, joined=2), n0=2) == [("simple", [(0, 3), (1, 3)])]


def test_left_over_joiners_extend_the_smallest_or_make_a_pipeline() -> None:
    plan = plan_with(4, 2)
    assert found(plan, without(plan, joined=1), n0=2) == [("join", [(0, 4), (1, 3)])]
    assert found(plan, without(plan, joined=3), n0=2) == [
        ("join", [(0, 5), (1, 4)]),
        ("join", [(0, 4), (1, 3), (None, 2)]),
    ]


def test_a_new_pipeline_is_as_large_as_the_smallest_other() -> None:
    plan = plan_with(5, 4)
    assert found(plan, without(plan, joined=5), n0=2)[1] == ("join", [(0, 5), (1, 5), (None, 4)])


def test_a_new_pipeline_only_where_there_is_a_microbatch_for_it() -> None:
    plan = plan_with(2, 2)
    assert found(plan, without(plan, joined=2), n0=2, max_pipelines=2) == [("join", [(0, 3), (1, 3)])]


def test_nodes_without_a_place_wait_until_they_make_a_pipeline() -> None:
    plan = plan_with(3, 3)
    assert found(plan, without(plan, joined=2), n0=3, largest=3) == [("keep", [(0, 3), (1, 3)])]
    assert found(plan, without(plan, joined=3), n0=3, largest=3) == [("join", [(0, 3), (1, 3), (None, 3)])]


def test_no_repair_below_f_plus_1_pipelines_of_n0() -> None:
    plan = plan_with(2, 2)
    assert found(plan, without(plan, 0), n0=2) == []


@given(st.data())
def test_a_repair_exists_down_to_f_plus_1_times_n0_and_all_its_sizes_are_template_sizes(data: st.DataObject) -> None:
    n0, max_failures = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    spare = data.draw(st.lists(st.integers(0, n0), min_size=max_failures + 1, max_size=6))
    plan = plan_with(*(n0 + more for more in spare))
    most_lost = len(plan.nodes) - (max_failures + 1) * n0
    lost = data.draw(st.sets(st.sampled_from(plan.nodes), max_size=most_lost))
    nodes = without(plan, *lost, joined=data.draw(st.integers(0, n0)))
    sizes = node_counts(len(nodes), max_failures, n0)
    ways = repairs_of(plan, nodes, sizes, min_pipelines=max_failures + 1, max_pipelines=99)
    assert ways
    for _, pipelines in ways:
        assert sum(size for _, size in pipelines) == len(nodes)
        assert len(pipelines) >= max_failures + 1
        assert all(size in sizes for _, size in pipelines)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 3), st.data())
def test_merging_makes_2_n0_less_k(n0: int, max_failures: int, more: int, data: st.DataObject) -> None:
    plan = plan_with(*[n0] * (max_failures + 1 + more))
    k = data.draw(st.integers(1, n0))
    nodes = without(plan, *range(k))
    sizes = node_counts(len(nodes), max_failures, n0)
    ((_, pipelines),) = repairs_of(plan, nodes, sizes, min_pipelines=max_failures + 1, max_pipelines=99)
    assert 2 * n0 - k in sizes
    assert pipelines == ((1, 2 * n0 - k), *((i, n0) for i in range(2, max_failures + 1 + more)))
