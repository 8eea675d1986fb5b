"""Where a node is: its address for the others, its doorbell, and its link to the coordinator. Must not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import aiohttp

from resilient.agent.network.addresses import address_of
from resilient.agent.network.conversation import Attached, decode_first_answer
from resilient.agent.network.doorbell import Doorbell, joined
from resilient.agent.network.introductions import INTRODUCTION_S, Introduce, introduce_oneself
from resilient.agent.network.link import KnownLink
from resilient.agent.workers import WorkersPlace
from resilient.common.network.routes import address_towards
from resilient.errors import ControlError, ResilientError
from resilient.protocol.messages import Shutdown, encode

_INFO = struct.Struct("=120xQ12xI")
"""``tcpi_bytes_acked`` and ``tcpi_segs_in`` of Linux's ``struct tcp_info``."""


class Whereabouts:
    """One node's.

    Args:
        token: The job's.
        interface: Of this machine, by name or address, where the others reach it; "" for the address at which it
            reaches the coordinator.
        heartbeat_s: Of the job.

    Attributes:
        host: The address; this machine's own loopback before anybody was reached.
        ports: The range that the job's sockets listen in, "" for any port.
    """

    def __init__(self, token: str, interface: str, heartbeat_s: float) -> None:
        self.host = "127.0.0.1"
        self.ports = ""
        self._interface = interface
        self._doorbell = Doorbell(token)
        self._link = KnownLink(heartbeat_s)
        self._ends = ("", "")
        self._connection: socket.socket | None = None
        self._unheard = (0, 0)

    @property
    def bell_port(self) -> int:
        """Where the doorbell is; 0 while there is none."""
        return self._doorbell.port

    @property
    def told(self) -> WorkersPlace:
        """What workers are told."""
        return WorkersPlace(host=self.host, ports=self.ports, coordinator=self._ends[1].rpartition(":")[0].strip("[]"))

    @property
    def is_chosen(self) -> bool:
        """Whether somebody has chosen the address."""
        return bool(self._interface)

    def take_in(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> bool:
        """Take in a connection to the coordinator; return whether it is one still.

        A coordinator that wakes up and finds that another one leads closes those that were opened while it slept.

        Raises:
            ArgumentError: The interface is not there any more.
        """
        try:
            (seen, *_), (host, port, *_) = map(connection.get_extra_info, ("sockname", "peername"))
            opened = connection.get_extra_info("socket").dup()
        except (TypeError, OSError):  # what is closed has no ends, and no socket
            return False
        self._ends = (seen, joined(host, port))
        self._let_go()
        self._connection = opened
        self.host = address_of(self._interface, seen) if self._interface else seen
        return True

    def note_said(self) -> None:
        """Take in that something was said over the connection just now: it is not acknowledged yet."""
        assert self._connection is not None
        num_acknowledged, num_segments = _heard(self._connection)
        if num_acknowledged != self._unheard[0]:
            self._unheard = num_acknowledged, num_segments

    def break_off(self, connection: aiohttp.ClientWebSocketResponse[bool]) -> None:
        """Take in that the connection that was taken in last has ended.

        Its socket is kept, as what comes over it tells which way packets still go, and closed for the other end.
        """
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the other end was first
                self._connection.shutdown(socket.SHUT_WR)
        now, is_silent = asyncio.get_running_loop().time(), isinstance(connection.exception(), asyncio.TimeoutError)
        self._link.break_off(*self._ends, now, is_silent=is_silent)

    def link(self, address: str) -> str:
        """Return what is known of the link to the coordinator, which is looked for at an address, host:port."""
        if not address:
            return "no coordinator is known here"
        host, _, port = address.rpartition(":")
        own = address_towards(host.strip("[]"), int(port)) if port.isdigit() else "here"
        now, (num_acknowledged, num_segments) = asyncio.get_running_loop().time(), self._unheard
        heard = (-1, 0) if self._connection is None else _heard(self._connection)
        still_arrives = heard[0] == num_acknowledged and heard[1] > num_segments
        return self._link.told(now, address, own, still_arrives=still_arrives)

    async def answer(self, connection: aiohttp.ClientWebSocketResponse[bool], timeout_s: float) -> Attached:
        """Return what the coordinator answers to ``Hello``, once this node has shown whom it reaches, if it has to.

        Raises:
            ResilientError: The node is refused.
            ControlError: What the coordinator says makes no sense.
        """
        answer = decode_first_answer(await connection.receive_bytes(timeout=timeout_s))
        if isinstance(answer, Introduce):
            self.ports = answer.ports
            await connection.send_bytes(encode(await introduce_oneself(answer, self._doorbell, self.host)))
            answer = decode_first_answer(await connection.receive_bytes(timeout=timeout_s + INTRODUCTION_S))
        if isinstance(answer, Shutdown):
            raise ResilientError(answer.reason)
        if not isinstance(answer, Attached):
            raise ControlError("it asks twice whom this node reaches")
        return answer

    def close(self) -> None:
        """Be reached no more."""
        self._doorbell.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _heard(connection: socket.socket) -> tuple[int, int]:
    """Return how many bytes the other end has acknowledged, and how many segments have come of it, repeated ones too.

    Where the second number grows and the first does not, though something was said, the other end does not hear this
    one, and is heard.
    """
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    num_acknowledged, num_segments = _INFO.unpack(told)
    return num_acknowledged, num_segments
