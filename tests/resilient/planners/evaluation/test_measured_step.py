"""The loop of assignment, measured stage times and correction, with a truth that the profile does not know."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.measured_step import cell_times, corrected
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.published.dflop.planner import Dflop
from resilient.planners.stages.degraded_replicas import degraded_replicas
from tests.resilient.planners.jobs_of_planners import COSTS, setting, table, unit

TRUTH = CostModel(units=(unit("vision", 4, 0.001, 3e-5), unit(LLM, 8, 0.002, 1e-6)))
FOUND = Configuration(
    units={
        "vision": Parallelism(dp=4, pp=1, stage_layers=(4,)),
        LLM: Parallelism(dp=2, pp=4, stage_layers=(2, 2, 2, 2)),
    },
    num_microbatches=6,
)


def even(seed: int) -> SampleTable:
    """Samples of which none is longer than a microbatch; pictures and texts are of unrelated lengths."""
    draw = np.random.default_rng(seed)
    vision, text = draw.integers(50, 800, (2, 64))
    return SampleTable(units={"vision": Lengths.of(vision), LLM: Lengths.of(text)})


def step(known: Setting, truth: Setting, seed: int, lost: int = 0, cost_ms: float = 0.01) -> tuple[Setting, float]:
    """The job after a step, and what this took in truth."""
    batch, replicas = even(seed), degraded_replicas(known, FOUND, lost)
    assignment = Dflop().assign(known, FOUND, batch, replicas)
    measured = cell_times(truth, FOUND, assignment, batch, replicas)
    after = corrected(known, FOUND, assignment, batch, replicas, measured, cost_ms=cost_ms)
    return after, evaluate(truth, FOUND, assignment, batch, replicas).iteration_ms


def test_steps_get_faster_as_correction_learns_from_them() -> None:
    wrong, truth = setting(), replace(setting(), costs=TRUTH)
    known, before, after, best = wrong, list[float](), list[float](), list[float]()
    for seed in range(16):
        known, taken = step(known, truth, seed)
        if seed >= 4:
            after.append(taken)
            before.append(step(wrong, truth, seed)[1])
            best.append(step(truth, truth, seed)[1])
    wasted, left = np.mean(before) - np.mean(best), np.mean(after) - np.mean(best)
    assert wasted > 0.01 * np.mean(best)
    assert left < 0.25 * wasted


@pytest.mark.parametrize("lost", [0, 3])
def test_factors_are_of_the_costs_and_not_of_what_failures_leave(lost: int) -> None:
    twice = CostModel(units=(unit("vision", 4, 0.002, 2e-6), COSTS.by_name[LLM]))
    known, _ = step(setting(), replace(setting(), costs=twice), 0, lost)
    # What a call takes beside is the same.
    assert known.correction.factor("vision", 1, [500, 2000]) == pytest.approx(2, rel=0.1)
    assert known.correction.factor(LLM, 1, [500, 2000]) == pytest.approx(1)


def test_a_step_without_encoder_work_teaches_nothing_of_it() -> None:
    job, replicas = setting(), degraded_replicas(setting(), FOUND, 0)
    text = SampleTable(units={"vision": Lengths.of(np.zeros(8, np.int64)), LLM: Lengths.of(np.full(8, 50))})
    assignment = Dflop().assign(job, FOUND, text, replicas)
    measured = cell_times(job, FOUND, assignment, text, replicas)
    after = corrected(job, FOUND, assignment, text, replicas, measured, cost_ms=0.0)
    assert {unit for unit, _, _ in after.correction.factors} == {LLM}


def after(known: Setting, truth: Setting, steps: range, cost_ms: float) -> tuple[Setting, list[int]]:
    """The job after some steps, and those that were measured."""
    seen: list[int] = []
    for number in steps:
        if known.correction.tracking.measures(number):
            known, _ = step(known, truth, number, cost_ms=cost_ms)
            seen.append(number)
    return known, seen


def test_tracking_stops_where_it_brings_less_than_it_takes() -> None:
    right, wrong = setting(), replace(setting(), costs=TRUTH)
    stopped, seen = after(right, right, range(1, 120), 0.01)
    assert seen == [*range(1, 21), 50, 100]
    assert stopped.correction.tracking.benefit_ms == pytest.approx(0, abs=1e-9)
    tracked, seen = after(right, wrong, range(40), 0.01)
    assert seen == list(range(40))
    benefit = tracked.correction.tracking.benefit_ms
    assert benefit > 1
    dear, seen = after(right, wrong, range(1, 50), 3 * benefit)
    assert seen == list(range(1, 21))
    assert dear.correction.factor("vision", 1, [500])[0] > 1.1  # what was learnt stays


def test_nothing_is_gained_where_all_takes_a_multiple() -> None:
    """All of a machine half as fast: no assignment is changed by that."""
    known, replicas = setting(), degraded_replicas(setting(), FOUND, 0)
    for seed in range(20):
        batch = even(seed)
        assignment = Dflop().assign(known, FOUND, batch, replicas)
        times = cell_times(known, FOUND, assignment, batch, replicas)
        twice = {name: 2 * each for name, each in times.items()}
        known = corrected(known, FOUND, assignment, batch, replicas, twice, cost_ms=0.01)
        assert known.correction.tracking.on == (seed < 19)
    assert known.correction.factor("vision", 1, [500, 2000]) == pytest.approx(2)


def test_tracking_goes_on_when_the_error_has_grown() -> None:
    right, wrong = setting(), replace(setting(), costs=TRUTH)
    stopped, _ = after(right, right, range(1, 40), 0.01)
    same, _ = after(stopped, right, range(40, 1000), 0.01)
    assert not same.correction.tracking.on
    assert same.correction.factors == stopped.correction.factors
    grown, seen = after(stopped, wrong, range(40, 140), 0.01)
    assert seen == [50, *range(51, 140)]
    assert grown.correction.factor("vision", 1, [500])[0] > 1.1


def test_times_of_other_cells_are_refused() -> None:
    job, batch, replicas = setting(), table(64), degraded_replicas(setting(), FOUND, 0)
    assignment = Dflop().assign(job, FOUND, batch, replicas)
    measured = cell_times(job, FOUND, assignment, batch, replicas)
    message = (
        "measured_ms must have (4, 12) times of 'llm', by stage and cell, got (4, 11); give those of the step that was "
        "assigned so"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        corrected(job, FOUND, assignment, batch, replicas, {**measured, LLM: measured[LLM][:, 1:]}, cost_ms=0.0)
