"""A TCP proxy between a job's agents and its coordinator, that damages their connections when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

import pytest

from resilient.agent.coordinator import Coordinator

_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""A socket that lingers for no time says RST where others say FIN."""


class Connection:
    """One agent's, with its two directions."""

    def __init__(self, agent: asyncio.StreamWriter, coordinator: asyncio.StreamWriter) -> None:
        self.agent = agent
        self.coordinator = coordinator
        self.goes_through = True
        self.num_held_bytes = 0

    @property
    def agent_port(self) -> int:
        return self.agent.get_extra_info("peername")[1]

    @property
    def is_open(self) -> bool:
        return not self.agent.is_closing() and not self.coordinator.is_closing()

    def reset(self) -> None:
        """Break it at both ends; what is under way is lost."""
        for writer in (self.agent, self.coordinator):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            assert isinstance(writer.transport, asyncio.Transport)
            writer.transport.abort()

    def garble(self) -> None:
        """Have a byte that nobody said come to both ends."""
        self.agent.write(b"\xff")
        self.coordinator.write(b"\xff")

    def half_close_to_coordinator(self) -> None:
        self.coordinator.write_eof()

    def half_close_to_agent(self) -> None:
        self.agent.write_eof()

    def hold(self) -> None:
        """Have nothing arrive any more."""
        self.goes_through = False


class Proxy:
    """Serves all agents of the jobs that are started while it is installed.

    Attributes:
        connections: Those that were made, in order.
        on_held: Called when a connection that is held has swallowed something.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.on_held: Callable[[Connection], None] = lambda _: None
        self._target = ("", 0)
        self._server: asyncio.Server | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have coordinators tell the proxy's address for theirs."""
        start, close = Coordinator.start, Coordinator.close

        async def start_behind_proxy(coordinator: Coordinator, host: str, port: int) -> None:
            await start(coordinator, host, port)
            own_host, _, own_port = coordinator.address.partition(":")
            self._target = (own_host, int(own_port))
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            coordinator.address = "{}:{}".format(*self._server.sockets[0].getsockname())

        async def close_with_proxy(coordinator: Coordinator) -> None:
            if self._server is not None:
                self._server.close()
            await close(coordinator)

        monkeypatch.setattr(Coordinator, "start", start_behind_proxy)
        monkeypatch.setattr(Coordinator, "close", close_with_proxy)

    async def _serve(self, from_agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
        from_coordinator, to_coordinator = await asyncio.open_connection(*self._target)
        connection = Connection(to_agent, to_coordinator)
        self.connections.append(connection)
        with contextlib.suppress(OSError):  # it was reset
            await asyncio.gather(
                self._pass_on(connection, from_agent, to_coordinator),
                self._pass_on(connection, from_coordinator, to_agent),
            )
        for writer in (to_agent, to_coordinator):
            writer.transport.abort()

    async def _pass_on(self, connection: Connection, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK_BYTES):
            if connection.goes_through:
                to.write(data)
            else:
                connection.num_held_bytes += len(data)
                self.on_held(connection)
        if not to.is_closing():
            to.write_eof()
