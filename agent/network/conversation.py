"""A conversation that outlives its connections: all that is said arrives, in order and once.

Messages are counted, not numbered: a connection keeps their order, and begins with how many each end has heard. So each
end knows what the other one lacks, and says that first. Only what a machine's load is (:class:`Health`) is said in
passing: it counts as none, and nobody says it again. Used by both ends of an agent's WebSocket. Must not import
torch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from resilient.agent.network.introductions import Introduce, Port
from resilient.errors import ControlError
from resilient.protocol.alike import Alike
from resilient.protocol.messages import MAX_MESSAGE_BYTES, Health, Shutdown, encode

GOODBYE = 4000
"""Code of a WebSocket that is closed because the conversation is over, and not to be continued on another one."""

HEARD_EVERY = 64
"""Messages after which the other end is told that it need not keep them."""

_MOST_WORKERS = 1024
"""On one machine."""

_Message = TypeVar("_Message")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an agent says first on each of its connections.

    Args:
        node: Its number before, when it comes back.
        key: By which alone it is known when it comes back; it tells nobody but the coordinator.
        num_heard: Messages it has heard of the conversation that it goes on with; 0 to begin anew.
        domain: What the node fails together with (a zone, a rack); "" when it is not known.
        alike: What must be equal on all nodes, as it is on this one.
        is_guest: Somebody else than the launcher of the job has started it.
        term: The highest of a coordinator that it has spoken to (:mod:`resilient.agent.journal.term`).
        address: Where this machine is reached by the others, as a host; "" where nobody need try.
        bell_port: Where its doorbell is there (:mod:`resilient.agent.network.doorbell`); 0 while it has none.
        is_chosen: Somebody has chosen the address: it need not be the one that the coordinator sees.
    """

    host: str
    pid: int
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=_MOST_WORKERS)]
    key: str = ""
    node: int | None = None
    num_heard: int = 0
    domain: str = ""
    alike: Alike = msgspec.field(default_factory=Alike)
    is_guest: bool = False
    term: int = 0
    address: str = ""
    bell_port: Port = 0
    is_chosen: bool = False


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The coordinator's answer to :class:`Hello`: a conversation begins, or goes on.

    Args:
        is_new: It begins, with a ``Welcome``; of what was said before nothing is known any more.
        num_heard: Messages the coordinator has heard of it.
        term: The coordinator's; all that is said over this connection is said in it.
    """

    is_new: bool
    num_heard: int
    term: int = 0


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many messages were heard; said between them, it counts as none."""

    num_messages: int


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_attached = msgspec.msgpack.Decoder(Attached).decode
decode_first_answer = msgspec.msgpack.Decoder(Attached | Introduce | Shutdown).decode
"""Of what may follow a ``Hello``: first of all what the node is to show, or why it is refused."""

Connection: TypeAlias = "web.WebSocketResponse | aiohttp.ClientWebSocketResponse[bool]"


class Conversation(Generic[_Message]):
    """One end of it.

    Args:
        messages: The union of what the other end may say.
        num_heard: So many of them were heard by whoever held this end before.
        keep: Called before the other end is told what it need not keep: what was heard must not be lost from then on.
        decode: Reads one of them, or :class:`Heard`; None for the usual way.
    """

    def __init__(
        self,
        messages: Any,
        *,
        num_heard: int = 0,
        keep: Callable[[], None] = lambda: None,
        decode: Callable[[bytes], _Message | Heard] | None = None,
    ) -> None:
        self._decode: Callable[[bytes], _Message | Heard] = decode or msgspec.msgpack.Decoder(messages | Heard).decode
        self._num_heard = num_heard
        self._keep = keep
        self._said: deque[bytes] = deque()  # what the other end may not have heard
        self._num_heard_there = 0
        self._more = asyncio.Event()
        self._connection: Connection | None = None
        self._is_over = False

    @property
    def num_heard(self) -> int:
        """How many messages were heard."""
        return self._num_heard

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be said."""
        return self._is_over

    def say(self, message: bytes) -> None:
        """Have a message sent, over this connection or a later one.

        Raises:
            ControlError: It is larger than the other end takes.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            size = len(message)
            raise ControlError(f"a message must be at most {MAX_MESSAGE_BYTES} bytes, got {size}; send less at once")
        self._said.append(message)
        self._more.set()

    def end(self) -> None:
        """Close the connection once all is sent."""
        self._is_over = True
        self._more.set()

    def connect(self, connection: Connection) -> None:
        """Go over to this connection: nothing more is heard of an earlier one."""
        self._connection = connection

    async def carry(
        self, connection: Connection, num_heard_there: int, hear: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Talk until the connection ends, or another one takes its place.

        Args:
            connection: The one of :meth:`connect`.
            num_heard_there: How many messages the other end had heard when it began.
            hear: Called with each message.

        Raises:
            msgspec.DecodeError: What came is no message, and counts as not heard. Close the connection.
            ControlError: The other end has heard what was never said. Close the connection.
        """
        self._forget(num_heard_there)
        writing = asyncio.create_task(self._write(connection))
        try:
            async for packet in connection:
                if packet.type is not aiohttp.WSMsgType.BINARY or self._connection is not connection:
                    return
                message = self._decode(packet.data)
                if isinstance(message, Heard):
                    self._forget(message.num_messages)
                    continue
                if not isinstance(message, Health):
                    self._num_heard += 1
                    if self._num_heard % HEARD_EVERY == 0:
                        self._more.set()
                await hear(message)
        except (aiohttp.ClientError, ConnectionError):  # answering a ping can find the connection broken
            return
        finally:
            if not self._is_over:  # otherwise it is what ends the connection
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, connection: Connection) -> None:
        position, told = self._num_heard_there, self._num_heard
        while True:
            self._more.clear()
            while position < self._num_heard_there + len(self._said):
                await connection.send_bytes(self._said[position - self._num_heard_there])
                position += 1
            if self._num_heard - told >= HEARD_EVERY:
                told = self._num_heard
                self._keep()
                await connection.send_bytes(encode(Heard(num_messages=told)))
            if self._is_over:
                await connection.close(code=GOODBYE)
                return
            await self._more.wait()

    def _forget(self, num_heard_there: int) -> None:
        """Keep nothing that was heard."""
        newly_heard = num_heard_there - self._num_heard_there
        if not 0 <= newly_heard <= len(self._said):
            least, most = self._num_heard_there, self._num_heard_there + len(self._said)
            raise ControlError(f"messages heard must be {least} to {most} of those said, got {num_heard_there}")
        for _ in range(newly_heard):
            self._said.popleft()
        self._num_heard_there = num_heard_there
