"""Lanes that come to the same rows several times: as fast as interleaved 1F1B, and no slower for their encoders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5))
def test_chains_of_virtual_stages_are_as_fast_as_interleaved_ones(depth: int, rounds: int, num_groups: int) -> None:
    """In even steps without messages, and keep as much."""
    interleaved = generate(ScheduleKind.INTERLEAVED, depth, num_groups * depth, num_chunks=rounds)
    schedule = generate_units(interleaved.graph)
    validate(schedule)
    costs = ActionCosts(forward_ms=1, backward_input_ms=2, activation_bytes=1)
    found, expected = simulate(schedule, costs), simulate(interleaved, costs)
    assert found.iteration_ms == expected.iteration_ms
    assert found.peak_bytes == expected.peak_bytes


@pytest.mark.parametrize(("encoder_ms", "gain_ms"), [(6, 0), (5, 9), (3, 27)])
def test_virtual_stages_fill_a_pipeline_faster_where_an_encoder_is_faster(encoder_ms: int, gain_ms: int) -> None:
    """Stages of 6 ms forward, 12 ms backward; what an encoder takes as long for is there no sooner than a stage is."""
    cells = tuple(range(16))
    vision, llm = LaneName("vision", 0), LaneName("llm", 0)
    found: list[float] = []
    for rounds in (1, 2):
        lanes = (
            UnitLane(name=vision, rows=(4,), cells=cells, backwards=(Backward.ALL,)),
            UnitLane(name=llm, rows=tuple(range(4)) * rounds, cells=cells, backwards=(Backward.ALL,) * 4 * rounds),
        )
        graph = StepGraph(lanes=lanes, flows=tuple(Flow(vision, cell, llm, cell) for cell in cells), num_rows=5)
        schedule = generate_units(graph)
        validate(schedule)
        forward = np.full((1 + 4 * rounds, 16), 6 / rounds)
        forward[0] = encoder_ms
        costs = ActionCosts(forward_ms=forward, backward_input_ms=2 * forward[:, :, None])
        found.append(simulate(schedule, costs).iteration_ms)
    assert found[0] - found[1] == gain_ms
