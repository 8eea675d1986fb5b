"""The store that the ranks of a generation meet in, hosted by a worker."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from resilient.comm.store_messages import (
    CLIENT,
    HOST,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Check,
    Cut,
    Forget,
    Get,
    Request,
    Set,
    decode_request,
)
from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.common.network.ports import listen
from resilient.common.network.reception import Reception
from resilient.errors import ControlError

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_STRANGER_S = 10.0


class StoreHost:
    """A key-value store in this process, for those who know the job's secret.

    Every worker hosts one for its lifetime, so that the first survivor always has one at hand; keys carry the
    generation and are never used twice. Rank 0 drops them when the next generation has met there.

    Args:
        host: Address of this machine that its peers can reach; nothing else is listened on.
        secret: The job's.
        ports: The range to listen in, as :func:`resilient.common.network.ports.port_range` reads it; "" for any port.

    Raises:
        OSError: No port is free.
    """

    def __init__(self, host: str, secret: bytes, ports: str = "") -> None:
        listening = listen(host, 0, ports, _BACKLOG)
        self.address = f"{host}:{listening.getsockname()[1]}"
        server = _Server(secret, self.address)
        threading.Thread(target=lambda: asyncio.run(server.serve(listening)), name="store", daemon=True).start()
        weakref.finalize(self, server.stop)


class _Server:
    """What serves it, in a thread of its own, until it is stopped."""

    def __init__(self, secret: bytes, address: str) -> None:
        self._secret = secret
        self._address = address
        self._values: dict[str, bytes] = {}
        self._awaited: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._stops: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    async def serve(self, listening: socket.socket) -> None:
        """Serve who connects, with values for those who know the secret."""
        reception = Reception(
            self._secret,
            caller=CLIENT,
            own=HOST,
            address=self._address,
            patience_s=_STRANGER_S,
            serve=self._serve_one,
        )
        loop = asyncio.get_running_loop()
        serving = reception.start(listening)
        self._stops.put(lambda: loop.call_soon_threadsafe(serving.cancel))
        await asyncio.wait([serving])

    def stop(self) -> None:
        """Hang up; any thread may call it once."""
        self._stops.get()()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = frame_size(await reader.readexactly(HEADER_BYTES), MAX_REQUEST_BYTES)
                request = decode_request(await reader.readexactly(size))
                if isinstance(request, Get | Cut):
                    await self._wait_for(request.keys, reader)
                answer = self._answer(request)
                writer.write(frame(msgspec.msgpack.encode(answer), MAX_ANSWER_BYTES))
                await writer.drain()
        except (ControlError, msgspec.DecodeError) as error:
            logger.warning("a connection to the store is closed: %s", error)

    async def _wait_for(self, keys: Sequence[str], reader: asyncio.StreamReader) -> None:
        """Wait until all these keys are there.

        Raises:
            EOFError: Who asked for them is gone.
        """
        gone = asyncio.ensure_future(reader.read(1))  # who asks says nothing until it has its answer
        try:
            for key in keys:
                while key not in self._values:
                    there = asyncio.ensure_future(self._awaited[key].wait())
                    await asyncio.wait((there, gone), return_when=asyncio.FIRST_COMPLETED)
                    there.cancel()
                    if gone.done():
                        raise EOFError
        finally:
            gone.cancel()
            await asyncio.wait((gone,))

    def _answer(self, request: Request) -> Answer:
        match request:
            case Set(values=values):
                self._values.update(values)
                for key in values:
                    if (awaited := self._awaited.pop(key, None)) is not None:
                        awaited.set()
                return len(values)
            case Get(keys=keys):
                return [self._values[key] for key in keys]
            case Cut(keys=keys, tail=tail, first=first, end=end):
                return [_cut(self._values[key], tail, first, end) for key in keys]
            case Check(keys=keys):
                return sum(key in self._values for key in keys)
            case Forget(generation=generation):
                before = [key for key in self._values if int(key.removeprefix("g").partition("/")[0]) < generation]
                for key in before:
                    del self._values[key]
                return len(before)


def _cut(value: bytes, tail: int, first: int, end: int) -> bytes:
    begin = max(0, len(value) - tail)
    return value[:begin] + value[begin + first : begin + end]
