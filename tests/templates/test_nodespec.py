from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import profile

from resilient.templates.nodespec import TooFewNodes, node_counts, template_sizes, usable_nodes
from resilient.templates.plan import Problem


def is_sum(total: int, count: int, sizes: range) -> bool:
    """Whether ``count`` of ``sizes``, in any multiplicity, sum up to ``total``."""
    if count == 0:
        return total == 0
    return any(is_sum(total - size, count - 1, sizes) for size in sizes if size <= total)


def test_node_counts_leave_room_for_f_smallest_pipelines():
    assert node_counts(13, 2, 3) == range(3, 8)


@given(st.integers(1, 4), st.integers(0, 2), st.integers(0, 6))
def test_every_number_of_nodes_down_to_the_least_is_a_sum_of_sizes(smallest: int, failures: int, more: int):
    num_nodes = (failures + 1) * smallest + more
    sizes = node_counts(num_nodes, failures, smallest)
    for live in range((failures + 1) * smallest, num_nodes + 1):
        assert any(is_sum(live, count, sizes) for count in range(failures + 1, live // smallest + 1))


def test_too_few_nodes_names_all_numbers_and_how_many_to_add():
    message = (
        "the number of nodes must be at least 6 (2 pipelines of 3: max_failures 1, min_pipeline_nodes 3), got 4; "
        "add 2 nodes"
    )
    with pytest.raises(TooFewNodes, match=f"^{re.escape(message)}$") as raised:
        node_counts(4, 1, 3)
    assert (raised.value.live, raised.value.needed) == (4, 6)


def test_too_few_nodes_by_one_asks_for_one():
    with pytest.raises(TooFewNodes, match=r"add 1 node$"):
        node_counts(1, 1, 1)


def test_sizes_end_at_one_layer_per_device():
    problem = Problem(profile=profile([1] * 7), num_microbatches=8, devices_per_node=2)
    assert template_sizes(problem, 10) == range(1, 4)


@pytest.mark.parametrize(
    ("layers", "num_microbatches", "smallest", "live", "usable"),
    [
        (8, 8, 1, 5, 5),
        (3, 8, 3, 7, 6),  # pipelines have exactly 3 nodes
        (3, 8, 2, 7, 7),
        (2, 3, 1, 10, 6),  # three pipelines of two layers take no more
        (2, 2, 1, 3, 3),
    ],
)
def test_usable_nodes_are_those_that_some_composition_takes(
    layers: int, num_microbatches: int, smallest: int, live: int, usable: int
):
    problem = Problem(profile=profile([1] * layers), num_microbatches=num_microbatches, min_pipeline_nodes=smallest)
    assert usable_nodes(problem, live) == usable


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_failures": -1}, "max_failures must be >= 0, got -1; 0 means no redundancy"),
        ({"devices_per_node": 0}, "devices_per_node must be >= 1, got 0; give each node a worker"),
        (
            {"num_microbatches": 1},
            "num_microbatches must be at least max_failures + 1 = 2 (each pipeline processes one), got 1; "
            "raise the global batch or lower the microbatch",
        ),
        (
            {"min_pipeline_nodes": 3, "devices_per_node": 2},
            "min_pipeline_nodes must be 1 to 2 (4 layers, 2 devices per node, one layer per device at least), got 3; "
            "use fewer nodes per pipeline or cut the model into more layers",
        ),
    ],
)
def test_problem_refuses_what_cannot_be_planned(wrong: dict[str, int], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Problem(**({"profile": profile([1] * 4), "num_microbatches": 8} | wrong))  # pyright: ignore[reportArgumentType]
