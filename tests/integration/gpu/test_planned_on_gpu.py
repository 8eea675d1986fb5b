"""Planned jobs and stages of several devices train on GPUs as elsewhere: their messages go by way of the hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.testing import fail_at
from tests.integration.drills import SCRIPT
from tests.integration.harness import check_equals_one_process, check_survivors, run_alone, run_job

JOB = ("--steps", "4", "--batch", "16")


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 2])
def test_planned_job_through_a_kill(workers: int, tmp_path: Path) -> None:
    log = run_alone(tmp_path / "alone", *JOB, script=SCRIPT)
    options = ("--planner", "resilient", "--min-pipeline-nodes", "1")
    inject = [fail_at(node=1, step=2, phase="backward")]
    run = run_job(tmp_path / "run", *JOB, *options, script=SCRIPT, nodes=3, workers_per_node=workers, inject=inject)
    check_equals_one_process(run, tmp_path / "alone", log)
    check_survivors(run)
    assert all(event["device"].startswith("cuda") for event in run.of_kind("node_ready"))
