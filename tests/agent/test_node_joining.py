"""What a node agent says where it cannot take part."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from resilient.agent.network.conversation import Attached
from resilient.agent.node import NodeAgent, NodeOptions
from resilient.common.job_certificate import server_context
from resilient.common.printable import printable
from resilient.protocol.messages import Health, Shutdown, Welcome, WorkerExited, encode
from tests.agent.served import decode_from_agent


@pytest.fixture
def silent_address() -> Iterator[str]:
    """An address whose port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield "127.0.0.1:{1}".format(*taken.getsockname())


@asynccontextmanager
async def coordinator(
    serve: Callable[[web.Request], Awaitable[web.WebSocketResponse]],
) -> AsyncIterator[str]:
    """Have somebody who knows the token answer agents as is said; yield the address."""
    app = web.Application()
    app.add_routes([web.get("/agent", serve)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context("t")).start()
    try:
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


def test_address_where_nobody_answers_is_named_at_once_and_at_the_end(
    silent_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = NodeOptions(coordinator=silent_address, token="t", connect_timeout_s=0.01)
    with caplog.at_level(logging.WARNING, "resilient.agent"):
        assert asyncio.run(NodeAgent(options).run()) == 1
    first, last = (record.getMessage() for record in caplog.records if record.name.startswith("resilient.agent."))
    assert re.fullmatch(rf"no coordinator answers at {silent_address} \(.*\); trying for 0\.01 s", first)
    assert re.fullmatch(
        rf"this node: a coordinator must listen at {silent_address}, got no answer for 0\.01 s \(.*\); check that its "
        r"job runs, was started with --host and --port of this address, and can be reached from here",
        last,
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [("script", "the script must .* no file"), ("directory", "the working folder must .* no folder")],
)
def test_machine_that_lacks_what_the_job_needs_says_so(name: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    paths = {"script": tmp_path / "script.py", "directory": tmp_path, name: tmp_path / "elsewhere"}
    heard: list[WorkerExited] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive_bytes()
        welcome = Welcome(
            node=3,
            script=str(paths["script"]),
            directory=str(paths["directory"]),
            arguments=(),
            run_directory=str(tmp_path),
            heartbeat_s=5.0,
            orphan_s=0.1,
        )
        await connection.send_bytes(encode(Attached(is_new=True, num_heard=0)))
        await connection.send_bytes(encode(welcome))
        while isinstance(message := decode_from_agent(await connection.receive_bytes()), Health):
            pass
        assert isinstance(message, WorkerExited)
        heard.append(message)
        await connection.send_bytes(encode(Shutdown(exit_code=1, reason="cannot join")))
        return connection

    async def play() -> int:
        async with coordinator(serve) as address:
            return await NodeAgent(NodeOptions(coordinator=address, token="t")).run()

    assert asyncio.run(play()) == 1
    (exited,) = heard
    assert exited.exit_code == 1
    where = rf"at the same path on every node, got {{}} {tmp_path}/elsewhere on {socket.gethostname()}; copy it there"
    subject, _, what = missing.partition(" must .* ")
    assert re.fullmatch(f"{subject} must be " + where.format(what), exited.error)


def test_what_others_have_the_coordinator_say_moves_no_cursor_here(tmp_path: Path) -> None:
    """As when a worker of another node has failed with codes for the terminal in its error."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive_bytes()
        await connection.send_bytes(encode(Attached(is_new=True, num_heard=0)))
        await connection.send_bytes(encode(Shutdown(exit_code=1, reason="node 1: \x1b]0;mine\x07\x9b2J")))
        await connection.receive()
        return connection

    async def play() -> str:
        async with coordinator(serve) as address:
            program = "from resilient.cli.app import app; app()"
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", program, "agent", "--join", address),
                env={**os.environ, "RESILIENT_TOKEN": "t"},
                cwd=tmp_path,
                stderr=subprocess.PIPE,
            )
            _, told = await asyncio.wait_for(agent.communicate(), 60)
            return told.decode()

    told = asyncio.run(play())
    assert told.endswith(" INFO this node: node 1: \\x1b]0;mine\\x07\\x9b2J\n")
    assert printable(told) == told


def test_node_whose_coordinator_is_gone_while_the_script_is_imported_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its forkserver answers nothing until it has imported what the script does."""
    (tmp_path / "script.py").touch()
    importing, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    imports = asyncio.Event()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive_bytes()
        welcome = Welcome(
            node=3,
            script=str(tmp_path / "script.py"),
            directory=str(tmp_path),
            arguments=(),
            run_directory=str(tmp_path),
            heartbeat_s=5.0,
            orphan_s=0.1,
        )
        await connection.send_bytes(encode(Attached(is_new=True, num_heard=0)))
        await connection.send_bytes(encode(welcome))
        await asyncio.get_running_loop().sock_recv(importing, 1 << 20)  # the worker that is wanted
        imports.set()
        return connection

    async def play() -> int:
        importing.setblocking(False)
        async with coordinator(serve) as address:
            options = NodeOptions(coordinator=address, token="t", spawner_fd=ours.detach(), connect_timeout_s=0.1)
            agent = asyncio.create_task(NodeAgent(options).run())
            await imports.wait()
        return await asyncio.wait_for(agent, 60)

    with importing:
        assert asyncio.run(play()) == 3
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert re.fullmatch(r"node 3: a coordinator must listen at \S+, got no answer for \d+ s .*", record.getMessage())


def test_coordinator_that_goes_as_it_opens_is_looked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """As one does that wakes up and finds that another leads the job: agents have knocked meanwhile."""
    opened: list[web.WebSocketResponse] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        opened.append(connection)
        if len(opened) == 1:
            assert request.transport is not None
            request.transport.close()
        else:
            await connection.receive_bytes()
            await connection.send_bytes(encode(Attached(is_new=True, num_heard=0)))
            await connection.send_bytes(encode(Shutdown(exit_code=1, reason="that was all")))
            await connection.receive()
        return connection

    async def play() -> int:
        async with coordinator(serve) as address:
            return await NodeAgent(NodeOptions(coordinator=address, token="t", heartbeat_s=0.4)).run()

    with caplog.at_level(logging.INFO, "resilient.agent"):
        assert asyncio.run(play()) == 1
    assert len(opened) == 2
    assert [record.getMessage() for record in caplog.records if record.name == "resilient.agent.node"] == [
        "this node: that was all"
    ]
