"""Who may connect to the coordinator, and for how long without showing the job's token.

Everybody who reaches the port may connect, so strangers have little: few connections at a time, a moment each for
handshake and first request, and together one line of the log now and then. Owns the listening socket, and all
connections until they are closed. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Collection
from traceback import clear_frames
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from resilient.common.network.ports import listen
from resilient.common.processes import allow_many_files
from resilient.templates.common.words import listed

logger = logging.getLogger(__name__)

STRANGERS_AT_ONCE = 128
"""Others wait in the kernel, where they take none of this process's descriptors."""

PATIENCE_S = 5.0
"""For a stranger to show the token."""

_LEAST_PATIENCE_S = 2.0
"""For so long no stranger has to make room for others."""

_TELL_EVERY_S = 30.0
_SCARCE_S = 0.5
_LOOKED_AT = 16


class _Connection:
    """One that was accepted.

    Args:
        accepted: Its socket, which whoever serves it closes.
        since: When that was.
    """

    def __init__(self, accepted: socket.socket, since: float) -> None:
        self.since = since
        self.admitted = asyncio.Event()
        self.transport: asyncio.WriteTransport | None = None
        self.task: asyncio.Task[None] | None = None
        self._accepted = accepted

    @property
    def is_gone(self) -> bool:
        return self._accepted.fileno() < 0

    def abort(self) -> None:
        """Close it at once: in order, TLS would wait for the other end, which may be gone.

        asyncio closes the socket in one of the loop's next turns. It does not abort a connection of TLS that was closed
        in order twice, and of Python 3.11 some releases raise an :class:`AttributeError`; so both of the socket's
        directions are ended as well.
        """
        if self.transport is None:
            self._accepted.close()
            return
        with contextlib.suppress(AttributeError):
            self.transport.abort()
        with contextlib.suppress(OSError):  # it is closed, or the other end was faster
            self._accepted.shutdown(socket.SHUT_RDWR)


