"""A node's workers as their agent sees them; with real processes, see ``test_node.py``."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from resilient.agent.workers import WorkerPool, WorkersPlace
from resilient.protocol.agent_client import Attach, frame, socket_address
from resilient.protocol.messages import FromWorker, Note, Welcome, encode

NOTE = Note(name="pid", value=4711)


@contextmanager
def make_pool(send: Callable[[FromWorker], None]) -> Iterator[tuple[WorkerPool, Welcome]]:
    """Return the pool of one worker, and what it starts workers with."""
    with tempfile.TemporaryDirectory() as folder:
        welcome = Welcome(
            node=0, script="job.py", arguments=(), directory=folder, run_directory=folder, heartbeat_s=5.0
        )
        yield WorkerPool("", num_workers=1, send=send, on_exit=Mock()), welcome


async def attach(spawner: Mock) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as the worker that was started last."""
    environment = spawner.spawn.call_args.args[0].env
    reader, writer = await asyncio.open_unix_connection(socket_address(environment["RESILIENT_AGENT"]))
    writer.write(
        frame(encode(Attach(token=environment["RESILIENT_TOKEN"], local_rank=0)), 999) + frame(encode(NOTE), 999)
    )
    return reader, writer


def test_worker_that_speaks_before_its_start_is_confirmed_is_running() -> None:
    async def play() -> None:
        heard: asyncio.Queue[FromWorker] = asyncio.Queue()
        confirmed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with make_pool(heard.put_nowait) as (pool, welcome):
            await pool.listen()
            spawner = Mock(spawn=Mock(return_value=confirmed))
            starting = asyncio.create_task(pool.start(spawner, welcome))
            await asyncio.sleep(0)
            assert not pool.is_running
            _, worker = await attach(spawner)
            assert (await heard.get()).message == NOTE
            assert pool.is_running
            confirmed.set_result(4711)
            await starting
            assert pool.is_running
            worker.close()
            await pool.close()

    asyncio.run(play())


def test_connection_of_a_worker_that_was_killed_is_not_taken_for_that_of_the_next() -> None:
    """It may be accepted late, from a worker that died while its agent stood still."""

    async def play() -> None:
        heard: asyncio.Queue[FromWorker] = asyncio.Queue()
        with make_pool(heard.put_nowait) as (pool, welcome):
            await pool.listen()
            spawner = Mock(spawn=AsyncMock(return_value=4711))
            await pool.start(spawner, welcome)
            pool.kill(spawner)
            reader, killed = await attach(spawner)
            assert await reader.read() == b""
            await pool.start(spawner, welcome)
            _, worker = await attach(spawner)
            assert (await heard.get()).message == NOTE
            for writer in (killed, worker):
                writer.close()
            await pool.close()

    asyncio.run(play())


def test_process_of_another_user_is_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        with make_pool(Mock()) as (pool, welcome):
            await pool.listen()
            spawner = Mock(spawn=AsyncMock(return_value=4711))
            await pool.start(spawner, welcome)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            name = spawner.spawn.call_args.args[0].env["RESILIENT_AGENT"]
            for _ in range(50):
                reader, worker = await asyncio.open_unix_connection(socket_address(name))
                assert await reader.read() == b""
                worker.close()
            await pool.close()

    asyncio.run(play())
    assert [record.getMessage() for record in caplog.records if record.name == "resilient.agent.workers"] == [
        f"closed a connection of user {os.getuid()}: a worker must be of the agent's own user"
    ]


def test_logs_are_for_their_owner_alone_where_the_runs_folder_is_not_that_of_the_launcher(tmp_path: Path) -> None:
    async def play() -> None:
        with make_pool(Mock()) as (pool, welcome):
            here = msgspec.structs.replace(welcome, run_directory=str(tmp_path / "runs" / "one"))
            await pool.start(Mock(spawn=AsyncMock(return_value=4711)), here)

    asyncio.run(play())
    assert stat.S_IMODE((tmp_path / "runs/one/logs/node-0").stat().st_mode) == 0o700


def test_workers_have_the_names_that_users_of_torchrun_know() -> None:
    async def play() -> dict[str, str]:
        with make_pool(Mock()) as (pool, welcome):
            pool.told = WorkersPlace(host="10.0.0.7", ports="30000:30100", coordinator="10.0.0.1")
            spawner = Mock(spawn=AsyncMock(return_value=4711))
            await pool.start(spawner, msgspec.structs.replace(welcome, node=2, num_nodes=4, tp_chunks=3))
            return spawner.spawn.call_args.args[0].env

    told = asyncio.run(play())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [told[name] for name in names] == ["2", "0", "4", "1", "2", "10.0.0.1"]
    assert (told["RESILIENT_HOST"], told["RESILIENT_PORT_RANGE"]) == ("10.0.0.7", "30000:30100")
    assert told["RESILIENT_TP_CHUNKS"] == "3"
