"""Replicas that are left when nodes are lost."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas, left_bytes, tokens_held
from resilient.templates.inputs.cluster import Cluster

_LAYER = UnitLayer(name="0", curves=(LayerCurves(forward=Curve(), backward_input=Curve(), backward_weight=Curve()),))


def _setting(num_nodes: int) -> Setting:
    costs = CostModel(units=(UnitCosts(name="llm", layers=(_LAYER,)),))
    return Setting(costs=costs, cluster=Cluster(devices_per_node=4), num_nodes=num_nodes, global_batch=8, microbatch=1)


def _configuration(dp: int, tp: int, number: int) -> Configuration:
    return Configuration(units={"llm": Parallelism(dp=dp, pp=1, tp=tp, stage_layers=(1,))}, num_microbatches=number)


def test_survivors_without_losses_are_all_replicas_at_full_speed() -> None:
    found = degraded_replicas(_setting(4), _configuration(4, 4, 3), 0)
    assert [(each.num_microbatches, each.speed) for each in found] == [(3, 1.0)] * 4


def test_survivors_are_slower_by_the_devices_they_lost_and_get_fewer_microbatches() -> None:
    found = degraded_replicas(_setting(4), _configuration(2, 8, 6), 1)
    assert [(each.num_microbatches, each.speed) for each in found] == [(4, 0.5), (8, 1.0)]


def test_survivors_leave_out_a_replica_that_lost_all() -> None:
    found = degraded_replicas(_setting(4), _configuration(4, 4, 3), 2)
    assert [(each.num_microbatches, each.speed) for each in found] == [(6, 1.0), (6, 1.0)]


def test_survivors_that_are_slow_take_no_more_than_there_is() -> None:
    found = degraded_replicas(_setting(4), _configuration(3, 5, 1), 2)
    assert [each.num_microbatches for each in found] == [1, 1, 1]
    assert [each.speed for each in found] == pytest.approx([0.2, 0.6, 0.6])


def test_nodes_without_a_replica_take_the_place_of_lost_ones() -> None:
    found = degraded_replicas(_setting(4), _configuration(2, 4, 3), 2)
    assert [(each.num_microbatches, each.speed) for each in found] == [(3, 1.0)] * 2
    assert [each.speed for each in degraded_replicas(_setting(4), _configuration(2, 4, 3), 3)] == [1.0]


def test_survivors_that_divide_a_copy_have_equally_many_microbatches() -> None:
    found = degraded_replicas(_setting(4), replace(_configuration(16, 1, 2), shard=4), 1)
    assert [(each.num_microbatches, each.speed) for each in found] == [(3, 1.0)] * 12


@pytest.mark.parametrize(("shard", "left_part"), [(1, [0.75, 0.75, 0.75]), (2, [0.5, 0.5, 0.5]), (4, [0.5, 0.5, 0.5])])
def test_survivors_hold_no_more_copies_than_nodes_are_left(shard: int, left_part: list[float]) -> None:
    """On three nodes of two devices, whose job survives the loss of two: each of them has all state, and no more."""
    layer = replace(_LAYER, parameter_bytes=1000, optimizer_bytes=1000)
    unit = UnitCosts(name="llm", layers=(layer,))
    setting = Setting(
        costs=CostModel(units=(unit,)),
        cluster=Cluster(devices_per_node=2),
        num_nodes=3,
        global_batch=8,
        microbatch=1,
        max_failures=2,
    )
    configuration = replace(_configuration(6, 1, 1), shard=shard)
    spread = configuration.units["llm"]
    found = [
        left_bytes(setting, unit, spread, configuration, degraded_replicas(setting, configuration, lost)).max() / 2000
        for lost in range(3)
    ]
    assert found == left_part


def test_what_divides_nothing_or_leaves_without_cards_is_refused() -> None:
    message = "shard must be >= 1, got 0; 1 means that each device has a copy"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(_configuration(1, 1, 1), shard=0)
    message = "cards_per_node must be >= 1, got 0; None means one for each device"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Cluster(cards_per_node=0)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 5), st.data())
def test_survivors_keep_all_microbatches(num_nodes: int, number: int, tp: int, data: st.DataObject) -> None:
    dp = data.draw(st.integers(1, max(1, 4 * num_nodes // tp)))
    lost = data.draw(st.integers(0, num_nodes - 1))
    found = degraded_replicas(_setting(num_nodes), _configuration(dp, tp, number), lost)
    assert sum(each.num_microbatches for each in found) == dp * number
    assert all(0 < each.speed <= 1 for each in found)


def test_survivors_refuse_to_lose_every_node() -> None:
    message = "lost_nodes must be 0 to 3, got 4; leave a node"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        degraded_replicas(_setting(4), _configuration(4, 4, 3), 4)


def _with_state(num_nodes: int, memory: int) -> Setting:
    """A job whose state is 100 bytes, 40 of them the optimizer's."""
    at = _setting(num_nodes)
    layer = replace(_LAYER, curves=_LAYER.curves * 4, parameter_bytes=30, gradient_bytes=30, optimizer_bytes=40)
    unit = UnitCosts(name="llm", layers=(layer,), degrees=((1, 1), (2, 1), (4, 1), (8, 1)))
    return replace(at, costs=CostModel(units=(unit,)), cluster=replace(at.cluster, memory_bytes=memory))


