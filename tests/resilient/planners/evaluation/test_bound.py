"""No plan is faster than the bound, and one without messages, waiting and calls' fixed times is as fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica, Setting
from resilient.templates.inputs.cluster import Cluster

DEGREES = ((1, 1), (2, 1))


def unit(name: str, num_layers: int, linear: float, attention: float, shared: float) -> UnitCosts:
    """Layers of which two devices that share them do ``shared`` times the work."""
    curves = tuple(
        LayerCurves(
            forward=Curve(attention=attention * part, linear=linear * part),
            backward_input=Curve(linear=linear * part),
            backward_weight=Curve(linear=linear * part),
        )
        for part in (1.0, shared / 2)
    )
    layers = tuple(UnitLayer(name=str(index), curves=curves) for index in range(num_layers))
    return UnitCosts(name=name, layers=layers, degrees=DEGREES)


def job(vision: UnitCosts, llm: UnitCosts, num_devices: int = 2, batch: int = 3) -> Setting:
    return Setting(
        costs=CostModel(units=(vision, llm)),
        cluster=Cluster(devices_per_node=1),
        num_nodes=num_devices,
        global_batch=batch,
        microbatch=1,
    )


def plans(num_devices: int) -> Iterator[Configuration]:
    """All ways in which one layer of vision and two of the language model use the devices."""
    shapes = list(product(range(1, num_devices + 1), (1, 2), (1, 2)))
    for dp, pp, tp in shapes:
        stages = {1: ((1,), (2,)), 2: ((1,), (1, 1))}[pp]
        llm = Parallelism(dp=dp, pp=pp, tp=tp, stage_layers=stages[1])
        if pp == 1 and llm.num_devices <= num_devices:
            yield Configuration(
                units={"vision": replace(llm, stage_layers=(1,)), "llm": llm}, num_microbatches=1, colocated=True
            )
        for own, own_tp in product(range(1, num_devices + 1), (1, 2)):
            vision = Parallelism(dp=own, pp=1, tp=own_tp, stage_layers=(1,))
            if vision.num_devices + llm.num_devices <= num_devices:
                yield Configuration(units={"vision": vision, "llm": llm}, num_microbatches=1)


def fastest_ms(setting: Setting, batch: SampleTable) -> float:
    """Return the fastest of all plans and all places of all samples, alike in both units."""
    best = np.inf
    for plan, number in product(plans(setting.num_devices), (1, 2)):
        plan = replace(plan, num_microbatches=number)
        replicas = [Replica(num_microbatches=number)] * plan.units["llm"].dp
        for places in product(range(number * len(replicas)), repeat=len(batch)):
            replica, microbatch = np.divmod(np.array(places), number)
            place = Place(replica=replica, microbatch=microbatch)
            assignment = Assignment(units=dict.fromkeys(batch.units, place))
            best = min(best, evaluate(setting, plan, assignment, batch, replicas).iteration_ms)
    return best


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=2),
    shared=st.sampled_from([0.8, 1.0, 1.3]),
    attention=st.sampled_from([0.0, 0.5]),
    num_devices=st.integers(1, 3),
)
@settings(max_examples=12, deadline=None)
def test_no_plan_of_all_there_are_is_faster(
    lengths: list[tuple[int, int]], shared: float, attention: float, num_devices: int
) -> None:
    vision, llm = np.array(lengths).T
    batch = SampleTable(units={"vision": Lengths.of(vision), "llm": Lengths.of(llm)})
    costs = unit("vision", 1, 1.0, attention, 1.0), unit("llm", 2, 2.0, attention, shared)
    setting = job(*costs, num_devices, len(batch))
    assert fastest_ms(setting, batch) >= bound_ms(setting, batch) - 1e-5


@pytest.mark.parametrize("shared", [0.8, 1.0, 1.3])
def test_samples_that_are_alike_take_the_bound(shared: float) -> None:
    batch = SampleTable(units={"vision": Lengths.of(np.array([4, 4])), "llm": Lengths.of(np.array([6, 6]))})
    setting = job(unit("vision", 1, 1.0, 0.5, shared), unit("llm", 2, 2.0, 0.5, shared), 2, 2)
    # Forward and twice as long a backward of every token, and half a millisecond of every pair of them
    work_ms = 2 * (1 * (3 * 4 + 0.5 * 16) + 2 * (3 * 2 * 6 + 0.5 * 36))
    assert bound_ms(setting, batch) == pytest.approx(min(shared, 1.0) * work_ms / 2)
    assert fastest_ms(setting, batch) == pytest.approx(bound_ms(setting, batch))


def test_lost_nodes_do_no_work() -> None:
    batch = SampleTable(units={"vision": Lengths.of(np.array([4])), "llm": Lengths.of(np.array([6]))})
    setting = job(unit("vision", 1, 1.0, 0.0, 1.0), unit("llm", 2, 2.0, 0.0, 1.0), 4, 1)
    assert bound_ms(setting, batch, lost_nodes=3) == pytest.approx(4 * bound_ms(setting, batch))


@pytest.mark.parametrize("num_devices", [3, 8, 64])
def test_more_devices_than_were_profiled_take_the_bound_where_two_do_less_than_one(num_devices: int) -> None:
    batch = SampleTable(units={"vision": Lengths.of(np.array([0])), "llm": Lengths.of(np.array([1000]))})
    rings = [
        replace(each, degrees=((1, 1), (1, 2)))
        for each in (unit("vision", 1, 1.0, 0.0, 0.98), unit("llm", 2, 2.0, 0.5, 0.98))
    ]
    setting, ones = job(rings[0], rings[1], num_devices, 1), np.ones(1, np.int64)
    units = {each.name: Parallelism(dp=1, pp=1, cp=num_devices, stage_layers=(len(each.layers),)) for each in rings}
    place = Place(replica=ones - 1, microbatch=ones - 1, group=ones - 1, degree=num_devices * ones)
    found = evaluate(
        setting,
        Configuration(units=units, num_microbatches=1, colocated=True),
        Assignment(units=dict.fromkeys(units, place)),
        batch,
        [Replica(num_microbatches=1)],
    )
    assert found.iteration_ms == pytest.approx(bound_ms(setting, batch))
