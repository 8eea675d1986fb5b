"""Where a job listens, by the listening sockets of all of its processes."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from resilient.common.network.ports import port_range
from tests.integration.harness import Run, Started, started
from tests.resilient.common.network.test_ports import free_range

SMALL = ("--min-pipeline-nodes", "1", "--max-failures", "2")
NODES = 3
"""As many as the job needs: one that is lost is waited for."""


def listening(process: psutil.Process) -> list[int]:
    found = process.net_connections("tcp")
    return sorted(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)


@pytest.mark.parametrize(
    ("arguments", "num_own"),
    [((), 1), (("--widest", 2), 2)],
    ids=["a store", "a store, and messages of workers that gloo does not all connect"],
)
def test_all_sockets_but_gloos_listen_in_the_range_after_a_loss_too(
    arguments: tuple[object, ...], num_own: int, tmp_path: Path
) -> None:
    ports = free_range((2 + 2 * num_own) * NODES + 3)
    held = ("--hold-in", 2, "--gate", tmp_path / "gate", "--hold-in", 5, "--gate", tmp_path / "second-gate")
    within = set(port_range(ports))

    def check(job: Started, workers: set[int]) -> None:
        launcher = psutil.Process(job.popen.pid)
        found = {each.pid: listening(each) for each in (launcher, *launcher.children(recursive=True))}
        outside = {pid: [port for port in taken if port not in within] for pid, taken in found.items()}
        assert {pid for pid, others in outside.items() if others} == workers, "gloo's own, of those who train"
        assert [len(outside[pid]) for pid in workers] == [1] * NODES
        inside = sorted(port for taken in found.values() for port in taken if port in within)
        assert len(inside) == len(set(inside)) == 1 + (1 + num_own) * NODES, "the coordinator, the agents, the workers"
        assert all(len(found[pid]) == 1 + num_own for pid in workers)

    with started(tmp_path / "run", *SMALL, *held, *arguments, nodes=NODES, options=f"--port-range {ports}") as job:
        job.wait_for_step(1)
        (generation,) = Run(job.directory, 0).generations
        check(job, set(generation["pids"].values()))
        psutil.Process(generation["pids"]["1/0"]).kill()
        job.wait_for(lambda event: event["kind"] == "detected")
        (tmp_path / "gate").touch()
        both = job.wait_for(
            lambda event: event["kind"] == "generation" and len(event["nodes"]) == NODES and 1 not in event["nodes"]
        )
        job.wait_for_step(4)
        check(job, {both["pids"][worker] for worker in both["pids"] if worker != "1/0"})
        (tmp_path / "second-gate").touch()
        assert job.wait().exit_code == 0, job.output


def test_range_that_is_full_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    ports = free_range(1)
    with (
        socket.create_server(("127.0.0.1", port_range(ports)[0])),
        started(tmp_path / "run", nodes=NODES, options=f"--port-range {ports}") as job,
    ):
        assert job.popen.wait(60) == 1
    told = f"error: --port-range must have a port that is free, got all ports of {ports} are taken at 127.0.0.1"
    assert told in job.output


@pytest.mark.parametrize("count", [NODES, NODES + 1])
def test_range_without_room_for_agents_or_workers_ends_the_job(count: int, tmp_path: Path) -> None:
    ports = free_range(count)
    with started(tmp_path / "run", *SMALL, nodes=NODES, options=f"--port-range {ports}") as job:
        run = job.wait()
    assert run.exit_code == 1
    assert f"all ports of {ports} are taken at 127.0.0.1; widen --port-range" in run.reason