def test_survivors_that_lack_memory_for_the_state_put_their_devices_together() -> None:
    # Half of a replica's devices hold 60 / 4 and 40 / 4 / 2 bytes each, all of one 60 / 8 and 40 / 8.
    assert [each.devices for each in degraded_replicas(_with_state(4, 21), _configuration(2, 8, 6), 2)] == [0.5, 0.5]
    assert [each.devices for each in degraded_replicas(_with_state(4, 20), _configuration(2, 8, 6), 2)] == [1.0]
    # Nobody needs what is half of a replica.
    found = degraded_replicas(_with_state(6, 11), _configuration(3, 8, 2), 1)
    assert [(each.num_microbatches, each.devices) for each in found] == [(3, 1.0), (3, 1.0)]


def test_survivors_without_memory_for_the_state_are_refused() -> None:
    message = (
        "lost_nodes must leave devices with memory for the state of a replica, got 3, after which it takes 25 bytes or "
        "more of each one's 20; lose fewer, or use larger devices"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        degraded_replicas(_with_state(4, 20), _configuration(2, 8, 6), 3)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.integers(5, 120), st.data())
def test_survivors_have_memory_for_the_state(
    num_nodes: int, number: int, tp: int, memory: int, data: st.DataObject
) -> None:
    dp = data.draw(st.integers(1, max(1, 4 * num_nodes // tp)))
    lost = data.draw(st.integers(1, num_nodes - 1))
    at, configuration = _with_state(num_nodes, memory), _configuration(dp, tp, number)
    free = degraded_replicas(_setting(num_nodes), configuration, lost)
    devices = sum(each.devices for each in free)

    def state(replicas: int, part: float) -> float:
        return (60 + 40 / replicas) / tp / part

    try:
        found = degraded_replicas(at, configuration, lost)
    except ValueError:
        assert state(max(1, int(devices + 1e-9)), min(devices, 1)) >= memory * (1 - 1e-6)
        return
    if len(free) == dp and min(each.devices for each in free) == 1:
        assert found == free  # nothing was lost that is used
        return
    assert found == free or any(state(len(free), each.devices) >= memory * (1 - 1e-6) for each in free)
    assert all(state(len(found), each.devices) < memory * (1 + 1e-6) for each in found)
    assert sum(each.devices for each in found) <= devices * (1 + 1e-6)
    assert sum(each.num_microbatches for each in found) == dp * number
    assert [each.speed for each in found] == [each.devices for each in found]


@pytest.mark.parametrize(("cp", "devices", "times"), [(1, 0.5, 1), (4, 1.0, 1), (4, 0.75, 4 / 3), (4, 0.1, 4)])
def test_devices_that_share_sequences_hold_larger_parts_of_them(cp: int, devices: float, times: float) -> None:
    assert tokens_held(Parallelism(dp=1, pp=2, cp=cp, stage_layers=(1, 1)), devices) == pytest.approx(times)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_what_survivors_keep_is_what_the_simulation_finds(dp: int, tp: int, lost: int) -> None:
    at, configuration = _with_state(6, 1000), _configuration(dp, tp, 3)
    replicas = degraded_replicas(at, configuration, lost)
    batch = SampleTable(units={"llm": Lengths.of(np.array([5, 3, 2]))})
    assignment = Assignment(units={"llm": Place(replica=np.zeros(3, np.int64), microbatch=np.zeros(3, np.int64))})
    found = evaluate(at, configuration, assignment, batch, replicas)
    assert found.peak_bytes == round((60 + 40 / len(replicas)) / tp / min(each.devices for each in replicas))
