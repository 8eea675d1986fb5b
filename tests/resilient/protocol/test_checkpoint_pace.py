"""When a checkpoint is due, by times that are made up."""

from __future__ import annotations

import pytest

from resilient.protocol.checkpoint_pace import CheckpointClock, CheckpointPace
from resilient.templates.common.checkpoint_interval import checkpoint_interval_s


class Training:
    """Steps of 10 s, after some of which a checkpoint takes its time."""

    def __init__(self, pace: CheckpointPace | None, checkpoint_s: float = 4.0) -> None:
        self.now, self.checkpoint_s = 0.0, checkpoint_s
        self.clock = CheckpointClock(lambda: self.now)
        self.clock.enter(pace)

    def steps(self, number: int) -> list[int]:
        """Train; return the steps, from 1 on, that checkpoints were written after."""
        saved: list[int] = []
        for step in range(1, number + 1):
            self.now += 10.0
            is_saved = self.clock.is_due()
            self.clock.note_step(is_saved=is_saved)
            if is_saved:
                saved.append(step)
                self.now += self.checkpoint_s
        return saved


def test_the_first_checkpoint_measures_what_one_costs_and_the_others_come_by_that() -> None:
    training = Training(CheckpointPace(risk_s=1000.0))
    first, second, third, *_ = training.steps(40)
    assert first == 3, "when the time of a step is known"
    assert training.clock.cost_s == pytest.approx(4.0)
    assert training.clock.interval_s == checkpoint_interval_s(4.0, 1000.0)
    assert third - second == -(-checkpoint_interval_s(4.0, 1000.0) // 10)


def test_dear_checkpoints_are_rarer_and_frequent_losses_make_them_more_frequent() -> None:
    numbers = [
        len(Training(CheckpointPace(risk_s=risk_s), checkpoint_s).steps(200))
        for checkpoint_s, risk_s in ((4.0, 1e3), (40.0, 1e3), (4.0, 1e4))
    ]
    assert numbers[0] > 2 * numbers[1]
    assert numbers[0] > 2 * numbers[2]


def test_a_generation_goes_on_from_what_is_known() -> None:
    pace = CheckpointPace(risk_s=1000.0, cost_s=4.0, since_s=checkpoint_interval_s(4.0, 1000.0) - 25.0)
    assert Training(pace).steps(4) == [3]


def test_nothing_is_due_where_nobody_is_to_decide() -> None:
    assert Training(None).steps(50) == []
