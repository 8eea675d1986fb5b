"""The messages between two ranks, and the frames in which they travel.

What is long is sent once its receiver waits for it, and lands where that wants it; what is short is sent at once, and
waits there until it is wanted. All but what waits for a message runs in the thread of an event loop.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch
from torch import Tensor

from resilient.errors import CommunicationError

_HEADER = struct.Struct("!BQQ")
"""Of a frame: what it is, the message's tag and its bytes."""
_DATA, _WANTED = range(2)
_SHORT_BYTES = 1 << 15
"""The longest message that is sent before anybody waits for it."""
_READS_AT_ONCE = 16
"""After which it is the turn of other connections."""
ENDED = "the generation was aborted"

Item = TypeVar("Item")


class BrokenError(Exception):
    """A connection is of no more use; the text says why."""


class ChannelMessage:
    """One message at one of its ends.

    Args:
        peer: Rank at the other end.
        tag: Tells it from others between these ranks.
        tensor: Contiguous, in host memory.
        timeout_s: Last resort for a wait that nothing else ends.
        is_sent: Whether this is the end that sends.
    """

    def __init__(self, peer: int, tag: int, tensor: Tensor, timeout_s: float, *, is_sent: bool) -> None:
        self.peer = peer
        self.tag = tag
        self.is_sent = is_sent
        self.data = tensor.detach().view(-1).view(torch.uint8).numpy().data
        self.num_bytes = self.data.nbytes
        self.is_short = self.num_bytes <= _SHORT_BYTES
        self._timeout_s = timeout_s
        self._under_way = threading.Lock()
        self._under_way.acquire()
        self._failure = ""

    def end(self, failure: str = "") -> None:
        """Have whoever waits for it go on: it has passed, or failed; nothing touches its tensor any more. Once."""
        self.data = memoryview(b"")
        self._failure = failure
        self._under_way.release()

    def wait(self) -> None:
        """Block until the tensor has been sent or received.

        Raises:
            CommunicationError: The connection to the peer broke, the generation was aborted, or the time is over.
        """
        if not self._under_way.acquire(timeout=min(self._timeout_s, threading.TIMEOUT_MAX)):
            what = "sending to" if self.is_sent else "receiving from"
            raise CommunicationError(f"Timed out after {self._timeout_s:g} s of {what} rank {self.peer}")
        self._under_way.release()
        if self._failure:
            raise CommunicationError(self._failure, peer=None if self._failure == ENDED else self.peer)


class _ByTag(Generic[Item]):
    """Things with tags; those of one tag in their order."""

    def __init__(self) -> None:
        self._items: dict[int, deque[Item]] = {}

    def put(self, tag: int, item: Item) -> None:
        self._items.setdefault(tag, deque()).append(item)

    def take(self, tag: int) -> Item | None:
        """Return the first of a tag; None where there is none."""
        if (items := self._items.get(tag)) is None:
            return None
        item = items.popleft()
        if not items:
            del self._items[tag]
        return item


