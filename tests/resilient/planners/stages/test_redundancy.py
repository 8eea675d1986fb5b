"""Copies of state on several nodes: which configurations have them, what they take, what planners choose."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Place, Planner, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.redundancy import (
    check_redundancy,
    is_redundant,
    surely_redundant,
    with_redundancy_noted,
)
from resilient.templates.inputs.cluster import Cluster
from tests.resilient.planners.test_every_planner import EVERY, planned_job

_DEGREES = ((1, 1), (2, 1), (4, 1), (1, 4))


def _unit(name: str, num_layers: int = 1) -> UnitCosts:
    curves = (LayerCurves(forward=Curve(linear=1), backward_input=Curve(linear=1), backward_weight=Curve(linear=1)),)
    layer = UnitLayer(
        name="0", curves=curves * len(_DEGREES), parameter_bytes=30, gradient_bytes=20, optimizer_bytes=40
    )
    return UnitCosts(name=name, layers=tuple(replace(layer, name=str(i)) for i in range(num_layers)), degrees=_DEGREES)


def _setting(max_failures: int, *units: UnitCosts) -> Setting:
    return Setting(
        costs=CostModel(units=units or (_unit(LLM),)),
        cluster=Cluster(devices_per_node=4),
        num_nodes=4,
        global_batch=8,
        microbatch=1,
        max_failures=max_failures,
    )


def _of(**units: Parallelism) -> Configuration:
    return Configuration(units=units, num_microbatches=2)


def _spread(dp: int, pp: int = 1, tp: int = 1, cp: int = 1) -> Parallelism:
    return Parallelism(dp=dp, pp=pp, tp=tp, cp=cp, stage_layers=(1,) * pp)


def _peak_bytes(setting: Setting, configuration: Configuration, lost: int = 0) -> int:
    batch = SampleTable(units={LLM: Lengths.of(np.array([5, 3]))})
    assignment = Assignment(units={LLM: Place(replica=np.zeros(2, np.int64), microbatch=np.zeros(2, np.int64))})
    replicas = degraded_replicas(setting, configuration, lost)
    return evaluate(setting, configuration, assignment, batch, replicas).peak_bytes


@pytest.mark.parametrize(
    ("configuration", "most"),
    [
        (_of(llm=_spread(1)), 0),
        (_of(llm=_spread(4)), 0),  # of one node
        (_of(llm=_spread(5)), 1),
        (_of(llm=_spread(16)), 3),
        (_of(llm=_spread(2, tp=4)), 1),
        (_of(llm=_spread(1, cp=16)), 3),  # each rank has all
        (_of(llm=_spread(1, pp=4, tp=4)), 0),
        (_of(llm=_spread(2, pp=3)), 0),  # the first stages are on devices 0 and 3
        (_of(vision=_spread(1), llm=_spread(3, tp=4)), 0),
        (_of(vision=_spread(2, tp=4), llm=_spread(2, tp=4)), 1),
        (replace(_of(vision=_spread(1), llm=_spread(1, pp=8)), encoders=Encoders.REPLICATED), 0),
    ],
)
def test_state_survives_the_loss_of_all_nodes_but_one_that_have_it(configuration: Configuration, most: int) -> None:
    units = [_unit(name, each.pp) for name, each in configuration.units.items()]
    assert [is_redundant(_setting(each, *units), configuration) for each in range(4)] == [
        each <= most for each in range(4)
    ]


def test_what_cannot_hold_the_redundancy_is_refused_by_name() -> None:
    configuration = _of(vision=_spread(1), llm=_spread(2, tp=4))
    message = (
        "max_failures must be at most 0, as there is state of 'vision' on 1 node only, got 1; "
        "spread replicas over more nodes, or lower it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_redundancy(_setting(1, _unit("vision"), _unit(LLM)), configuration)
    with pytest.raises(ValueError, match=r"^max_failures must be at most 0, as there is state of 'llm' on 1 node only"):
        _peak_bytes(_setting(1), _of(llm=_spread(4)))


def test_a_negative_number_of_failures_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_failures must be >= 0, got -1; 0 means no redundancy$"):
        _setting(-1)


@pytest.mark.parametrize(("max_failures", "pieces"), [(0, 1), (1, 2), (3, 4)])
def test_a_sharded_optimizer_takes_memory_as_often_as_there_are_copies(max_failures: int, pieces: int) -> None:
    setting, configuration = _setting(max_failures), _of(llm=_spread(16))
    assert _peak_bytes(setting, configuration) == round(50 + 40 * pieces / 16)
    # Gradients are no state.
    sharded = replace(configuration, shard=16)
    assert _peak_bytes(setting, sharded) == round((30 + 40) * pieces / 16 + 20 / 16 + 2 * 50)
    # Of eight replicas that are left, each has twice as much; a copy on a node that has one already protects nothing.
    assert _peak_bytes(setting, configuration, lost=2) == round(50 + 40 * min(pieces, 2) / 8)


def test_fewer_replicas_than_copies_each_have_all() -> None:
    assert _peak_bytes(_setting(1), _of(llm=_spread(2, tp=4))) == round((50 + 40) / 4)
    # The last one that is left has no other to share with.
    assert _peak_bytes(_setting(1), _of(llm=_spread(2, tp=4)), lost=3) == round((50 + 40) / 4)


@pytest.mark.parametrize("devices", [1, 3, 4, 9])
@pytest.mark.parametrize("max_failures", [0, 1, 2, 3])
def test_what_is_surely_redundant_is(devices: int, max_failures: int) -> None:
    setting = _setting(max_failures, _unit(LLM, devices))
    for dp in range(1, 20):
        sure = bool(surely_redundant(setting, np.array(dp), np.array(devices)))
        assert not sure or is_redundant(setting, _of(llm=_spread(dp, pp=devices)))


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
def test_planners_choose_what_holds_the_redundancy(each: Planner) -> None:
    chosen = 0
    for seed in range(12):
        setting, known, batch = planned_job(np.random.default_rng(seed))
        setting = replace(setting, max_failures=1 + seed % 2)
        try:
            configuration = each.configure(setting, known)
        except ValueError:
            continue  # it fits in no way
        replicas = degraded_replicas(setting, configuration, 0)
        evaluate(setting, configuration, each.assign(setting, configuration, batch, replicas), batch, replicas)
        chosen += 1
    assert chosen >= {"entrain": 5}.get(each.name, 6)


def test_what_one_lost_node_loses_is_noted() -> None:
    one, two = _of(llm=_spread(1, tp=4)), _of(llm=_spread(2, tp=4))
    assert with_redundancy_noted(_setting(0), one).notes == ("state of llm is on one node only, and lost with it",)
    assert with_redundancy_noted(_setting(0), two) == two


def test_planners_say_what_redundancy_they_have_no_devices_for() -> None:
    setting, known, _ = planned_job(np.random.default_rng(1))
    message = "num_nodes must be enough for {!r} with its redundancy, got 1 of "
    for each in EVERY:
        with pytest.raises(ValueError, match=re.escape(message.format(each.name))):
            each.configure(replace(setting, num_nodes=1, max_failures=1), known)


def test_where_nodes_divide_copies_unevenly_the_fullest_device_counts() -> None:
    """Five replicas on nodes of four: the fifth has all of the optimizer, as its node has one of two copies."""
    assert _peak_bytes(_setting(1), _of(llm=_spread(8))) == 50 + 40 * 2 / 8
    assert _peak_bytes(_setting(1), _of(llm=_spread(5))) == 50 + 40
    assert _peak_bytes(_setting(1), _of(llm=_spread(6))) == 50 + 40 / 2
    assert _peak_bytes(_setting(0), _of(llm=_spread(5))) == 50 + 40 / 5
