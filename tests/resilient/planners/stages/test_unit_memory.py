"""Stages of units hold what those of chains do: states of others that they share, too."""

from __future__ import annotations

from dataclasses import replace

from resilient.planners.planner import Parallelism
from resilient.planners.stages.unit_memory import LaneCell, stage_bytes
from tests.resilient.planners.small_jobs import small_unit

CELL = LaneCell(tokens=10.0, squares=100.0)


def test_a_stage_holds_the_state_that_it_shares_with_another_of_its_unit() -> None:
    """What is another unit's is held there, too, and none of this one's."""
    unit = small_unit("llm", [1.0] * 4)
    tied = replace(unit, layers=(*unit.layers[:3], replace(unit.layers[3], shares=("0", "vision.embed"))))
    spread = Parallelism(dp=1, pp=2, stage_layers=(2, 2))
    assert stage_bytes(unit, spread, 1, CELL).state.tolist() == [8000, 8000]
    assert stage_bytes(tied, spread, 1, CELL).state.tolist() == [8000, 12000]
    assert stage_bytes(unit, replace(spread, pp=1, stage_layers=(4,)), 2, CELL).state.tolist() == [8000]


def test_what_is_sent_for_no_gradient_stays_until_the_step_ends() -> None:
    unit = small_unit("vision", [1.0] * 2)
    spread = Parallelism(dp=1, pp=2, stage_layers=(1, 1))
    cell = replace(CELL, sent_bytes=640.0)
    found = stage_bytes(unit, spread, 1, cell)
    assert (found.handed_on.tolist(), found.sent.tolist()) == ([2 * 100, 2 * 640], [0, 0])
    frozen = replace(unit, layers=tuple(replace(each, trainable=False, input_gradient=False) for each in unit.layers))
    found = stage_bytes(frozen, spread, 1, cell)
    assert (found.handed_on.tolist(), found.sent.tolist(), found.kept.tolist()) == ([0, 0], [100, 640], [0, 0])