class ChannelPeer:
    """The messages with one other rank; those before there is a connection wait for it.

    Args:
        rank: The other.
        loop: Its thread calls all this.
    """

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        self._rank = rank
        self._loop = loop
        self._receiving: _ByTag[ChannelMessage] = _ByTag()
        self._early: _ByTag[bytearray] = _ByTag()
        """Short ones that nobody here waits for yet."""
        self._sending: _ByTag[ChannelMessage] = _ByTag()
        """Long ones that nobody there waits for yet."""
        self._wanted: _ByTag[int] = _ByTag()
        """Long ones that somebody there waits for, and their sizes."""
        self._live: set[ChannelMessage] = set()
        self._leaving: deque[tuple[memoryview, ChannelMessage | None]] = deque()
        self._is_writable = False
        self._header = bytearray(_HEADER.size)
        self._space = memoryview(self._header)
        self._landed: Callable[[], None] = self._read_header
        """Called when there is no more space, for what follows."""
        self._connection: socket.socket | None = None
        self._calling: asyncio.Task[None] | None = None
        self._failure = ""

    def connect(self, call: Callable[[], Awaitable[socket.socket]]) -> None:
        """Use the connection that a call to the other end makes."""

        async def connect() -> None:
            try:
                connection = await call()
            except Exception as error:  # whatever it is: nobody else ends these messages
                self._break(error)
            else:
                self.attach(connection)

        self._calling = self._loop.create_task(connect())

    @property
    def is_awaited(self) -> bool:
        """Whether there is no connection yet, and may be one."""
        return self._connection is None and not self._failure

    def attach(self, connection: socket.socket) -> None:
        """Use a connection, the first one."""
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(connection, self._read)
        self._write()

    def post(self, message: ChannelMessage) -> None:
        """Carry a message."""
        self._live.add(message)
        is_short_receipt = message.is_short and not message.is_sent
        if is_short_receipt and (data := self._early.take(message.tag)) is not None:
            try:  # it counts, though who sent it may have left since
                self._land(message, data)
            except BrokenError as error:
                self._break(error)
        elif self._failure:
            self._live.discard(message)
            message.end(self._failure)
        elif message.is_sent:
            if message.is_short or self._wanted.take(message.tag) is not None:
                self._send(message)
            else:
                self._sending.put(message.tag, message)
        else:
            self._receiving.put(message.tag, message)
            if not message.is_short:
                self._queue(_HEADER.pack(_WANTED, message.tag, message.num_bytes))

    def end(self, failure: str) -> None:
        """Hang up, and end all messages."""
        self._failure = self._failure or failure
        if self._calling is not None:
            self._calling.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._is_writable = False
        self._leaving.clear()
        self._space = memoryview(b"")
        for message in self._live:
            message.end(self._failure)
        self._live.clear()

    def _break(self, error: Exception) -> None:
        why = "Connection closed by peer" if isinstance(error, EOFError) else str(error) or repr(error)
        self.end(f"connection to rank {self._rank}: {why}")

    def _send(self, message: ChannelMessage) -> None:
        header = _HEADER.pack(_DATA, message.tag, message.num_bytes)
        if message.is_short:
            self._queue(header + message.data, message)
        else:
            self._leaving.append((memoryview(header), None))
            self._queue(message.data, message)

    def _queue(self, data: bytes | memoryview, message: ChannelMessage | None = None) -> None:
        self._leaving.append((memoryview(data), message))
        if self._is_writable:
            self._write()

    def _write(self) -> None:
        """Send what the kernel takes; the rest when it takes more."""
        connection = self._connection
        assert connection is not None
        try:
            while self._leaving:
                data, message = self._leaving.popleft()
                self._is_writable = False
                while data:
                    try:
                        data = data[connection.send(data) :]
                    except BlockingIOError:
                        self._leaving.appendleft((data, message))
                        self._loop.add_writer(connection, self._write)
                        return
                if message is not None:
                    self._pass(message)
        except OSError as error:
            self._break(error)
            return
        self._loop.remove_writer(connection)
        self._is_writable = True

    def _read(self) -> None:
        """Take what has come."""
        connection = self._connection
        assert connection is not None
        try:
            for _ in range(_READS_AT_ONCE):
                num_bytes = connection.recv_into(self._space)
                if not num_bytes:
                    raise EOFError
                self._space = self._space[num_bytes:]
                while not self._space and not self._failure:
                    self._landed()
                if self._failure:
                    return
        except BlockingIOError:
            pass
        except Exception as error:  # whatever it is: nobody else ends these messages
            self._break(error)

    def _expect(self, space: memoryview, landed: Callable[[], None]) -> None:
        self._space, self._landed = space, landed

    def _expect_header(self) -> None:
        self._expect(memoryview(self._header), self._read_header)

    def _read_header(self) -> None:
        kind, tag, num_bytes = _HEADER.unpack(self._header)
        self._expect_header()
        if kind == _WANTED:
            if (message := self._sending.take(tag)) is None:
                self._wanted.put(tag, num_bytes)
            else:
                self._send(message)
        elif num_bytes <= _SHORT_BYTES:
            data = bytearray(num_bytes)
            self._expect(memoryview(data), lambda: self._take_short(tag, data))
        elif (message := self._receiving.take(tag)) is None:
            raise BrokenError(f"it sent {num_bytes} bytes that nobody waits for")
        else:
            _check_size(num_bytes, message)
            self._expect(message.data, lambda: self._take_long(message))

    def _take_short(self, tag: int, data: bytearray) -> None:
        self._expect_header()
        if (message := self._receiving.take(tag)) is None:
            self._early.put(tag, data)
        else:
            self._land(message, data)

    def _take_long(self, message: ChannelMessage) -> None:
        self._expect_header()
        self._pass(message)

    def _land(self, message: ChannelMessage, data: bytearray) -> None:
        _check_size(len(data), message)
        message.data[:] = data
        self._pass(message)

    def _pass(self, message: ChannelMessage) -> None:
        self._live.discard(message)
        message.end()


def _check_size(num_bytes: int, message: ChannelMessage) -> None:
    if num_bytes != message.num_bytes:
        raise BrokenError(f"it sent {num_bytes} bytes where {message.num_bytes} were expected")
