"""What an average sample costs a unit: as the cut into stages has it, for any number of them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths
from resilient.planners.stages.expected_step import expected, parallelism, stage_curves
from tests.resilient.planners.jobs_of_planners import COSTS, unit

LENGTHS = Lengths.of(np.array([10, 30]))


def uneven(rng: np.random.Generator) -> UnitCosts:
    """Layers of any times and sizes, some of them frozen."""
    layers: list[UnitLayer] = []
    for index in range(int(rng.integers(1, 9))):
        forward, backward = (Curve(linear=float(rng.integers(1, 9)), fixed=1.0) for _ in range(2))
        curves = LayerCurves(
            forward=forward, backward_input=backward, backward_weight=Curve(), activation_bytes=float(rng.integers(9))
        )
        trained, passed = (rng.random(2) < 0.6).tolist()
        sizes = rng.integers(0, 9, 3).tolist()
        layers.append(
            UnitLayer(
                name=str(index),
                curves=(curves,),
                parameter_bytes=sizes[0],
                optimizer_bytes=sizes[1],
                gradient_bytes=sizes[2],
                trainable=trained,
                input_gradient=passed,
            )
        )
    return UnitCosts(name="vision", layers=tuple(layers))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_number_of_stages_costs_what_its_cut_does(seed: int) -> None:
    costs = uneven(np.random.default_rng(seed))
    (found,) = expected(costs, LENGTHS, 8, 1)
    assert len(found.slowest_ms) == len(costs.layers)
    for pp in range(1, len(costs.layers) + 1):
        spread = parallelism(costs, LENGTHS, 1, pp, 1)
        ends = np.cumsum(spread.stage_layers).tolist()
        stages = [costs.layers[first:end] for first, end in zip((0, *ends), ends, strict=False)]
        times = [forward.linear + backward.linear for forward, backward in stage_curves(costs, spread)]
        assert found.slowest_ms[pp - 1] == pytest.approx(20 * max(times))
        assert found.gradient_bytes[pp - 1] == max(sum(each.gradient_bytes for each in stage) for stage in stages)
        assert found.optimizer_bytes[pp - 1] == max(sum(each.optimizer_bytes for each in stage) for stage in stages)
        assert found.held_bytes[pp - 1] == max(
            sum(each.parameter_bytes + each.gradient_bytes for each in stage) for stage in stages
        )
        assert found.token_bytes[pp - 1] == max(
            sum(each.curves[0].activation_bytes for each in stage if each.has_backward) for stage in stages
        )


def test_calls_on_nothing_take_no_time() -> None:
    vision = COSTS.by_name["vision"]
    busy, idle = (expected(vision, Lengths.of(np.array(tokens)), 2, 1)[0] for tokens in ([0, 40], [0, 0]))
    # Four layers, forwards alone with 0.05 ms a call.
    assert (busy.call_ms, idle.call_ms, idle.sample_ms) == (pytest.approx(4 * 0.05), 0.0, 0.0)


def test_degrees_are_those_without_context_parallelism_that_fit_into_a_node() -> None:
    llm = unit("llm", 8, 0.002, 1e-6)
    assert [[each.tp for each in expected(llm, LENGTHS, 8, most)] for most in (1, 2)] == [[1], [1, 2]]
    assert [len(each.slowest_ms) for each in expected(llm, LENGTHS, 6, 2)] == [6, 3]
    wide = replace(llm, degrees=((2, 1), (2, 2), (4, 1), (4, 2)))
    message = (
        "degrees of 'llm' must have one without context parallelism on 1 devices or fewer, got ((2, 1), (2, 2), "
        "(4, 1), (4, 2)); profile it, or use larger nodes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        expected(wide, LENGTHS, 8, 1)
    with pytest.raises(ValueError, match=r"^samples must be one or more, got none; draw some from the data set$"):
        expected(llm, Lengths.of(np.array([], dtype=np.int64)), 8, 1)
