"""A planned job whose costs are wrong learns the right ones while it trains, and trains what one process does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from resilient.observability.step_trace import TracedStep, traced_steps
from resilient.observability.trace_events import ACTION
from resilient.runtime.steps.unit_steps import WARM_UP_STEPS
from resilient.templates.schedules.schedule import Action
from tests.integration.harness import check_equals_one_process, run_alone, started

SCRIPT = Path(__file__).parent / "jobs" / "mistaken_costs.py"
NUM_STEPS = 12
LEARNT_FROM = WARM_UP_STEPS + 1 + 2
"""The third step is measured, that is told in the barrier of the fourth, and what is expected of the fifth is right."""


def encoder_ratio(steps: Iterable[TracedStep]) -> float:
    """Return what the encoder took of what was expected of it, in so many times of what the language model did."""
    sums = {unit: [0.0, 0.0] for unit in ("vision", "llm")}
    for step in steps:
        spans = [span for span in step.spans if span.category == ACTION]
        for span, expected_ms in zip(spans, step.planned.action_ms, strict=True):
            action = Action.parse(span.name)
            if action.op.computes:
                took, expected = sums[action.lane.unit]
                sums[action.lane.unit] = [took + (span.end_ns - span.start_ns) / 1e6, expected + expected_ms]
    ratios = {unit: took / expected for unit, (took, expected) in sums.items()}
    return ratios["vision"] / ratios["llm"]


def test_costs_that_are_wrong_are_corrected_while_the_job_trains(tmp_path: Path) -> None:
    arguments = ("--steps", str(NUM_STEPS))
    log = run_alone(tmp_path / "alone", *arguments, script=SCRIPT)
    options = f"--planner resilient --trace-steps 1-{NUM_STEPS}"
    with started(tmp_path / "run", *arguments, nodes=2, script=SCRIPT, options=options) as job:
        run = job.wait()
    check_equals_one_process(run, tmp_path / "alone", log)
    traced = traced_steps(run.directory)
    before = encoder_ratio(step for step in traced if 1 < step.step < LEARNT_FROM)
    after = encoder_ratio(step for step in traced if step.step > LEARNT_FROM)
    assert after < 0.75 * before, (before, after)  # 1 and 2 on a machine with nothing else to do
