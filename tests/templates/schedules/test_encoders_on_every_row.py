"""Encoders in the rows of the language model's stages: these wait for them no longer than for work of their own."""

from __future__ import annotations

import numpy as np
import pytest

from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane, chain_graph
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate


@pytest.mark.parametrize("lead", [1, 2])
@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("encoder_ms", [1, 4, 12])
def test_a_step_takes_what_it_does_where_stages_have_that_work_themselves(
    depth: int, encoder_ms: int, lead: int
) -> None:
    count = 16
    llm, cells = LaneName("llm"), tuple(range(count))
    encoders = [LaneName("vision", number) for number in range(depth)]
    lanes = [
        UnitLane(name=name, rows=(row,), cells=cells, backwards=(Backward.ALL,)) for row, name in enumerate(encoders)
    ]
    lanes.append(UnitLane(name=llm, rows=tuple(range(depth)), cells=cells, backwards=(Backward.ALL,) * depth))
    flows = tuple(Flow(name, cell, llm, cell) for name in encoders for cell in cells)
    schedule = generate_units(StepGraph(lanes=tuple(lanes), flows=flows, num_rows=depth), lead=lead)
    validate(schedule)
    forward = np.repeat([encoder_ms, 4], depth)[:, None] * np.ones((1, count))
    found = simulate(schedule, ActionCosts(forward_ms=forward, backward_input_ms=2 * forward[:, :, None]))
    own = generate_units(chain_graph(range(depth), depth, count), lead=lead)
    expected = simulate(own, ActionCosts(forward_ms=4 + encoder_ms, backward_input_ms=2 * (4 + encoder_ms)))
    assert found.iteration_ms <= expected.iteration_ms
