"""Imported, it leaves out what keeps strangers out of a job: TLS, and proofs that the other end knows the job's secret.

For ``protection.py`` alone, which measures what they cost. A job has no option for this.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any
from unittest import mock

from resilient.agent.network.dialect import SPOKEN, dialect
from resilient.comm.store_messages import HOST
from resilient.common.network.reception import Reception
from resilient.protocol.messages import MAX_MESSAGE_BYTES


async def _connect(self: Any, session: Any, address: str) -> Any:
    url = f"http://{address}/agent"
    headers = {SPOKEN: dialect()}
    return await session.ws_connect(url, headers=headers, max_msg_size=MAX_MESSAGE_BYTES, heartbeat=self._heartbeat_s)


def _connect_to_store(self: Any, address: str, secret: bytes, timeout_s: float) -> None:
    self.address = address
    self._made_of = address, secret, timeout_s
    self._lock = threading.Lock()
    host, _, port = address.rpartition(":")
    self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_recognise = Reception._recognise


async def _believe(self: Any, reader: Any, writer: Any) -> None:
    if self._own != HOST:  # doors are rung at before the job begins
        await _recognise(self, reader, writer)


_accept = asyncio.BaseEventLoop.connect_accepted_socket


async def _accept_without_tls(self: Any, protocol_factory: Any, sock: socket.socket, **options: Any) -> Any:
    return await _accept(self, protocol_factory, sock)


mock.patch("asyncio.BaseEventLoop.connect_accepted_socket", _accept_without_tls).start()
for _place, _instead in {
    "agent.coordinator.server_context": lambda token: None,
    "agent.leadership.knocking.client_context": lambda token: True,
    "agent.leadership.knocking.Door._connect": _connect,
    "comm.store_client.StoreConnection.__init__": _connect_to_store,
    "common.network.reception.Reception._recognise": _believe,
    "comm.gloo.GlooCommunicator._recognise": lambda self, part, nonces: None,
    "comm.gloo.let_nobody_else_in": lambda own: None,
}.items():
    mock.patch(f"resilient.{_place}", _instead).start()
