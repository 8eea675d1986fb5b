"""Runs jobs of real processes, in this process through the launcher or through the command line, and checks them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilient import testing
from resilient.agent.journal.replay import difference, replay_run
from resilient.agent.launch import Launcher
from resilient.cli.demo import example_script
from resilient.cli.run import parse_injection
from resilient.observability.event_log import read_events, steps_of
from resilient.observability.run_comparison import compare_parameters, compare_runs
from resilient.protocol.messages import Injection
from resilient.testing import JobRun

CHAIN = Path(__file__).parent / "jobs" / "chain.py"
DIGITS = example_script()
TOLERANCE = 1e-9
"""Largest relative difference of float64 runs, where only the order of summation may differ."""

LONGEST_RECOVERY_MS = 25_000
"""Far over what a recovery takes on a busy machine, under the timeouts that would end a wait for a lost message."""

Event = dict[str, Any]


class Run(JobRun):
    """A run that has ended."""

    @property
    def generations(self) -> list[Event]:
        return self.of_kind("generation")

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]


class Processes:
    """All processes a job tells of, to see later that none is left."""

    def __init__(self) -> None:
        self._seen: dict[int, psutil.Process] = {}

    def on_event(self, event: Event) -> None:
        for pid in [event["pid"]] if event["kind"] == "node_connected" else event.get("pids", ()):
            if event["kind"] in ("node_connected", "node_ready"):
                self._see(pid)

    def take_in_children(self, pid: int) -> None:
        """Take in a process and all its descendants."""
        process = psutil.Process(pid)
        for child in [process, *process.children(recursive=True)]:
            self._seen.setdefault(child.pid, child)

    def kill(self) -> None:
        """Kill those that still run."""
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def left(self, timeout_s: float = 30.0) -> list[psutil.Process]:
        """Return those that still run after the time it may take to end."""
        give_up_at = time.monotonic() + timeout_s
        while (
            alive := [process for process in self._seen.values() if _runs(process)]
        ) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        return alive

    def _see(self, pid: int) -> None:
        try:
            self._seen.setdefault(pid, psutil.Process(pid))
        except psutil.NoSuchProcess:
            return


def run_limited(line: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command line, with its output in a file; return its exit code, -SIGKILL if it took longer."""
    with log.open("wb") as file:
        job = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return job.wait(limit_s)
        except subprocess.TimeoutExpired:
            family = Processes()  # the nodes do not die with their launcher
            family.take_in_children(job.pid)
            family.kill()
            return job.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_job(
    directory: Path,
    *arguments: str,
    script: Path = CHAIN,
    nodes: int,
    workers_per_node: int = 1,
    shard: str = "off",
    tp: str = "1",
    network_gbit_s: float | None = None,
    inject: Sequence[str | Injection] = (),
    resume: str | None = None,
    heartbeat_s: float = 5.0,
    wait_for_nodes_s: float = 0.0,
    act: Callable[[Launcher, Event], None] | None = None,
) -> Run:
    """Run a job to its end in this process; no process of it may be left, and its decisions can be taken again.

    Args:
        act: Called with every event while the job runs.
    """
    processes = Processes()

    def on_event(launcher: Launcher, event: Event) -> None:
        processes.on_event(event)
        if act is not None:
            act(launcher, event)

    ended = testing.run_job(
        script,
        *arguments,
        directory=directory,
        nodes=nodes,
        workers_per_node=workers_per_node,
        shard=shard,
        tp=tp,
        network_gbit_s=network_gbit_s,
        failures=[parse_injection(failure) if isinstance(failure, str) else failure for failure in inject],
        resume=resume,
        heartbeat_s=heartbeat_s,
        wait_for_nodes_s=wait_for_nodes_s,
        act=on_event,
    )
    left = processes.left()
    assert not left, f"processes must end with the job, got {left}"
    replayed = replay_run(directory)
    assert (replayed.broken, difference(directory, replayed)) == ("", "")
    return Run(directory, ended.exit_code)


def run_alone(directory: Path, *arguments: str, script: Path = CHAIN) -> str:
    """Train in one process, without launcher; return what it logged."""
    command = [sys.executable, str(script), *arguments]
    environment = {**os.environ, "RESILIENT_RUN_DIR": str(directory), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300, check=True)
    return done.stderr


# ---------------------------------------------------------------- the command line


def command(*arguments: object) -> list[str]:
    """Return a ``resilient`` command line of the interpreter that runs the tests."""
    return [str(Path(sys.executable).with_name("resilient")), *map(str, arguments)]


def wait_for_event(
    directory: Path, job: subprocess.Popen[Any], wanted: Callable[[Event], bool], timeout_s: float = 60.0
) -> Event:
    """Return the first event of a job that is wanted, once it is there."""
    give_up_at = time.monotonic() + timeout_s
    path = directory / "events.jsonl"
    while True:
        ended = job.poll() is not None
        found = next(filter(wanted, read_events(path)), None) if path.exists() else None
        if found is not None:
            return found
        assert not ended, "the job ended before the event came"
        assert time.monotonic() < give_up_at, "the event did not come"
        time.sleep(0.02)


