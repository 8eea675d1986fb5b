"""The processes around the training: launcher, agents, signals, silence."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient.state.manifest import MANIFEST, folder
from tests.integration.harness import (
    Run,
    Started,
    check_equal,
    check_recovered,
    check_survivors,
    command,
    run_job,
    started,
)

NODES = 5
OPEN_TO_ALL = (psutil.CONN_LISTEN, psutil.CONN_NONE)
"""Of TCP and of UDP."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def test_launcher_killed_leaves_nothing_behind_for_ever(tmp_path: Path) -> None:
    """Not even workers that hang, of a job that nobody takes over."""
    options = "--heartbeat-s 1 --orphan-s 1 --grace-s 2"
    with started(tmp_path / "run", "--hold-in", 3, "--gate", tmp_path / "never", nodes=4, options=options) as job:
        job.wait_for_step(2)
        job.kill()
        assert job.processes.left() == []


def test_coordinator_that_stands_still_costs_no_node(reference: Run, tmp_path: Path) -> None:
    """For longer than any node may: the job trains to its end and the nodes write the manifest, which says that they
    have noticed; all are taken back as they were."""
    run_directory = tmp_path / "run"
    with started(run_directory, nodes=NODES, options="--heartbeat-s 1") as job:
        job.wait_for_step(2)
        job.popen.send_signal(signal.SIGSTOP)
        give_up_at = time.monotonic() + 60
        while not (folder(run_directory, 12) / MANIFEST).exists():
            assert time.monotonic() < give_up_at, "the nodes must make the last checkpoint whole"
            time.sleep(0.02)
        job.popen.send_signal(signal.SIGCONT)
        run = job.wait()
    check_equal(run, reference)
    assert len(run.generations) == 1
    assert run.of_kind("node_lost") == []


def order_kill(job: Started, *options: object) -> None:
    subprocess.run(command("inject", "kill", "--run", job.directory, *options), check=True, timeout=60)


def test_kills_ordered_through_the_command_line(reference: Run, tmp_path: Path) -> None:
    """The job stands in step 4. A worker hears that it is to die in the recovery before it hears of a recovery."""
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 4, "--gate", gate, nodes=NODES + 1) as job:
        job.wait_for_step(3)
        order_kill(job, "--node", 2, "--at-step", 4, "--at-phase", "regroup")
        order_kill(job, "--node", 1)
        job.wait_for(lambda event: event["kind"] == "node_lost" and event["node"] == 1)
        gate.touch()
        run = job.wait()
    fired = [(fired["node"], fired["step"], fired["phase"]) for fired in run.failures]
    assert fired == [(1, None, None), (2, 4, "regroup")]
    check_recovered(run, reference)
    assert "recovered from the loss of nodes 1, 2" in job.output


def test_kill_ordered_at_once_through_the_command_line(reference: Run, tmp_path: Path) -> None:
    """The job stands in step 4; a worker dies, and its node comes back as a new one."""
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 4, "--gate", gate, nodes=NODES) as job:
        job.wait_for_step(3)
        order_kill(job, "--node", 1, "--worker", 0)
        job.wait_for(lambda event: event["kind"] == "node_lost" and event["node"] == 1)
        gate.touch()
        run = job.wait()
    check_recovered(run, reference)


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_every_socket_of_the_job_is_on_the_chosen_host_and_its_folder_is_private(tmp_path: Path) -> None:
    """Of the launcher, the agents and the workers, while these train; each of the last two hosts a store and groups."""
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 4, "--gate", gate, nodes=NODES) as job:
        job.wait_for_step(3)
        launcher = psutil.Process(job.popen.pid)
        tree = [launcher, *launcher.children(recursive=True)]
        ends = {
            process.pid: [end for end in process.net_connections("inet") if end.status in OPEN_TO_ALL]
            for process in tree
        }
        most_files = {process.pid: process.rlimit(psutil.RLIMIT_NOFILE) for process in tree}
        gate.touch()
        assert job.wait().exit_code == 0
    logs = list(job.directory.glob("logs/*/*.log"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700
    assert {end.laddr.ip for of_process in ends.values() for end in of_process} == {"127.0.0.1"}
    assert sorted(map(len, ends.values()))[-NODES - 1 :] == [1, *[2] * NODES], "a worker's store and its groups' device"
    assert all(most_files[pid][0] == min(most_files[pid][1], 1 << 16) for pid in ends if ends[pid]), (
        "for strangers, too"
    )


def stop_session(leader: int, number: int) -> None:
    """Send a signal to all processes of a session, as if the machine stood still."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def test_silent_node_is_noticed_by_its_missing_heartbeat(reference: Run, tmp_path: Path) -> None:
    """No connection breaks when a machine stands still; it comes back as a new node when it goes on.

    Heartbeats as by default: a machine that is merely busy must not miss them.
    """
    gate, joined = tmp_path / "gate", tmp_path / "joined"
    held = ("--hold-in", 4, "--gate", gate, "--change-after", 8, "--unless", joined)
    with started(tmp_path / "run", *held, nodes=NODES) as job:
        agent = job.wait_for(lambda event: event["kind"] == "node_connected" and event["node"] == 2)["pid"]
        job.wait_for_step(3)
        stop_session(agent, signal.SIGSTOP)
        gate.touch()
        lost = job.wait_for(lambda event: event["kind"] == "node_lost")
        assert (lost["node"], lost["cause"]) == (2, "heartbeat missed")
        job.wait_for(lambda event: event["kind"] == "generation" and event["generation"] > 1)
        stop_session(agent, signal.SIGCONT)
        job.wait_for(lambda event: event["kind"] == "generation" and NODES in event["nodes"] + event["standby"])
        joined.touch()
        run = job.wait()
    check_recovered(run, reference)
    connected = {event["node"]: event["pid"] for event in run.of_kind("node_connected")}
    assert connected[NODES] == agent
    workers = {event["node"]: event["pids"] for event in run.of_kind("node_ready")}
    assert workers[NODES] != workers[2], "its old workers are fenced off"


def test_node_that_says_nothing_at_all_is_not_waited_for(tmp_path: Path) -> None:
    """Somebody who connects and never introduces himself holds nobody up."""
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 3, "--gate", gate, nodes=4) as job:
        job.wait_for_step(2)
        address = json.loads((job.directory / "job.json").read_text())["address"]
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /agent HTTP/1.1\r\nHost: x\r\n")
            gate.touch()
            run = job.wait()
    assert run.exit_code == 0
    check_survivors(run)
