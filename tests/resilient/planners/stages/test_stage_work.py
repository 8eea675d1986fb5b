"""What stages take where some of their layers run again in the backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.planner import Parallelism, Setting
from resilient.planners.stages.call_work import Calls, CallWork, Work
from resilient.planners.stages.stage_work import kept_bytes, state_bytes
from resilient.templates.inputs.cluster import Cluster

CURVES = LayerCurves(
    forward=Curve(linear=1.0, fixed=3.0),
    backward_input=Curve(linear=1.0),
    backward_weight=Curve(linear=1.0),
    activation_bytes=100.0,
)
UNIT = UnitCosts(
    name="llm", layers=tuple(UnitLayer(name=str(index), curves=(CURVES,)) for index in range(8)), boundary_bytes=4.0
)
SPREAD = Parallelism(dp=1, pp=2, stage_layers=(5, 3))


def _work(unit: UnitCosts, spread: Parallelism) -> Work:
    one = np.ones(1)
    first = np.zeros(1, np.int64)
    calls = Calls(cell=first, group=first, degree=first + 1, tokens=10 * one, squares=100 * one, num_cells=1)
    return CallWork.of(unit, spread, calls).by_cell(1)


@pytest.mark.parametrize(("part", "again"), [(0.0, (0, 0)), (0.2, (1, 1)), (0.5, (3, 2)), (1.0, (5, 3))])
def test_layers_that_run_again_keep_their_inputs_and_take_their_forward_twice(
    part: float, again: tuple[int, int]
) -> None:
    spread = replace(SPREAD, recompute=part)
    work = _work(UNIT, spread)
    layers = np.array([5, 3])
    twice = np.array(again)
    assert work.forward_ms[:, 0].tolist() == (13 * layers).tolist()
    assert work.backward_ms[:, 0].tolist() == (20 * layers + 13 * twice).tolist()
    # One that runs again has all of its activations meanwhile.
    of_token = 100 * (layers - twice) + 4 * twice + 100 * (twice > 0)
    assert kept_bytes(UNIT, spread).tolist() == of_token.tolist()
    assert work.kept_bytes[:, 0].tolist() == (10 * of_token).tolist()


def test_what_has_no_backward_runs_once() -> None:
    frozen = replace(UNIT, layers=tuple(replace(each, trainable=False, input_gradient=False) for each in UNIT.layers))
    work = _work(frozen, replace(SPREAD, recompute=1.0))
    assert work.backward_ms.tolist() == work.kept_bytes.tolist() == [[0.0], [0.0]]


def test_a_part_that_is_none_is_refused() -> None:
    message = r"^recompute must be a part of the layers, 0 to 1, got 2; 1 means all$"
    with pytest.raises(ValueError, match=message):
        replace(SPREAD, recompute=2)


def test_devices_of_pipelines_that_run_have_all_of_their_optimizer_or_divide_it_as_they_do_the_rest() -> None:
    layers = (UnitLayer(name="0", curves=(CURVES,), parameter_bytes=4, optimizer_bytes=8, gradient_bytes=4),)
    unit = replace(UNIT, layers=layers)
    setting = Setting(
        costs=CostModel(units=(unit,)), cluster=Cluster(devices_per_node=2), num_nodes=2, global_batch=8, microbatch=1
    )
    spread = Parallelism(dp=4, pp=1, stage_layers=(1,))
    found = [
        [state_bytes(each, unit, spread, shard=shard).tolist() for shard in (1, 2)]
        for each in (setting, replace(setting, num_pipelines=4))
    ]
    assert found == [[[8 + 8 / 4], [8 / 2 + 8 / 2]], [[16.0], [8.0]]]
