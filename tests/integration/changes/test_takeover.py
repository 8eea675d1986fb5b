"""The coordinator dies: the nodes train on, another one takes the job over, and nothing of it is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.agent.journal.replay import difference, replay_run
from resilient.state.manifest import MANIFEST, folder
from tests.integration.harness import (
    Event,
    Run,
    Started,
    attached,
    check_equal,
    check_recovered,
    check_resumed,
    check_survivors,
    resume_command,
    run_job,
    started,
)

NODES = 5
OPTIONS = "--heartbeat-s 2"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def agents(job: Started) -> dict[int, int]:
    """Return the processes of a job's nodes, by node; a node is the session that its agent leads."""
    job.wait_for_step(1)
    run = Run(job.directory, 0)
    return {event["node"]: event["pid"] for event in run.of_kind("node_connected")}


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at, "it did not come to that"
        time.sleep(0.02)


def held(folder: Path, *steps: int) -> tuple[list[object], list[Path]]:
    """Return the arguments of a job that waits in these steps, and what each waits for."""
    gates = [folder / f"gate-{step}" for step in steps]
    waits = [("--hold-in", step, "--gate", gate) for step, gate in zip(steps, gates, strict=True)]
    return [word for wait in waits for word in wait], gates


def took_over(event: Event) -> bool:
    return event["kind"] == "took_over"


def test_job_goes_on_without_its_coordinator_and_recovers_with_the_next(reference: Run, tmp_path: Path) -> None:
    """Steps 4 to 7 are done and checkpoints written while nobody leads the job; then a node is lost."""
    words, (first, second) = held(tmp_path, 4, 8)
    run_directory = tmp_path / "run"
    with started(run_directory, *words, "--checkpoint-every", 3, nodes=NODES, options=OPTIONS) as job:
        pids = agents(job)
        job.wait_for_step(3)
        job.kill()
        first.touch()
        wait_until((folder(run_directory, 6) / MANIFEST).exists)
        with attached(run_directory) as next_job:
            next_job.wait_for_step(7)
            # Of a checkpoint only those who wrote it can tell: node 2, too, has to be back before it goes.
            next_job.wait_for(lambda event: event["kind"] == "checkpoint" and event["step"] == 6)
            os.killpg(pids[2], signal.SIGKILL)
            next_job.wait_for(lambda event: event["kind"] == "node_lost" and event["node"] == 2)
            second.touch()
            run = next_job.wait()
        assert job.processes.left() == []
    check_recovered(run, reference)
    (event,) = filter(took_over, run.events)
    assert event["term"] == 2
    assert [step["step"] for step in run.of_kind("step")] == list(range(1, 13)), "each is told once, and none is lost"
    assert {step["generation"] for step in run.of_kind("step") if step["step"] < 8} == {1}
    assert [saved["step"] for saved in run.of_kind("checkpoint")] == [3, 6, 9, 12]
    replayed = replay_run(run_directory)
    assert (replayed.broken, difference(run_directory, replayed)) == ("", "")


def test_coordinator_that_was_stopped_and_wakes_up_is_obeyed_by_nobody(reference: Run, tmp_path: Path) -> None:
    words, (gate,) = held(tmp_path, 6)
    run_directory = tmp_path / "run"
    with started(run_directory, *words, nodes=NODES, options="--heartbeat-s 1") as job:
        agents(job)
        job.wait_for_step(3)
        os.kill(job.popen.pid, signal.SIGSTOP)
        with attached(run_directory) as next_job:
            next_job.wait_for(took_over)
            os.kill(job.popen.pid, signal.SIGCONT)
            assert job.popen.wait(60) == 1
            gate.touch()
            run = next_job.wait()
    assert "another coordinator has taken this job over (term 2 in" in job.output
    check_equal(run, reference)
    check_survivors(run)
    assert len(run.generations) == 1
    assert run.of_kind("node_lost") == []


def test_node_that_died_with_the_coordinator_is_lost_after_a_grace(reference: Run, tmp_path: Path) -> None:
    words, (gate,) = held(tmp_path, 4)
    run_directory = tmp_path / "run"
    with started(run_directory, *words, nodes=NODES, options=OPTIONS) as job:
        pids = agents(job)
        job.wait_for_step(3)
        job.kill()
        os.killpg(pids[1], signal.SIGKILL)
        with attached(run_directory) as next_job:
            next_job.wait_for(lambda event: event["kind"] == "node_lost" and event["node"] == 1)
            gate.touch()
            run = next_job.wait()
    check_recovered(run, reference)


def test_orphans_end_their_job_with_a_checkpoint_to_be_resumed(reference: Run, tmp_path: Path) -> None:
    run_directory = tmp_path / "run"
    with started(run_directory, "--change-after", 6, nodes=NODES, options=f"{OPTIONS} --orphan-s 2") as job:
        agents(job)
        job.wait_for_step(3)
        job.kill()
        wait_until(lambda: Run(run_directory, 3).of_kind("interrupted") != [])
        assert job.processes.left() == []
    run = Run(run_directory, 3)
    stopped = run.events[-1]
    assert (stopped["kind"], stopped["exit_code"]) == ("stopped", 3)
    assert stopped["reason"].startswith("interrupted (no coordinator for 2 s); resume with: ")
    assert (run_directory / "report.json").exists()
    check_resumed(run, resume_command(run.reason), reference, tmp_path / "resumed")


def test_job_that_is_led_is_not_taken_over(tmp_path: Path) -> None:
    words, (gate,) = held(tmp_path, 3)
    with started(tmp_path / "run", *words, nodes=NODES) as job:
        job.wait_for_step(2)
        with attached(tmp_path / "run") as early:
            assert early.popen.wait(60) == 1
        gate.touch()
        assert job.wait().exit_code == 0
    with attached(tmp_path / "run") as late:
        assert late.popen.wait(60) == 1
    assert early.output.startswith("error: --attach must be a run without a coordinator, got ")
    assert late.output.startswith("error: --attach must be a run whose job goes on, got ")
