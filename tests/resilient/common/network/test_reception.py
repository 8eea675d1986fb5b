"""Who knows a secret is let in, whoever else connects, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.common.network.ports import listen
from resilient.common.network.reception import Reception

HOST = "127.0.0.1"
SECRET = b"a secret of these tests"
CALLER, OWN = b"caller", b"own"

Story = Callable[[int], Awaitable[None]]


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "a machine that is gone is found out"
    writer.write(b"welcome")


def play(story: Story, *, patience_s: float = 60.0) -> None:
    """Have a story happen at a port."""

    async def run() -> None:
        listening = listen(HOST, 0, "", 1024)
        port = listening.getsockname()[1]
        before = len(os.listdir("/proc/self/fd"))
        own = f"{HOST}:{port}"
        reception = Reception(SECRET, caller=CALLER, own=OWN, address=own, patience_s=patience_s, serve=greet)
        serving = reception.start(listening)
        await asyncio.wait_for(story(port), 60)
        serving.cancel()
        await asyncio.wait([serving])
        assert len(os.listdir("/proc/self/fd")) < before, "nothing is left open"

    asyncio.run(run())


def test_port_is_closed_though_nobody_was_served_yet() -> None:
    async def run() -> socket.socket:
        listening = listen(HOST, 0, "", 1024)
        reception = Reception(SECRET, caller=CALLER, own=OWN, address=HOST, patience_s=60.0, serve=greet)
        reception.start(listening).cancel()
        return listening

    assert asyncio.run(run()).fileno() == -1


async def enter(port: int, secret: bytes = SECRET, address: str = "") -> bytes:
    """Connect, as if the port was of another address if one is given; return what is heard of who is let in."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        theirs, ours = await reader.readexactly(NONCE_BYTES), nonce()
        said = theirs, ours, (address or f"{HOST}:{port}").encode()
        writer.write(ours + proof(secret, CALLER, *said))
        if not is_proof(await reader.readexactly(PROOF_BYTES), SECRET, OWN, *said):
            return b""
        return await reader.read()
    except (EOFError, ConnectionError):
        return b""
    finally:
        writer.close()
        await writer.wait_closed()


async def come_again(port: int) -> bytes:
    """As the job's own do where they are many, and slow."""
    while not (heard := await enter(port)):
        await asyncio.sleep(0.05)
    return heard


def test_only_who_knows_the_secret_is_let_in() -> None:
    async def story(port: int) -> None:
        assert await enter(port) == b"welcome"
        assert await enter(port, b"another") == b""
        assert await enter(port, address=f"{HOST}:1") == b"", "somebody passes on what came to another address"

    play(story)


def test_who_says_nothing_is_turned_away_when_its_time_is_over() -> None:
    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        assert len(await reader.read()) == NONCE_BYTES
        writer.close()
        await writer.wait_closed()

    play(story, patience_s=0.2)


def test_crowd_of_strangers_who_stay_keeps_nobody_out() -> None:
    async def story(port: int) -> None:
        crowd = [await asyncio.open_connection(HOST, port) for _ in range(300)]
        assert await come_again(port) == b"welcome"
        for reader, writer in crowd[:100]:
            assert len(await reader.read()) == NONCE_BYTES, "who came first went first"
            writer.close()
        for _, writer in crowd[100:]:
            writer.close()

    play(story)


def test_crowd_of_those_who_know_the_secret_is_let_in_as_it_comes() -> None:
    async def story(port: int) -> None:
        assert await asyncio.gather(*(come_again(port) for _ in range(300))) == [b"welcome"] * 300

    play(story)


def test_who_has_just_come_is_let_go_when_nobody_listens_any_more() -> None:
    async def story(port: int) -> None:
        for _ in range(10):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.close()

    play(story)
