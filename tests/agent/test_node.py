"""A node agent with real workers and a coordinator that this test plays."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from aiohttp import WSMsgType, web

from resilient.agent.membership.next_generation.members import log_path
from resilient.agent.membership.parts.context import EXIT_RESUMABLE
from resilient.agent.membership.parts.events import StopWanted
from resilient.agent.network.conversation import GOODBYE, Attached, Hello, decode_hello
from resilient.agent.node import NodeAgent, NodeOptions
from resilient.common.job_certificate import server_context
from resilient.common.processes import command_for
from resilient.protocol.messages import (
    FromAgentMessage,
    FromWorker,
    Health,
    Injection,
    Kill,
    Leaving,
    Note,
    Regroup,
    ShowStacks,
    Shutdown,
    ToAgentMessage,
    ToWorkers,
    Welcome,
    WorkerExited,
    encode,
)
from tests.agent.logged_job import LoggedJob
from tests.agent.served import decode_from_agent
from tests.processes import has_ended

LIMIT_S = 150
"""Somewhat less than a test may take: what was started is ended."""

# Says its number, then repeats the generations it is asked to enter.
_SCRIPT = """
import os
from resilient.protocol.agent_client import AgentClient
from resilient.protocol.messages import Note
client = AgentClient.from_environment()
client.send(Note(name="pid", value=os.getpid()))
while True:
    client.send(Note(name="generation", value=client.receive().generation))
"""


class Coordinator:
    """The test's end of the agent's connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connections: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.done = asyncio.Event()
        self.site: web.TCPSite | None = None
        self.orphan_s = 600.0
        (folder / "script.py").write_text(_SCRIPT)

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await self.connections.put(connection)
        await self.done.wait()
        return connection

    async def stop_listening(self) -> None:
        assert self.site is not None
        await self.site.stop()

    async def accept(self, node: int) -> tuple[web.WebSocketResponse, Hello]:
        connection = await self.connections.get()
        hello = decode_hello(await connection.receive_bytes())
        welcome = Welcome(
            node=node,
            script=str(self.folder / "script.py"),
            arguments=(),
            directory=str(self.folder),
            run_directory=str(self.folder),
            heartbeat_s=5.0,
            orphan_s=self.orphan_s,
        )
        await connection.send_bytes(encode(Attached(is_new=True, num_heard=0)))
        await self.tell(connection, welcome)
        return connection, hello

    @staticmethod
    async def tell(connection: web.WebSocketResponse, message: ToAgentMessage) -> None:
        await connection.send_bytes(encode(message))

    @staticmethod
    async def hear(connection: web.WebSocketResponse) -> FromAgentMessage:
        while isinstance(message := decode_from_agent(await connection.receive_bytes()), Health):
            pass
        return message

    async def note(self, connection: web.WebSocketResponse) -> float | int | str:
        message = await self.hear(connection)
        assert isinstance(message, FromWorker)
        assert isinstance(message.message, Note)
        return message.message.value

    async def worker(self, connection: web.WebSocketResponse) -> psutil.Process:
        """Return the worker that says its number."""
        return psutil.Process(int(await self.note(connection)))


def play(
    folder: Path,
    scenario: Callable[[Coordinator], Awaitable[None]],
    exit_code: int,
    *,
    connect_timeout_s: float = 60.0,
) -> None:
    async def run() -> int:
        coordinator = Coordinator(folder)
        app = web.Application()
        app.add_routes([web.get("/agent", coordinator.serve)])
        runner = web.AppRunner(app)
        await runner.setup()
        coordinator.site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context("t"))
        await coordinator.site.start()
        (address,) = runner.addresses
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = command_for(
            "resilient.protocol.forkserver", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())
        )
        forkserver = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        theirs.close()
        host, port = address[:2]
        options = NodeOptions(
            coordinator=f"{host}:{port}",
            token="t",
            spawner_fd=ours.detach(),
            max_restarts=1,
            connect_timeout_s=connect_timeout_s,
            domain="zone-a",
        )

        async def act() -> None:
            await scenario(coordinator)
            coordinator.done.set()  # the agent's goodbye is answered

        try:
            ended, _ = await asyncio.wait_for(asyncio.gather(NodeAgent(options).run(), act()), LIMIT_S)
            return ended
        finally:
            coordinator.done.set()
            await runner.cleanup()
            await forkserver.wait()

    assert asyncio.run(run()) == exit_code


def test_messages_are_relayed_both_ways_until_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def scenario(coordinator: Coordinator) -> None:
        connection, hello = await coordinator.accept(node=0)
        assert (hello.pid, hello.num_workers, hello.node, hello.domain) == (os.getpid(), 1, None, "zone-a")
        worker = await coordinator.worker(connection)
        await coordinator.tell(connection, ToWorkers(message=Regroup(generation=7)))
        assert await coordinator.note(connection) == 7
        assert list(temporary.iterdir()) == [], "who is killed could not remove it"
        await coordinator.tell(connection, Shutdown(exit_code=3, reason="too few nodes"))
        while not has_ended(worker):
            await asyncio.sleep(0.01)

    play(tmp_path, scenario, 3)


