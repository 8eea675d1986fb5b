"""Replicas that are left when nodes are lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.planners.costs import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.survivors import survivors
from resilient.templates.cluster import Cluster

_LAYER = UnitLayer(name="0", curves=(LayerCurves(forward=Curve(), backward_input=Curve(), backward_weight=Curve()),))


def _setting(num_nodes: int) -> Setting:
    costs = CostModel(units=(UnitCosts(name="llm", layers=(_LAYER,)),))
    return Setting(costs=costs, cluster=Cluster(devices_per_node=4), num_nodes=num_nodes, global_batch=8, microbatch=1)


def _configuration(dp: int, tp: int, number: int) -> Configuration:
    return Configuration(units={"llm": Parallelism(dp=dp, pp=1, tp=tp, stage_layers=(1,))}, num_microbatches=number)


def test_survivors_without_losses_are_all_replicas_at_full_speed() -> None:
    found = survivors(_setting(4), _configuration(4, 4, 3), 0)
    assert [(each.num_microbatches, each.speed) for each in found] == [(3, 1.0)] * 4


def test_survivors_are_slower_by_the_devices_they_lost_and_get_fewer_microbatches() -> None:
    found = survivors(_setting(4), _configuration(2, 8, 6), 1)
    assert [(each.num_microbatches, each.speed) for each in found] == [(4, 0.5), (8, 1.0)]


def test_survivors_leave_out_a_replica_that_lost_all() -> None:
    found = survivors(_setting(4), _configuration(4, 4, 3), 2)
    assert [(each.num_microbatches, each.speed) for each in found] == [(6, 1.0), (6, 1.0)]


def test_survivors_that_are_slow_take_no_more_than_there_is() -> None:
    found = survivors(_setting(4), _configuration(3, 5, 1), 2)
    assert [each.num_microbatches for each in found] == [1, 1, 1]
    assert [each.speed for each in found] == pytest.approx([0.2, 0.6, 0.6])


def test_nodes_without_a_replica_take_the_place_of_lost_ones() -> None:
    found = survivors(_setting(4), _configuration(2, 4, 3), 2)
    assert [(each.num_microbatches, each.speed) for each in found] == [(3, 1.0)] * 2
    assert [each.speed for each in survivors(_setting(4), _configuration(2, 4, 3), 3)] == [1.0]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5), st.data())
def test_survivors_keep_all_microbatches(num_nodes: int, number: int, tp: int, data: st.DataObject) -> None:
    dp = data.draw(st.integers(1, max(1, 4 * num_nodes // tp)))
    lost = data.draw(st.integers(0, num_nodes - 1))
    found = survivors(_setting(num_nodes), _configuration(dp, tp, number), lost)
    assert sum(each.num_microbatches for each in found) == dp * number
    assert all(0 < each.speed <= 1 for each in found)


def test_survivors_refuse_to_lose_every_node() -> None:
    message = "lost_nodes must be 0 to 3, got 4; leave a node"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        survivors(_setting(4), _configuration(4, 4, 3), 4)
