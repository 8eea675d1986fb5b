"""Stages of units hold what those of chains do: states of others that they share, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilient.planners.planner import Parallelism
from resilient.planners.stages.unit_memory import LaneCell, stage_bytes
from resilient.templates.schedules.kind import ScheduleKind
from tests.resilient.planners.small_jobs import small_unit

ONE_F_ONE_B, ZB_H1 = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1
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


@pytest.mark.parametrize("recompute", [0.25, 0.5, 0.75, 1.0])
def test_stages_of_which_some_layers_run_again_do_their_backward_at_once(recompute: float) -> None:
    """So nothing of it stays, nor is there, as it would be where the halves are apart."""
    unit = small_unit("llm", [1.0] * 8)
    curves = [replace(each, deferred_bytes=1e3, given_bytes=5.0) for layer in unit.layers[:1] for each in layer.curves]
    unit = replace(unit, layers=tuple(replace(layer, curves=tuple(curves)) for layer in unit.layers))
    spread = Parallelism(dp=1, pp=2, stage_layers=(4, 4), recompute=recompute)
    plain, split = (stage_bytes(unit, spread, 1, CELL, kind) for kind in (ONE_F_ONE_B, ZB_H1))
    assert split.running.tolist() == plain.running.tolist()
    assert split.waiting.tolist() == [0, 0]