class Started:
    """A ``resilient run`` in the background."""

    def __init__(self, directory: Path, line: list[str]) -> None:
        self.directory = directory
        self.processes = Processes()
        self.popen = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, wanted: Callable[[Event], bool], timeout_s: float = 60.0) -> Event:
        """Return the first event that is wanted, once it is there."""
        try:
            return wait_for_event(self.directory, self.popen, wanted, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.output}") from None

    def wait_for_step(self, number: int) -> Event:
        return self.wait_for(lambda event: event["kind"] == "step" and event["step"] >= number)

    def wait(self, timeout_s: float = 100.0) -> Run:
        """Wait for the end; no process may be left."""
        exit_code = self.popen.wait(timeout_s)
        self._reader.join(timeout_s)
        assert not (left := self.processes.left()), f"processes must end with the job, got {left}"
        return Run(self.directory, exit_code)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def kill(self) -> None:
        """Kill the coordinator alone; its nodes live on."""
        self.processes.take_in_children(self.popen.pid)
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        self.processes.kill()
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.append(line)


@contextmanager
def started(
    directory: Path, *arguments: object, nodes: int | str, script: Path = CHAIN, options: str = ""
) -> Iterator[Started]:
    """Start ``resilient run``; it is killed when the test is over and it is not."""
    line = command("run", "--plain", "--nodes", nodes, "--run-dir", directory, *options.split(), script, *arguments)
    job = Started(directory, line)
    try:
        yield job
    finally:
        job.close()


@contextmanager
def attached(directory: Path) -> Iterator[Started]:
    """Take a run over; the new coordinator is killed when the test is over and it is not."""
    job = Started(directory, command("run", "--plain", "--attach", directory))
    try:
        yield job
    finally:
        job.close()


# ---------------------------------------------------------------- what must hold


def check_equal(run: Run, reference: Run, *, tolerance: float = TOLERANCE) -> None:
    """Check that a run gave what the failure-free one gave: every step, its samples and loss, the parameters."""
    assert run.exit_code == 0, run.reason
    compared = compare_runs(run.directory, reference.directory)
    assert compared["same_steps_and_samples"]
    assert compared["max_loss_abs_diff"] <= tolerance * max(filter(math.isfinite, reference.losses.values())), compared
    assert compared["max_param_rel_diff"] <= tolerance, compared


def check_equals_one_process(run: Run, alone: Path, log: str) -> None:
    """Check losses (as far as the log gives their digits) and final parameters against the process's."""
    assert run.exit_code == 0, run.reason
    logged = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\d+\.\d+)", log)}
    assert run.losses.keys() == logged.keys()
    assert all(abs(run.losses[step] - loss) <= 0.6e-4 for step, loss in logged.items())
    _, relative = compare_parameters(run.directory, alone)
    assert relative <= TOLERANCE


def check_survivors(run: Run) -> None:
    """Check that no worker process was ever replaced by another, by all that was published and by the report."""
    pids: dict[str, set[int]] = {}
    for generation in run.generations:
        for worker, pid in generation["pids"].items():
            pids.setdefault(worker, set()).add(pid)
    assert all(len(seen) == 1 for seen in pids.values()), pids
    changes = [*run.report["recoveries"], *run.report["joins"], *run.report["departures"]]
    assert all(change["restarted_workers"] == 0 for change in changes), changes


def check_recovered(run: Run, reference: Run, *, num_failures: int = 1, tolerance: float = TOLERANCE) -> None:
    """Check a run in which nodes failed: right result, survivors untouched, at most one step lost per failure."""
    check_equal(run, reference, tolerance=tolerance)
    check_survivors(run)
    recoveries = run.report["recoveries"]
    assert 1 <= len(recoveries) <= num_failures, recoveries
    assert sum(recovery["lost_steps"] for recovery in recoveries) <= len(recoveries), recoveries
    assert all(recovery["total_ms"] < LONGEST_RECOVERY_MS for recovery in recoveries), recoveries


def spare_nodes(generation: Event, lost: int) -> list[int]:
    """Return the nodes of a generation that may be lost with ``lost``, every layer still being held, in order.

    Which these are is decided by the plan, and so by what the layers' times were measured to be.
    """
    stages = [stage for pipeline in generation["pipelines"] for stage in pipeline["stages"]]
    holders: dict[int, set[int]] = {}
    for stage in stages:
        for layer in range(stage["first_layer"], stage["end_layer"]):
            holders.setdefault(layer, set()).add(stage["node"])
    nodes = sorted({stage["node"] for stage in stages} - {lost})
    return [node for node in nodes if all(held - {lost, node} for held in holders.values())]


def resume_command(reason: str) -> list[str]:
    """Return the command that the message gives."""
    found = re.search(r"resume with: (resilient run .*)$", reason)
    assert found is not None, reason
    return shlex.split(found[1])


def check_resumed(stopped: Run, words: list[str], reference: Run, folder: Path) -> None:
    """Run exactly the command, in a folder of its own; the two parts together must be the uninterrupted run."""
    folder.mkdir()
    done = subprocess.run(command(*words[1:]), cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (resumed,) = (folder / "runs").iterdir()
    _, relative = compare_parameters(resumed, reference.directory)
    assert relative <= 1e-9
    losses = {number: step["loss"] for number, step in steps_of(read_events(resumed / "events.jsonl")).items()}
    assert {**stopped.losses, **losses} == pytest.approx(reference.losses, rel=1e-9)
