"""Strangers at every port of a job, by the hundred, while it trains and loses a node."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.harness import Run, Started, check_recovered, run_job, started

NODES = 5
COORDINATORS, OTHERS = 1500, 60
"""Connections that are kept at the coordinator's port, and at each other one."""

MOST_SAID = 100_000
"""Bytes of all logs together: strangers are told of in a line now and then."""

Address = tuple[str, int]
Stranger = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte of a request's headers now and then, for ever."""
    writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nX: ")
    while not reader.at_eof():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(16):
        writer.write(os.urandom(4096))
        await writer.drain()
    await reader.read()


class Crowd:
    """Comes again whenever it is sent away."""

    def __init__(self, ports: dict[Address, int]) -> None:
        self.num_came = 0
        self._ports = ports
        self._is_over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._gather(),))

    @contextmanager
    def there(self) -> Iterator[None]:
        """Be there while the block lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join()
            self._loop.close()

    async def _gather(self) -> None:
        ways: tuple[Stranger, ...] = (*(idle,) * 8, dribble, shout)
        everybody = [
            asyncio.ensure_future(self._come(address, ways[number % len(ways)]))
            for address, count in self._ports.items()
            for number in range(count)
        ]
        await self._is_over.wait()
        for each in everybody:
            each.cancel()
        await asyncio.gather(*everybody, return_exceptions=True)

    async def _come(self, address: Address, way: Stranger) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(*address)
                self.num_came += 1
                await way(reader, writer)
            except OSError:
                pass
            finally:
                if writer is not None:
                    writer.transport.abort()
            await asyncio.sleep(0.2)


@pytest.fixture
def many_files() -> Iterator[None]:
    """The strangers' own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def listening(job: Started) -> dict[Address, int]:
    """Return where processes of a job listen, and how many strangers are to come there."""
    launcher = psutil.Process(job.popen.pid)
    found: dict[Address, int] = {}
    for process in (launcher, *launcher.children(recursive=True)):
        for end in process.net_connections("tcp"):
            if end.status == psutil.CONN_LISTEN:
                found[end.laddr.ip, end.laddr.port] = COORDINATORS if process == launcher else OTHERS
    return found


@pytest.mark.usefixtures("many_files")
def test_strangers_at_all_ports_cost_a_job_nothing(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", nodes=NODES)
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 4, "--gate", gate, nodes=NODES) as job:
        job.wait_for_step(3)
        agents = {event["node"]: event["pid"] for event in Run(job.directory, 0).of_kind("node_connected")}
        crowd = Crowd(listening(job))
        with crowd.there():
            while crowd.num_came < COORDINATORS:
                assert job.popen.poll() is None, job.output
                time.sleep(0.02)
            psutil.Process(agents[1]).kill()
            job.wait_for(lambda event: event["kind"] == "node_lost" and event["node"] == 1)
            gate.touch()
            run = job.wait()
    check_recovered(run, reference)
    assert run.of_kind("node_lost") == [event for event in run.of_kind("node_lost") if event["node"] == 1]
    said = sum(path.stat().st_size for path in (tmp_path / "run").glob("logs/**/*.log"))
    assert said + len(job.output) < MOST_SAID, job.output[-2000:]
