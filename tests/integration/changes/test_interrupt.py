"""A job that is told to end does so: after the running step with a checkpoint; told again, at once; always in time."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.state.manifest import read_manifest
from tests.integration.harness import Event, Run, check_resumed, resume_command, run_job, started

NODES = 4
STEP = 5


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def is_told(event: Event) -> bool:
    return event["kind"] == "interrupted"


def test_job_interrupted_in_mid_step_ends_after_it_and_goes_on_to_the_same_result(
    reference: Run, tmp_path: Path
) -> None:
    with started(tmp_path / "run", "--change-after", STEP, nodes=NODES) as job:
        job.wait_for_step(STEP - 1)
        job.processes.take_in_children(job.popen.pid)
        job.popen.send_signal(signal.SIGINT)
        run = job.wait()
    assert run.exit_code == 130
    checkpoint = run.directory / "checkpoints" / f"step-{STEP:08d}"
    assert read_manifest(checkpoint).step == STEP == max(run.losses)
    assert run.reason.startswith(
        f"interrupted (SIGINT); resume with: resilient run --nodes {NODES} --resume {checkpoint} "
    )
    assert f"checkpoint of step {STEP} written to {checkpoint}" in job.output
    assert run.reason in job.output
    check_resumed(run, resume_command(run.reason), reference, tmp_path / "resumed")


def test_job_told_again_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "run", "--hold-in", STEP, "--gate", tmp_path / "never", nodes=NODES) as job:
        job.wait_for_step(STEP - 1)
        job.processes.take_in_children(job.popen.pid)
        while job.popen.poll() is None:  # those within a second of the first are one with it
            job.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.popen.wait(0.4)
        run = job.wait()
    assert run.exit_code == 130
    assert run.reason.startswith("interrupted twice (SIGTERM); there is no checkpoint; start again with: resilient run")
    assert "Traceback" not in job.output


def test_signal_that_a_supervisor_sends_twice_counts_once_and_none_keeps_the_report_from_being_written(
    tmp_path: Path,
) -> None:
    with started(tmp_path / "run", "--change-after", STEP, nodes=NODES) as job:
        job.wait_for_step(STEP - 1)
        job.processes.take_in_children(job.popen.pid)
        job.popen.send_signal(signal.SIGTERM)
        job.popen.send_signal(signal.SIGTERM)
        job.wait_for(lambda event: event["kind"] == "stopped")
        while job.popen.poll() is None:
            job.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.popen.wait(0.05)
        run = job.wait()
    assert run.exit_code == 130
    checkpoint = run.directory / "checkpoints" / f"step-{STEP:08d}"
    assert run.reason.startswith(f"interrupted (SIGTERM); resume with: resilient run --nodes {NODES} ")
    assert json.loads((run.directory / "report.json").read_text())["exit"]["checkpoint"] == str(checkpoint)
    assert job.output.splitlines()[-1] == f"stopped with exit code 130: {run.reason}"


def test_job_whose_workers_all_hang_ends_in_the_time_it_is_given(tmp_path: Path) -> None:
    """They neither end the step nor report, so they are given up, or time is; nobody can write the checkpoint."""
    options = "--grace-s 3"
    with started(
        tmp_path / "run", "--hold-in", STEP, "--gate", tmp_path / "never", nodes=NODES, options=options
    ) as job:
        job.wait_for_step(STEP - 1)
        job.processes.take_in_children(job.popen.pid)
        job.popen.send_signal(signal.SIGINT)
        run = job.wait()
    assert run.exit_code == 130
    assert re.match(
        r"interrupted \(SIGINT\); (all nodes are lost, the last one \(\d\) because of: no report within \d+ s; where "
        r"it hangs is at the end of \S+|"
        r"the checkpoint was not written within 3 s); there is no checkpoint; "
        r"start again with: resilient run --nodes 4 --grace-s 3 ",
        run.reason,
    )


def test_job_interrupted_in_a_recovery_saves_what_the_survivors_hold(reference: Run, tmp_path: Path) -> None:
    def interrupt(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "detected":
            launcher.interrupt("SIGTERM")

    run = run_job(tmp_path / "run", nodes=NODES + 1, inject=[f"node=1,step={STEP},phase=backward"], act=interrupt)
    assert run.exit_code == 130
    assert run.of_kind("detected")
    words = resume_command(run.reason)
    assert words[2:4] == ["--nodes", str(NODES + 1)]
    assert read_manifest(words[words.index("--resume") + 1]).step == STEP - 1
    check_resumed(run, words, reference, tmp_path / "resumed")
