"""A coordinator that is served in the test's own process, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from resilient.agent.coordinator import Coordinator
from resilient.agent.journal.term import Term
from resilient.agent.leadership.knocking import session_for
from resilient.agent.network.conversation import Attached, Hello, decode_attached
from resilient.agent.network.dialect import SPOKEN, dialect
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FromAgentMessage,
    FromWorker,
    Ready,
    ToAgentMessage,
    Welcome,
    encode,
)
from tests.agent.membership.simulated import job_spec, settings

TOKEN = "secret"
decode_from_agent = msgspec.msgpack.Decoder(FromAgentMessage).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgentMessage).decode
HELLO = Hello(host="h", pid=1, num_workers=1)
LIMIT_S = 150
"""Somewhat less than a test may take: what was started is ended."""


class Served:
    """A coordinator and a client session that knows its token."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        told = settings(run_directory=str(folder), num_nodes=2, heartbeat_s=600.0)  # who does not read answers no ping
        self.coordinator = Coordinator(told, TOKEN, self.events.put_nowait, Term.claim(folder))
        self.session = session
        self.sockets: list[aiohttp.ClientWebSocketResponse[bool]] = []

    def url(self, path: str) -> str:
        return f"https://{self.coordinator.address}{path}"

    async def open(self) -> aiohttp.ClientWebSocketResponse[bool]:
        socket = await self.session.ws_connect(
            self.url("/agent"), headers={SPOKEN: dialect()}, max_msg_size=MAX_MESSAGE_BYTES
        )
        self.sockets.append(socket)
        return socket

    async def connect(self, **changes: Any) -> aiohttp.ClientWebSocketResponse[bool]:
        """Begin a conversation; changes are of what it says of itself."""
        socket = await self.open()
        await socket.send_bytes(encode(msgspec.structs.replace(HELLO, **changes)))
        assert decode_attached(await socket.receive_bytes()) == Attached(is_new=True, num_heard=0, term=1)
        welcome = decode_to_agent(await socket.receive_bytes())
        assert isinstance(welcome, Welcome)
        return socket

    async def resume(self, node: int, num_heard: int) -> aiohttp.ClientWebSocketResponse[bool]:
        """Go on with a conversation, of which nothing that this end said was heard."""
        socket = await self.open()
        await socket.send_bytes(encode(msgspec.structs.replace(HELLO, node=node, num_heard=num_heard)))
        assert decode_attached(await socket.receive_bytes()) == Attached(is_new=False, num_heard=0, term=1)
        return socket

    async def event(self, kind: str) -> dict[str, Any]:
        while (event := await self.events.get())["kind"] != kind:
            pass
        return event


def with_coordinator(folder: Path, scenario: Callable[[Served], Awaitable[None]]) -> None:
    async def play() -> None:
        async with session_for(TOKEN) as session:
            served = Served(folder, session)
            await served.coordinator.start("127.0.0.1", 0)
            try:
                await asyncio.wait_for(scenario(served), LIMIT_S)
            finally:
                for socket in served.sockets:
                    await socket.close()
                await served.coordinator.close()

    asyncio.run(play())


async def make_ready(served: Served, **changes: Any) -> None:
    """Have two nodes with a worker each that is up."""
    for _ in range(2):
        socket = await served.connect()
        ready = Ready(job=job_spec(**changes), store_address="h:1", pid=5, device="cpu")
        await socket.send_bytes(encode(FromWorker(local_rank=0, message=ready)))