class _Complaint:
    """A line of the log that tells how often something happened, and not each time.

    Args:
        text: With a place for how often, and those for what else is told.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._count = 0
        self._told_at = float("-inf")

    def add(self, *what: object) -> None:
        """Take in that it happened once more."""
        self._count += 1
        if time.monotonic() >= self._told_at + _TELL_EVERY_S:
            logger.warning(self._text, self._count, *what)
            self._count, self._told_at = 0, time.monotonic()


class _NonsenseApart(logging.Filter):
    """What anybody can have a server log, as often as they like, is a complaint."""

    def __init__(self) -> None:
        super().__init__()
        self._nonsense = _Complaint("%d requests that are no HTTP: %s")

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError | UnicodeError):  # the last of `Expect`
            self._nonsense.add(repr(str(error)))
            return False
        return True


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_NonsenseApart())


_Body = TypeVar("_Body")


class Entrance:
    """Serves HTTP over TLS.

    Args:
        app: What is served; it says who is to be admitted.
        context: Of TLS.
    """

    def __init__(self, app: web.Application, context: ssl.SSLContext) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=_http_logger)
        self._context = context
        self._strangers: list[_Connection] = []
        self._admitted: deque[_Connection] = deque()
        self._by_protocol: dict[object, _Connection] = {}
        self._fewer = asyncio.Event()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._turned_away = _Complaint("%d connections closed that did not show the job's token within %g s")
        self._scarce = _Complaint("%d times a connection could not be accepted yet: %s; `ulimit -n` may be too low")
        self._most_strangers = STRANGERS_AT_ONCE
        app[_ENTRANCE] = self

    @property
    def num_strangers(self) -> int:
        """How many have connected and not shown the token yet."""
        return sum(not (stranger.admitted.is_set() or stranger.is_gone) for stranger in self._strangers)

    async def open(self, host: str, port: int, ports: str = "") -> tuple[str, int]:
        """Listen; return where.

        Args:
            host: Address to listen on.
            port: Port to listen on; 0 for one that is free.
            ports: The range to choose it of, as :func:`resilient.common.network.ports.port_range` reads it.

        Raises:
            OSError: Somebody else listens there, or it is no address of this machine.
        """
        loop = asyncio.get_running_loop()
        self._listener = await asyncio.to_thread(listen, host, port, ports, 8 * STRANGERS_AT_ONCE)
        await self._runner.setup()
        self._listener.setblocking(False)
        self._most_strangers = min(STRANGERS_AT_ONCE, allow_many_files() // 4)
        self._accepting = loop.create_task(self._accept(self._listener))
        bound_host, bound_port = self._listener.getsockname()[:2]
        return bound_host, bound_port

    def admit(self, request: web.BaseRequest) -> None:
        """Take in that whoever sent a request has shown the token."""
        connection = self._by_protocol.get(request.protocol)
        if connection is not None and not connection.admitted.is_set():
            connection.admitted.set()
            self._admitted.append(connection)

    async def close(self) -> None:
        """Listen no more, and leave no connection open."""
        await self._runner.cleanup()
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        connections = [*self._strangers, *self._admitted]
        tasks = [connection.task for connection in connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            connection.abort()
        while not all(connection.is_gone for connection in connections):
            await asyncio.sleep(0)  # they are closed in the loop's next turns

    # ------------------------------------------------------------ strangers

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._have_room()
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # who has gone before is no loss
                    self._scarce.add(error.strerror)
                    await asyncio.sleep(_SCARCE_S)
                continue
            connection = _Connection(accepted, loop.time())
            self._strangers.append(connection)
            connection.task = loop.create_task(self._receive(connection, accepted))

    async def _have_room(self) -> None:
        """Wait until another stranger may come; the one that has been there longest goes if it has to."""
        loop = asyncio.get_running_loop()
        while True:
            self._forget()
            if len(self._strangers) < self._most_strangers:
                return
            self._fewer.clear()
            first = self._strangers[0]
            wait_s = first.since + _LEAST_PATIENCE_S - loop.time()
            if wait_s <= 0:
                assert first.task is not None
                first.task.cancel()
            # no `asyncio.wait_for`: until Python 3.12 it loses a cancellation that comes as the event is set
            timer = loop.call_later(max(wait_s, _SCARCE_S), self._fewer.set)
            await self._fewer.wait()
            timer.cancel()

    def _forget(self) -> None:
        """Forget who is gone; of those who were admitted, which may be many, only some are looked at each time."""
        self._strangers = [each for each in self._strangers if not (each.admitted.is_set() or each.is_gone)]
        for _ in range(min(_LOOKED_AT, len(self._admitted))):
            connection = self._admitted.popleft()
            if not connection.is_gone:
                self._admitted.append(connection)

    async def _receive(self, connection: _Connection, accepted: socket.socket) -> None:
        """Shake hands, and wait until the connection is admitted."""
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        protocol: object = None
        try:
            transport, protocol = await loop.connect_accepted_socket(
                server, accepted, ssl=self._context, ssl_handshake_timeout=PATIENCE_S
            )
            connection.transport = transport
            self._by_protocol[protocol] = connection
            left_s = connection.since + PATIENCE_S - loop.time()
            await asyncio.wait_for(connection.admitted.wait(), max(left_s, 0))
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            clear_frames(error.__traceback__)  # they hold its buffers, 256 KiB, in a circle: those would stay for long
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._by_protocol.pop(protocol, None)
            if not connection.admitted.is_set():
                if connection.transport is None or not connection.is_gone:  # who is gone had an answer
                    self._turned_away.add(PATIENCE_S)
                if connection.transport is not None:
                    connection.abort()
            self._fewer.set()


_ENTRANCE = web.AppKey("entrance", Entrance)


def num_strangers(request: web.Request) -> int:
    """Return how many have connected, to whom a request came, and not shown the token yet."""
    entrance = request.app.get(_ENTRANCE)
    return 0 if entrance is None else entrance.num_strangers


async def read_body(request: web.Request, kind: type[_Body]) -> _Body:
    """Read a request's JSON body.

    Raises:
        web.HTTPBadRequest: It is something else.
    """
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"cannot read the {kind.__name__.lower()}: {error}") from None


def check_live(node: int, live: Collection[int], *, is_over: bool) -> None:
    """Check that a request's node is there.

    Args:
        node: Its number.
        live: Those that are.
        is_over: Whether the job has ended, of whose nodes the last may yet be leaving.

    Raises:
        web.HTTPNotFound: It is not.
    """
    if is_over:
        raise web.HTTPNotFound(text="the job is over")
    if not live:
        raise web.HTTPNotFound(text=f"node must be a live one, got {node}; no node is connected")
    if node not in live:
        raise web.HTTPNotFound(text=f"node must be one of the live nodes [{listed(sorted(live))}], got {node}")
