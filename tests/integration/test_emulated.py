"""Emulated devices train what one process trains, through failures and under every kind of backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.testing import fail_at
from tests.integration.harness import check_equals_one_process, check_survivors, run_alone, run_job

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "jobs" / "emulated.py"
OPTIONS = (
    *("--steps", "6", "--layers", "8", "--scale", "0.2", "--mix", "heavy", "--batch", "8", "--microbatch", "2"),
    *("--max-failures", "1", "--min-pipeline-nodes", "2"),
)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_run_with_a_kill_equals_one_process(schedule: str, tmp_path: Path) -> None:
    log = run_alone(tmp_path / "alone", *OPTIONS, script=SCRIPT)
    run = run_job(
        tmp_path / "run",
        *(*OPTIONS, "--schedule", schedule),
        script=SCRIPT,
        nodes=5,
        inject=[fail_at(node=1, step=3, phase="backward")],
    )
    check_equals_one_process(run, tmp_path / "alone", log)
    check_survivors(run)
    assert [failure["node"] for failure in run.failures] == [1]
