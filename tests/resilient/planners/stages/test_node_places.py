"""Where devices are in nodes: what is inside one, and what each has to hold of what all share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.planners.planner import Configuration, Parallelism
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.node_places import in_one_node, least_members, nodes_of_state, part_of_each, rings_of

SPREADS = {"vision": Parallelism(dp=4, pp=1), "llm": Parallelism(dp=2, pp=2, tp=2)}
LAYOUT = DeviceLayout(Configuration(units=SPREADS, num_microbatches=1), 2)
"""Two pipelines of six devices: two lanes of an encoder, and two stages of two devices."""


def test_rows_follow_each_other_in_their_pipelines() -> None:
    assert [LAYOUT.firsts[LAYOUT.rows[name]].tolist() for name in SPREADS] == [[[0], [1], [6], [7]], [[2, 4], [8, 10]]]
    of = {name: nodes_of_state(LAYOUT, spread, name, 5).tolist() for name, spread in SPREADS.items()}
    assert of["vision"] == [[[0, 0, 1, 1]]]
    assert of["llm"] == [[[0, 1], [0, 1]], [[0, 2], [1, 2]]]


def test_rows_are_in_one_node_if_no_boundary_lies_between_or_in_them() -> None:
    stages = LAYOUT.rows["llm"]
    assert in_one_node(LAYOUT, stages[:, 0], stages[:, 1], 6).tolist() == [True, True]
    assert in_one_node(LAYOUT, stages[:, 0], stages[:, 1], 4).tolist() == [False, True]
    assert in_one_node(LAYOUT, stages, stages, 5).tolist() == [[True, False], [True, True]]


def test_rings_are_counted_where_they_have_fewest_members() -> None:
    nodes = np.array([[[0, 0, 0, 0, 1, 1]]])
    assert least_members(nodes).tolist() == [[2]]
    assert rings_of(nodes, 2).tolist() == [[[[0, 0], [0, 0], [1, 1]]]]
    assert least_members(rings_of(nodes, 4)).tolist() == [[[4]]]
    assert rings_of(nodes, 9).shape == (1, 1, 1, 6)


@pytest.mark.parametrize(
    ("nodes", "copies", "part"),
    [
        ([0, 0, 0, 0], 1, 1 / 4),
        ([0, 0, 1, 1], 2, 1 / 2),
        ([0, 0, 1], 2, 1.0),  # the second node has all for itself
        ([0, 0, 0, 1, 1, 2], 2, 1 / 3),
        ([0, 0, 0], 2, 1 / 3),  # no more copies than nodes
    ],
)
def test_devices_of_nodes_with_few_have_larger_parts(nodes: list[int], copies: int, part: float) -> None:
    assert part_of_each(np.array(nodes), copies) == pytest.approx(part)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 4))
def test_the_part_is_the_least_with_which_nodes_can_hold_all_copies(nodes: list[int], copies: int) -> None:
    counts = np.unique(nodes, return_counts=True)[1]
    wanted = min(copies, len(counts))
    part = float(part_of_each(np.array(nodes), copies))
    assert np.minimum(1, counts * part).sum() == pytest.approx(wanted)
    assert np.minimum(1, counts * part * 0.99).sum() < wanted