def test_workers_go_on_without_a_coordinator_and_are_fenced_off_when_it_is_back(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        connection, _ = await coordinator.accept(node=0)
        worker = await coordinator.worker(connection)
        await connection.close()
        again = await coordinator.connections.get()
        hello = decode_hello(await again.receive_bytes())
        assert (hello.node, hello.num_heard) == (0, 1)
        assert not has_ended(worker)
        await again.close()
        connection, _ = await coordinator.accept(node=4)
        assert await coordinator.worker(connection) != worker
        while not has_ended(worker):
            await asyncio.sleep(0.01)
        await coordinator.tell(connection, Shutdown(exit_code=0, reason="done"))

    play(tmp_path, scenario, 0)


def test_node_without_a_coordinator_that_cannot_end_its_job_ends_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        coordinator.orphan_s = 0.1
        connection, _ = await coordinator.accept(node=0)
        worker = await coordinator.worker(connection)
        await coordinator.stop_listening()
        await connection.close()
        while not has_ended(worker):
            await asyncio.sleep(0.01)

    play(tmp_path, scenario, 3, connect_timeout_s=0.1)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert re.fullmatch(r"node 0: a coordinator must listen at \S+, got no answer for \d+ s .*", record.getMessage())


@pytest.mark.parametrize(("exit_code", "of_node"), [(0, 1), (EXIT_RESUMABLE, EXIT_RESUMABLE)])
def test_node_that_was_cut_off_ends_at_once_when_its_job_has_ended_without_it(
    exit_code: int, of_node: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the job has ended; nothing is done by a node that was not there."""

    async def scenario(coordinator: Coordinator) -> None:
        coordinator.orphan_s = 0.1
        connection, _ = await coordinator.accept(node=0)
        worker = await coordinator.worker(connection)
        job = LoggedJob(tmp_path, run_directory=str(tmp_path))
        job.start()
        job.feed(StopWanted(exit_code=exit_code, reason="enough"))
        job.leave()
        office = {"address": "127.0.0.1:1", "token": "t", "pid": 1, "term": 1}  # nobody listens there
        (tmp_path / "job.json").write_text(json.dumps(office))
        await coordinator.stop_listening()
        await connection.close()
        while not has_ended(worker):
            await asyncio.sleep(0.01)

    play(tmp_path, scenario, of_node)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    told = "node 0: its job is over (enough; start again with: resilient run "
    assert record.getMessage().startswith(told)


def test_worker_that_does_not_answer_shows_in_its_log_where_it_hangs(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        connection, _ = await coordinator.accept(node=0)
        await coordinator.note(connection)
        await coordinator.tell(connection, ShowStacks(local_rank=0))
        log = log_path(str(tmp_path), (0, 0))
        while f'File "{tmp_path / "script.py"}", line' not in log.read_text():
            await asyncio.sleep(0.01)
        await coordinator.tell(connection, Shutdown(exit_code=1, reason="evicted"))

    play(tmp_path, scenario, 1)


def test_killed_worker_is_reported_and_the_node_comes_back_as_often_as_it_may(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        for node in range(2):
            connection, hello = await coordinator.accept(node)
            assert hello.node == (None if node == 0 else 0)
            await coordinator.worker(connection)
            for worker in (1, 0):  # of the second there is none
                killed = Injection(node=node, worker_only=True, worker=worker)
                await coordinator.tell(connection, Kill(injection=killed))
            exited = await coordinator.hear(connection)
            assert exited == WorkerExited(local_rank=0, exit_code=-9)
            closing = await connection.receive()
            assert (closing.type, closing.data) == (WSMsgType.CLOSE, GOODBYE)

    play(tmp_path, scenario, 1)
    caused = [json.loads(line) for line in (tmp_path / "injections.jsonl").read_text().splitlines()]
    assert [(each["node"], each["worker"]) for each in caused] == [(0, 0), (1, 0)]


def test_error_of_the_script_is_reported_with_where_its_traceback_is(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        (tmp_path / "script.py").write_text("undefined_name")
        connection, _ = await coordinator.accept(node=0)
        exited = await coordinator.hear(connection)
        log = log_path(str(tmp_path), (0, 0))
        error = f"NameError: name 'undefined_name' is not defined (the traceback is in {log})"
        assert exited == WorkerExited(local_rank=0, exit_code=1, error=error)
        assert f'File "{tmp_path / "script.py"}", line 1' in log.read_text()
        await coordinator.tell(connection, Shutdown(exit_code=1, reason="the script failed"))

    play(tmp_path, scenario, 1)


def test_leaving_node_that_was_counted_as_lost_ends(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        connection, _ = await coordinator.accept(node=0)
        await coordinator.note(connection)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await coordinator.hear(connection) == Leaving(reason="SIGTERM")
        await connection.close()
        again = await coordinator.connections.get()
        await again.send_bytes(encode(Attached(is_new=True, num_heard=0)))

    play(tmp_path, scenario, 1)


def test_sigterm_announces_the_departure(tmp_path: Path) -> None:
    async def scenario(coordinator: Coordinator) -> None:
        connection, _ = await coordinator.accept(node=0)
        await coordinator.note(connection)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await coordinator.hear(connection) == Leaving(reason="SIGTERM")
        await coordinator.tell(connection, Shutdown(exit_code=0, reason="left"))

    play(tmp_path, scenario, 0)
