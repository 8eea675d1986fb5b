"""A conversation over real connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web

from resilient.agent.network.conversation import GOODBYE, HEARD_EVERY, Connection, Conversation, Heard
from resilient.errors import ControlError
from resilient.protocol.messages import MAX_MESSAGE_BYTES, Leaving, encode

LIMIT_S = 60


class End:
    """One end, that remembers what it hears."""

    def __init__(self) -> None:
        self.conversation = Conversation[Leaving](Leaving)
        self.heard: list[int] = []
        self.wanted = asyncio.Condition()

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.conversation.say(encode(Leaving(reason=str(number))))

    async def carry(self, connection: Connection, num_heard_there: int) -> None:
        self.conversation.connect(connection)
        await self.conversation.carry(connection, num_heard_there, self._hear)

    async def has_heard(self, number: int) -> None:
        async with self.wanted:
            await self.wanted.wait_for(lambda: number in self.heard)

    async def _hear(self, message: Leaving) -> None:
        self.heard.append(int(message.reason))
        async with self.wanted:
            self.wanted.notify_all()


class Line:
    """Two ends in this process, and the connections between them."""

    def __init__(self) -> None:
        self.server, self.client = End(), End()
        self.url = ""
        self.sockets: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.codes: list[int | None] = []
        self.errors: list[Exception] = []

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        num_heard_there = int(request.query["num_heard"])
        self.server.conversation.connect(socket)
        await socket.send_str(str(self.server.conversation.num_heard))
        self.sockets.put_nowait(socket)
        try:
            await self.server.carry(socket, num_heard_there)
        except (msgspec.DecodeError, ControlError) as error:
            self.errors.append(error)
        self.codes.append(socket.close_code)
        await socket.close()
        return socket

    async def connect(self, session: aiohttp.ClientSession) -> asyncio.Task[None]:
        socket = await session.ws_connect(f"{self.url}?num_heard={self.client.conversation.num_heard}")
        return asyncio.create_task(self.client.carry(socket, int(await socket.receive_str())))


def play(scenario: Callable[[Line, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def run() -> None:
        line = Line()
        app = web.Application()
        app.add_routes([web.get("/", line.serve)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        line.url = "http://{}:{}/".format(*runner.addresses[0][:2])
        try:
            async with aiohttp.ClientSession() as session:
                await asyncio.wait_for(scenario(line, session), LIMIT_S)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def cut(socket: web.WebSocketResponse) -> None:
    """Break a connection: what is under way on it is lost."""
    transport = socket._req.transport if socket._req is not None else None
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


def test_all_is_heard_once_and_in_order_however_often_the_connection_breaks() -> None:
    async def scenario(line: Line, session: aiohttp.ClientSession) -> None:
        rounds, each = 8, HEARD_EVERY // 2 + 7
        for number in range(rounds):
            first = number * each
            talking = await line.connect(session)
            line.client.say(*range(first, first + each))
            line.server.say(*range(first, first + each))
            await line.server.has_heard(first + number)  # the more, the later: of the rest some is lost
            cut(await line.sockets.get())
            await talking
        talking = await line.connect(session)
        await line.server.has_heard(rounds * each - 1)
        await line.client.has_heard(rounds * each - 1)
        line.client.conversation.end()
        await talking
        assert line.client.heard == line.server.heard == list(range(rounds * each))
        for end in (line.client, line.server):
            assert len(end.conversation._said) < 2 * HEARD_EVERY, "what was heard is not kept"

    play(scenario)


def test_what_is_said_while_there_is_no_connection_is_said_on_the_next() -> None:
    async def scenario(line: Line, session: aiohttp.ClientSession) -> None:
        talking = await line.connect(session)
        cut(await line.sockets.get())
        await talking
        line.client.say(1, 2)
        line.server.say(3)
        talking = await line.connect(session)
        await line.server.has_heard(2)
        await line.client.has_heard(3)
        line.client.conversation.end()
        await talking

    play(scenario)


def test_new_connection_takes_the_place_of_one_that_seems_to_be_sound() -> None:
    async def scenario(line: Line, session: aiohttp.ClientSession) -> None:
        before = await session.ws_connect(f"{line.url}?num_heard=0")
        await line.sockets.get()
        talking = await line.connect(session)
        await line.sockets.get()
        await before.send_bytes(encode(Leaving(reason="7")))
        while (await before.receive()).type is not aiohttp.WSMsgType.CLOSE:
            pass
        line.client.say(8)
        await line.server.has_heard(8)
        assert line.server.heard == [8]
        line.client.conversation.end()
        await talking

    play(scenario)


def test_end_comes_after_all_that_was_said() -> None:
    async def scenario(line: Line, session: aiohttp.ClientSession) -> None:
        line.client.say(*range(1000))
        line.client.conversation.end()
        await (await line.connect(session))
        await line.server.has_heard(999)
        assert line.server.heard == list(range(1000))
        assert line.codes == [GOODBYE]

    play(scenario)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\xc1", "MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)"),
        (encode(Heard(num_messages=3)), "messages heard must be 0 to 2 of those said, got 3"),
    ],
)
def test_nonsense_is_told_and_counts_as_not_heard(data: bytes, told: str) -> None:
    async def scenario(line: Line, session: aiohttp.ClientSession) -> None:
        line.server.say(1, 2)
        socket = await session.ws_connect(f"{line.url}?num_heard=0")
        await socket.send_bytes(encode(Leaving(reason="1")))
        await socket.send_bytes(data)
        while (await socket.receive()).type is not aiohttp.WSMsgType.CLOSE:
            pass
        assert [str(error) for error in line.errors] == [told]
        assert line.server.conversation.num_heard == 1

    play(scenario)


def test_message_that_the_other_end_would_refuse_is_not_said() -> None:
    size = MAX_MESSAGE_BYTES + 1
    with pytest.raises(
        ControlError, match=rf"^a message must be at most {MAX_MESSAGE_BYTES} bytes, got {size}; send less at once$"
    ):
        Conversation[Leaving](Leaving).say(bytes(size))
