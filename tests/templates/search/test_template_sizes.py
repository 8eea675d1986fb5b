from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.plan import PlanningProblem
from resilient.templates.search.template_sizes import TooFewNodes, node_counts, usable_nodes
from resilient.templates.template import TemplateSet
from tests.templates.jobs import profile, template, template_set


def is_sum(total: int, count: int, sizes: range) -> bool:
    """Whether ``count`` of ``sizes``, in any multiplicity, sum up to ``total``."""
    if count == 0:
        return total == 0
    return any(is_sum(total - size, count - 1, sizes) for size in sizes if size <= total)


def templates(sizes: range) -> TemplateSet:
    return template_set(*(template(1, num_nodes=size) for size in sizes))


def test_node_counts_leave_room_for_f_smallest_pipelines() -> None:
    assert node_counts(13, 2, 3) == range(3, 8)


@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 6))
def test_every_number_of_nodes_down_to_the_least_is_a_sum_of_sizes(smallest: int, failures: int, more: int) -> None:
    num_nodes = (failures + 1) * smallest + more
    sizes = node_counts(num_nodes, failures, smallest)
    for live in range((failures + 1) * smallest, num_nodes + 1):
        assert any(is_sum(live, count, sizes) for count in range(failures + 1, live // smallest + 1))


def test_too_few_nodes_names_all_numbers_and_how_many_to_add() -> None:
    message = (
        "the number of nodes must be at least 6 (max_failures + 1 = 2 pipelines of 3 nodes, the fewest that hold the "
        "model), got 4; add 2 nodes"
    )
    with pytest.raises(TooFewNodes, match=f"^{re.escape(message)}$") as raised:
        node_counts(4, 1, 3)
    assert (raised.value.live, raised.value.needed) == (4, 6)


def test_too_few_nodes_by_one_asks_for_one() -> None:
    with pytest.raises(
        TooFewNodes, match=r"2 pipelines of 1 node, the fewest that hold the model\), got 1; add 1 node$"
    ):
        node_counts(1, 1, 1)


def test_too_few_nodes_for_one_pipeline_blames_no_failures() -> None:
    """Policies that the user is not asked for failures of are planned so."""
    message = "must be at least 3 (a pipeline of 3 nodes, the fewest that hold the model), got 2; add 1 node"
    with pytest.raises(TooFewNodes, match=f"{re.escape(message)}$"):
        node_counts(2, 0, 3)


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 2), st.integers(0, 6), st.integers(0, 14))
def test_usable_nodes_are_the_most_that_are_a_sum_of_sizes(
    smallest: int, wider: int, failures: int, more_microbatches: int, more_nodes: int
) -> None:
    num_microbatches = failures + 1 + more_microbatches
    problem = PlanningProblem(profile=profile([1]), num_microbatches=num_microbatches, max_failures=failures)
    sizes = range(smallest, smallest + wider + 1)
    live = (failures + 1) * smallest + more_nodes
    usable = max(
        total
        for total in range(1, live + 1)
        if any(is_sum(total, count, sizes) for count in range(failures + 1, num_microbatches + 1))
    )
    assert usable_nodes(problem, templates(sizes), live) == usable


@pytest.mark.parametrize(
    ("sizes", "num_microbatches", "live", "usable"),
    [
        (range(1, 9), 8, 5, 5),
        (range(3, 4), 8, 7, 6),  # pipelines have exactly 3 nodes
        (range(2, 4), 8, 7, 7),
        (range(1, 3), 3, 10, 6),  # three pipelines of two nodes take no more
        (range(2, 91), 4096, 1024, 1024),
    ],
)
def test_usable_nodes_by_example(sizes: range, num_microbatches: int, live: int, usable: int) -> None:
    problem = PlanningProblem(profile=profile([1]), num_microbatches=num_microbatches)
    assert usable_nodes(problem, templates(sizes), live) == usable


def test_usable_nodes_needs_the_smallest_templates_not_the_least_that_was_asked_for() -> None:
    problem = PlanningProblem(profile=profile([1]), num_microbatches=4, min_pipeline_nodes=1)
    with pytest.raises(TooFewNodes, match=r"^the number of nodes must be at least 6 .* got 5; add 1 node$"):
        usable_nodes(problem, templates(range(3, 5)), 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_failures": -1}, "max_failures must be >= 0, got -1; 0 means no redundancy"),
        ({"min_pipeline_nodes": 0}, "min_pipeline_nodes must be >= 1, got 0; 1 means no minimum"),
        ({"failure_interval_s": 0.0}, "failure_interval_s must be > 0, got 0.0; give seconds"),
        (
            {"num_microbatches": 1},
            "num_microbatches must be at least max_failures + 1 = 2 (each pipeline processes one), got 1; "
            "raise the global batch or lower the microbatch",
        ),
        (
            {"profile": profile([1] * 4, tp_degrees=(2, 4))},
            "devices_per_node must be at least the profile's smallest tensor-parallel degree, 2, got 1; "
            "use nodes of more devices or smaller degrees",
        ),
    ],
)
def test_problem_refuses_what_cannot_be_planned(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PlanningProblem(**({"profile": profile([1] * 4), "num_microbatches": 8} | wrong))  # pyright: ignore[reportArgumentType]
