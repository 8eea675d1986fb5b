"""Whether two nodes of a job reach each other: one rings at the other's door, which rings back at the first one's.

Both show that they know the job's token, without saying it: nobody else has a node connect to anywhere, and nobody
else who listens at an address is taken for a node. Must not import torch.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct

from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof, secret_for
from resilient.common.network.ports import listen
from resilient.common.network.reception import PAUSES_S, Reception

RING_S = 5.0
"""How long an answer may take, one way."""

_MOST_AT_ONCE = 16
"""Who are rung back: a thousand nodes may come at once, and all ring at the first one's door."""

_BACKLOG = 1024
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_ROUTE_S, _ROUTE_PAUSE_S = 4.0, 0.1
"""For so long a machine whose link has just come back may have no way: it has asked for one while there was none."""
_RINGER, _BELL = b"ringer", b"bell"
_SIZE = struct.Struct(">H")


class Doorbell:
    """One node's, where others of its job ring.

    Args:
        token: The job's.
    """

    def __init__(self, token: str) -> None:
        self._secret = secret_for(token, "doorbell")
        self._serving: asyncio.Task[None] | None = None
        self._turn = asyncio.Semaphore(_MOST_AT_ONCE)
        self._host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """Where it is, host:port."""
        return joined(self._host, self.port)

    async def open(self, host: str, ports: str) -> None:
        """Have it at an address of this machine, where it is not there yet.

        Args:
            host: The address.
            ports: The range to choose the port of, as :func:`resilient.common.network.ports.port_range` reads it.

        Raises:
            OSError: No port is free there.
        """
        if self._serving is not None and self._host == host:
            return
        self.close()
        listening = listen(host, 0, ports, _BACKLOG)
        self._host, self.port = host, listening.getsockname()[1]
        reception = Reception(
            self._secret, caller=_RINGER, own=_BELL, address=self.address, patience_s=RING_S, serve=self._answer
        )
        self._serving = reception.start(listening)

    def close(self) -> None:
        """Listen no more."""
        if self._serving is not None:
            self._serving.cancel()
        self._serving, self.port = None, 0

    async def ring(self, address: str) -> str:
        """Ring at another one, and have it ring here; return what does not work, "" if both do."""
        return await ring(address, self._secret, own=self.address)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = await asyncio.wait_for(_hear(reader), RING_S)
        async with self._turn:
            found = await _reach(caller, self._secret) if caller else ""
        _say(writer, found)
        await asyncio.wait_for(writer.drain(), RING_S)


async def ring(address: str, secret: bytes, own: str) -> str:
    """Ring at a doorbell; return what does not work, "" if all does.

    Args:
        address: Where it is, host:port.
        secret: Of the token, for this purpose.
        own: Where it is to ring back, host:port.
    """
    try:
        found = await _reach(address, secret, own)
    except _NotRungBackError as error:
        return f"{address} cannot connect to {own} ({error})"
    return f"{own} cannot connect to {address} ({found})" if found else ""


async def can_ring(address: str, token: str) -> str:
    """Return why nobody can ring at a doorbell from here, "" if one can."""
    return await _reach(address, secret_for(token, "doorbell"))


def joined(host: str, port: int) -> str:
    """Return host:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _NotRungBackError(Exception):
    """The other end cannot ring here; the message says why."""


async def _reach(address: str, secret: bytes, own: str = "") -> str:
    """Ring; return why that cannot be done, "" if it can.

    Raises:
        _NotRungBackError: It can, but not the other way round.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.wait_for(_connected(address, secret), RING_S)
        _say(writer, own)
        found = await asyncio.wait_for(_hear(reader), 2 * RING_S)
    except asyncio.TimeoutError:
        return f"no answer within {RING_S:g} s"
    except (EOFError, ValueError, OverflowError):  # the last of a port that cannot be
        return "it does not answer as a node of this job"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    finally:
        if writer is not None:
            writer.close()
    if found:
        raise _NotRungBackError(found)
    return ""


async def _connected(address: str, secret: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and show that this end knows the secret; in a crowd, who has not done so yet has to make room.

    Raises:
        EOFError: The other end hangs up, time after time.
        OSError: Nobody listens.
    """
    host, _, port = address.rpartition(":")
    for pause_s in (*PAUSES_S, None):
        reader, writer = await _opened(host.strip("[]"), int(port))
        try:
            await _show(reader, writer, secret, address)
            return reader, writer
        except (EOFError, ConnectionResetError):
            writer.close()
            if pause_s is None:
                raise EOFError from None
        except BaseException:
            writer.close()
            raise
        await asyncio.sleep(pause_s)
    raise AssertionError("there is a last time")


async def _opened(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    until, no_way = loop.time() + _ROUTE_S, None
    while True:
        try:
            limit_s = None if no_way is None else until - loop.time()
            return await asyncio.wait_for(asyncio.open_connection(host, port), limit_s)
        except asyncio.TimeoutError:
            raise no_way or asyncio.TimeoutError from None
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
            no_way = error
        await asyncio.sleep(_ROUTE_PAUSE_S)


async def _show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, address: str) -> None:
    theirs, ours = await reader.readexactly(NONCE_BYTES), nonce()
    said = theirs, ours, address.encode()
    writer.write(ours + proof(secret, _RINGER, *said))
    if not is_proof(await reader.readexactly(PROOF_BYTES), secret, _BELL, *said):
        raise EOFError


def _say(writer: asyncio.StreamWriter, text: str) -> None:
    said = text.encode()[:256]
    writer.write(_SIZE.pack(len(said)) + said)


async def _hear(reader: asyncio.StreamReader) -> str:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return (await reader.readexactly(size)).decode(errors="replace")
