"""The store that the ranks of a generation meet in, hosted by a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from resilient.comm.store_messages import (
    CLIENT,
    HOST,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Check,
    Forget,
    Get,
    Request,
    Set,
    decode_request,
)
from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.common.network.ports import listen
from resilient.errors import ControlError

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_MAX_STRANGERS = 64
"""Connections whose other end has not shown yet that it knows the secret; one more, and the oldest is closed."""
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
        server = _Server(secret, self.address.encode())
        threading.Thread(target=lambda: asyncio.run(server.serve(listening)), name="store", daemon=True).start()
        weakref.finalize(self, server.stop)


class _Server:
    """What serves it, in a thread of its own, until it is stopped."""

    def __init__(self, secret: bytes, address: bytes) -> None:
        self._secret = secret
        self._address = address
        self._values: dict[str, bytes] = {}
        self._awaited: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._serving: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._stops: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    async def serve(self, listening: socket.socket) -> None:
        """Serve who connects, with values for those who know the secret."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        self._stops.put(partial(loop.call_soon_threadsafe, is_over.set))
        server = await asyncio.start_server(self._serve_one, sock=listening, backlog=_BACKLOG)
        await is_over.wait()
        server.close()
        for writer in self._serving:
            writer.transport.abort()
        await asyncio.gather(*self._serving.values())

    def stop(self) -> None:
        """Hang up; any thread may call it once."""
        self._stops.get()()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = self._serving[writer] = asyncio.get_running_loop().create_future()
        self._strangers[writer] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            await asyncio.wait_for(self._recognise(reader, writer), _STRANGER_S)
            self._strangers.pop(writer, None)
            while True:
                size = frame_size(await reader.readexactly(HEADER_BYTES), MAX_REQUEST_BYTES)
                request = decode_request(await reader.readexactly(size))
                if isinstance(request, Get):
                    await self._wait_for(request.keys, reader)
                answer = self._answer(request)
                writer.write(frame(msgspec.msgpack.encode(answer), MAX_ANSWER_BYTES))
                await writer.drain()
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # it is gone, or does not say who it is
        except (ControlError, msgspec.DecodeError) as error:
            logger.warning("a connection to the store is closed: %s", error)
        finally:
            self._strangers.pop(writer, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            del self._serving[writer]
            served.set_result(None)

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Show that this end knows the secret once the other has.

        Raises:
            EOFError: It does not.
        """
        ours = nonce()
        writer.write(ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        said = ours, theirs, self._address
        if not is_proof(await reader.readexactly(PROOF_BYTES), self._secret, CLIENT, *said):
            raise EOFError
        writer.write(proof(self._secret, HOST, *said))

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
            case Check(keys=keys):
                return sum(key in self._values for key in keys)
            case Forget(generation=generation):
                before = [key for key in self._values if int(key.removeprefix("g").partition("/")[0]) < generation]
                for key in before:
                    del self._values[key]
                return len(before)
