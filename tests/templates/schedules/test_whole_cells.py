"""Lanes whose cells are differentiated at once: one call a cell, whatever becomes of its samples."""

from __future__ import annotations

from dataclasses import replace

from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate
from tests.templates.schedules.test_units import DEFERRED


def test_encoder_with_whole_cells_runs_one_backward_after_the_gradients_of_all_its_samples() -> None:
    encoder, llm = DEFERRED.lanes
    schedule = generate_units(replace(DEFERRED, lanes=(replace(encoder, whole=True), llm)))
    validate(schedule)
    assert [" ".join(map(str, row)) for row in schedule.rows[:2]] == [
        "vision.0:0F0 vision.0:0SEND_F0 vision.0:0F2 vision.0:0SEND_F2 "
        "vision.0:0RECV_B0 vision.0:0B0 vision.0:0RECV_B2 vision.0:0B2",
        "vision.0:1RECV_F0 vision.0:1F0 vision.0:1SEND_F0>llm.0:0 vision.0:1SEND_F0>llm.0:2 "
        "vision.0:1RECV_F2 vision.0:1F2 vision.0:1SEND_F2>llm.0:2 "
        "vision.0:1RECV_B0<llm.0:0 vision.0:1RECV_B0<llm.0:2 vision.0:1B0 vision.0:1SEND_B0 "
        "vision.0:1RECV_B2<llm.0:2 vision.0:1B2 vision.0:1SEND_B2",
    ]


def test_samples_of_a_whole_cell_are_one_part_wherever_they_go() -> None:
    vision, llm = LaneName("vision"), LaneName("llm")
    samples = {vision: {0: (4, 1, 7)}, llm: {0: (1,), 2: (4,)}}
    apart, whole = (StepCells(samples=samples, feeds=[("vision", "llm")], whole=each) for each in ((), (vision,)))
    assert [apart.part(vision, 0, part) for part in (0, 1)] == [(1, 7), (4,)]
    assert whole.part(vision, 0, 0) == (4, 1, 7)
    assert whole.flows == apart.flows
