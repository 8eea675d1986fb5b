"""The stopwatch counts what runs under it, and takes the middle of many steps."""

from __future__ import annotations

import pytest
import torch

from resilient.pipeline import stage_timer as stage_timer
from resilient.pipeline.stage_timer import MIN_MEASURED_STEPS, StageTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass from one look at the clock to the next."""
    passing: list[float] = []
    now = 0.0

    def look() -> float:
        nonlocal now
        now += passing.pop(0)
        return now

    monkeypatch.setattr(stage_timer.time, "perf_counter", look)
    return passing


def step(watch: StageTimer, clock: list[float], *spans_s: float, num_microbatches: float = 2.0) -> None:
    for span_s in spans_s:
        clock += [100.0, span_s]  # what passes between two spans does not count
        with watch.during(0, 0):
            pass
    watch.end_step(num_microbatches)


def test_time_of_a_microbatch_is_the_median_over_the_steps(clock: list[float]) -> None:
    watch = StageTimer(torch.device("cpu"))
    step(watch, clock, 9.0, 9.0)
    for _ in range(MIN_MEASURED_STEPS):
        step(watch, clock, 0.004, 0.001, 0.002, 0.003)
    assert watch.stage_ms == pytest.approx(5.0)


def test_step_counts_as_what_it_was_worth_and_not_where_that_is_nothing(clock: list[float]) -> None:
    watch = StageTimer(torch.device("cpu"))
    for worth in (0.5, 1.0, 2.0, 4.0) * MIN_MEASURED_STEPS:
        step(watch, clock, 0.003 * worth, num_microbatches=worth)
        step(watch, clock, 9.0, num_microbatches=0.0)
    assert watch.stage_ms == pytest.approx(3.0)


def test_time_of_a_step_is_told_by_stage_and_cell(clock: list[float]) -> None:
    watch = StageTimer(torch.device("cpu"))
    for stage, cell, span_s in ((0, 0, 0.25), (0, 1, 0.5), (2, 1, 1.0), (0, 0, 2.0)):
        clock += [100.0, span_s]
        with watch.during(stage, cell):
            pass
    assert watch.end_step(2.0) == {(0, 0): 2250.0, (0, 1): 500.0, (2, 1): 1000.0}
    assert watch.end_step(2.0) == {}


def test_few_steps_say_nothing(clock: list[float]) -> None:
    watch = StageTimer(torch.device("cpu"))
    for _ in range(MIN_MEASURED_STEPS - 1):
        step(watch, clock, 0.004)
    assert watch.stage_ms == 0.0


def test_old_steps_are_forgotten(clock: list[float]) -> None:
    watch = StageTimer(torch.device("cpu"))
    for seconds in [9.0] * 40 + [0.001] * 40:
        step(watch, clock, seconds, num_microbatches=1.0)
    assert watch.stage_ms == pytest.approx(1.0)
