"""What strangers at the coordinator's port can do to it, over real connections: nothing, and they take little."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path

import pytest
from aiohttp import web

from resilient.agent import entrance
from resilient.agent.network.dialect import SPOKEN, dialect
from resilient.common.job_certificate import client_context, server_context
from tests.agent.served import LIMIT_S, TOKEN, Served, with_coordinator

LEAST_SHUTDOWN_S = 20.0
"""For longer than that asyncio waits for the other end of a TLS connection."""


def place(served: Served) -> tuple[str, int]:
    host, _, port = served.coordinator.address.rpartition(":")
    return host, int(port)


async def until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while await reader.read(1 << 16):
            pass


async def ask(served: Served) -> int:
    async with served.session.get(served.url("/status")) as answer:
        return answer.status


HANDSHAKE = (
    f"{SPOKEN}: {dialect()}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.parametrize(
    "said",
    [f"GET /agent HTTP/1.1\r\n{HANDSHAKE}", "POST /inject HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"],
    ids=["agent", "inject"],
)
def test_who_hangs_up_before_the_answer_leaves_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    request = said.replace("\r\n", f"\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n", 1).encode()

    async def scenario(served: Served) -> None:
        for _ in range(10):
            reader, writer = await asyncio.open_connection(*place(served), ssl=client_context(TOKEN))
            writer.write(request)
            writer.close()
            await until_closed(reader)

    with_coordinator(tmp_path, scenario)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("is_secured", [False, True])
@pytest.mark.parametrize("said", [b"", b"GET /status HTTP/1.1\r\nHost: x\r\nX: "])
def test_who_does_not_show_the_token_in_time_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_secured: bool, said: bytes
) -> None:
    monkeypatch.setattr(entrance, "PATIENCE_S", 0.5)

    async def scenario(served: Served) -> None:
        secured = client_context(TOKEN) if is_secured else None
        reader, writer = await asyncio.open_connection(*place(served), ssl=secured)
        writer.write(said)
        await until_closed(reader)
        writer.close()

    with_coordinator(tmp_path, scenario)


def test_who_has_shown_the_token_may_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "PATIENCE_S", 1.0)

    async def scenario(served: Served) -> None:
        agent = await served.connect()
        reader, writer = await asyncio.open_connection(*place(served))  # came later, and is turned away
        await until_closed(reader)
        writer.close()
        assert not agent.closed
        await agent.ping()
        assert await ask(served) == 200

    with_coordinator(tmp_path, scenario)


def test_a_crowd_of_strangers_keeps_nobody_out(tmp_path: Path) -> None:
    """More of them than this process may have files open, if all were let in at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario(served: Served) -> None:
        before = len(os.listdir("/proc/self/fd"))
        crowd = [await asyncio.open_connection(*place(served)) for _ in range(400)]
        assert len(os.listdir("/proc/self/fd")) - before - len(crowd) < entrance.STRANGERS_AT_ONCE + 20
        assert await asyncio.gather(*(ask(served) for _ in range(3))) == [200] * 3
        for reader, writer in crowd:
            await until_closed(reader)
            writer.close()

    try:
        with_coordinator(tmp_path, scenario)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_is_gone_leaves_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of TLS are 256 KiB each, and garbage in a circle may stay until a thousand more are there."""
    monkeypatch.setattr(entrance, "STRANGERS_AT_ONCE", 4)
    monkeypatch.setattr(entrance, "_LEAST_PATIENCE_S", 0.0)

    async def scenario() -> None:
        door = entrance.Entrance(web.Application(), server_context(TOKEN))
        address = await door.open("127.0.0.1", 0)
        for said in (b"", b"no TLS at all", b"\x16\x03\x01\x00"):
            crowd = [await asyncio.open_connection(*address) for _ in range(12)]
            for reader, writer in crowd[:8]:
                writer.write(said)
                await until_closed(reader)
            for _, writer in crowd:
                writer.close()
        while num_buffers() - before > 4:
            await asyncio.sleep(0.01)
        await door.close()

    def num_buffers() -> int:
        return sum(type(each) is SSLProtocol for each in gc.get_objects())

    gc.collect()
    before = num_buffers()  # of what other tests have left in this process
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        gc.enable()


def test_entrance_closes_at_once_though_a_peer_does_not_answer_that_tls_ends() -> None:
    """asyncio lets go of a connection that is closed twice in order, and cannot abort it any more."""

    async def answer(request: web.Request) -> web.StreamResponse:
        door.admit(request)
        assert request.transport is not None
        request.transport.close()
        request.transport.close()
        told.set()
        await asyncio.sleep(LIMIT_S)
        return web.Response()

    async def scenario() -> None:
        address = await door.open("127.0.0.1", 0)
        with await asyncio.to_thread(say, address):
            await told.wait()
            await asyncio.wait_for(door.close(), LEAST_SHUTDOWN_S)

    def say(address: tuple[str, int]) -> ssl.SSLSocket:
        silent = client_context(TOKEN).wrap_socket(socket.create_connection(address))
        silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return silent

    told = asyncio.Event()
    app = web.Application()
    app.router.add_get("/", answer)
    door = entrance.Entrance(app, server_context(TOKEN))
    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_wait_for_room_ends_when_it_is_cancelled_whenever_that_comes(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """As room is made, too, so many turns of the loop after it: ``asyncio.wait_for`` would lose that on Python 3.11."""
    monkeypatch.setattr(entrance, "STRANGERS_AT_ONCE", 1)

    async def scenario() -> None:
        door = entrance.Entrance(web.Application(), server_context(TOKEN))
        _, writer = await asyncio.open_connection(*await door.open("127.0.0.1", 0))
        accepting = door._accepting
        assert accepting is not None
        while not door._strangers:
            await asyncio.sleep(0)
        for _ in range(5):  # until it waits for this one to go
            await asyncio.sleep(0)
        door._fewer.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        accepting.cancel()
        ended, _ = await asyncio.wait([accepting], timeout=LIMIT_S)
        assert ended
        await door.close()
        writer.close()

    asyncio.run(scenario())


def test_garbage_is_told_of_in_a_line_or_two(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    garbage = (
        b"\x16\x03\x01\x00" + os.urandom(200),
        b"GET / HTTP/9\r\n : \r\n\r\n" * 50,
        b"POST /stop HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nno gz",
        b"POST /stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: \x80\r\n\r\n",
    )

    async def say(served: Served, number: int) -> None:
        secured = client_context(TOKEN) if number % 2 else None
        reader, writer = await asyncio.open_connection(*place(served), ssl=secured)
        writer.write(garbage[number // 2 % len(garbage)])
        await until_closed(reader)
        writer.close()

    async def scenario(served: Served) -> None:
        for first in range(0, 80, 10):
            await asyncio.gather(*(say(served, number) for number in range(first, first + 10)))
        assert await ask(served) == 200

    with_coordinator(tmp_path, scenario)
    assert "Traceback" not in caplog.text
    assert 0 < len(caplog.records) < 6


def test_health_is_told_to_strangers_who_go_then(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        reader, writer = await asyncio.open_connection(*place(served), ssl=client_context(TOKEN))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"ok")
        writer.close()

    with_coordinator(tmp_path, scenario)
