"""torchrun with this package's rendezvous over a real etcd: agents meet, workers restart, a lost agent is left out."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.etcd_server import EtcdServer, etcd_server, needs_etcd

JOB = Path(__file__).parents[2] / "integration" / "jobs" / "torchrun_sum.py"
CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


def _agent(server: EtcdServer, folder: Path, nodes: str, address: str = "127.0.0.1") -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
                *("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", server.endpoint, "--rdzv-id", "job"),
                *("--rdzv-conf", CONF, "--max-restarts", "3", "--monitor-interval", "0.1", "--local-addr", address),
                *(str(JOB), str(folder)),
            ],
            stdout=log,
            stderr=log,
        )


def _end(agents: list[subprocess.Popen[bytes]], workers: list[psutil.Process]) -> None:
    """Leave nobody behind, the workers of a killed agent neither."""
    for each in [*agents, *workers]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    for agent in agents:
        agent.wait(90)


def _wait_for(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 90
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, (folder / "log").read_text(errors="replace")[-6000:]
        time.sleep(0.05)


@needs_etcd
def test_workers_are_restarted_after_etcd_was(tmp_path: Path) -> None:
    with etcd_server(tmp_path / "etcd") as server:
        agents = [_agent(server, tmp_path, "2") for _ in range(2)]
        workers: list[psutil.Process] = []
        try:
            _wait_for(tmp_path, "round-0-rank-0", "round-0-rank-1")
            workers += [worker for each in agents for worker in psutil.Process(each.pid).children(recursive=True)]
            server.send(signal.SIGKILL)
            time.sleep(2)  # ten times a second an agent asks it
            server.start()
            (tmp_path / "go-on").touch()
            codes = [each.wait(90) for each in agents]
        finally:
            _end(agents, workers)
    assert codes == [0, 0], (tmp_path / "log").read_text(errors="replace")[-6000:]
    assert [(tmp_path / f"round-1-rank-{rank}").read_text() for rank in range(2)] == ["3 of 2"] * 2


@needs_etcd
def test_whoever_becomes_the_first_is_met_and_missed(tmp_path: Path) -> None:
    """Ranks go by address: the second agent becomes rank 0 when it joins, and is killed then."""
    with etcd_server(tmp_path / "etcd") as server:
        agents = [_agent(server, tmp_path, "1:2", "127.0.0.2")]
        workers: list[psutil.Process] = []
        try:
            _wait_for(tmp_path, "round-0-rank-0")
            assert (tmp_path / "round-0-rank-0").read_text() == "1 of 1"
            agents.append(_agent(server, tmp_path, "1:2", "127.0.0.1"))
            _wait_for(tmp_path, "round-0-rank-1")
            workers += [worker for each in agents for worker in psutil.Process(each.pid).children(recursive=True)]
            agents[1].kill()
            (tmp_path / "go-on").touch()
            code = agents[0].wait(90)
        finally:
            _end(agents, workers)
    assert code == 0, (tmp_path / "log").read_text(errors="replace")[-6000:]
    assert (tmp_path / "round-0-rank-1").read_text() == "3 of 2"
    assert (tmp_path / "round-1-rank-0").read_text() == "1 of 1"
