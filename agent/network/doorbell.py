"""Whether two nodes of a job reach each other: one rings at the other's door, which rings back at the first one's.

Both show that they know the job's token, without saying it: nobody else has a node connect to anywhere, and nobody
else who listens at an address is taken for a node. Must not import torch.
"""

from __future__ import annotations

import asyncio
import os
import struct

from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof, secret_for
from resilient.common.network.ports import listen

RING_S = 5.0
"""How long an answer may take, one way."""

_MOST_AT_ONCE, _MOST_WAITING = 16, 1024
"""A thousand nodes may come at once, and all ring at the first one's door."""

_BACKLOG = 1024
_RINGER, _BELL = b"ringer", b"bell"
_SIZE = struct.Struct(">H")


class Doorbell:
    """One node's, where others of its job ring.

    Args:
        token: The job's.
    """

    def __init__(self, token: str) -> None:
        self._secret = secret_for(token, "doorbell")
        self._server: asyncio.Server | None = None
        self._num_ringing = 0
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
        if self._server is not None and self._host == host:
            return
        self.close()
        listening = listen(host, 0, ports, _BACKLOG)
        self._host, self.port = host, listening.getsockname()[1]
        self._server = await asyncio.start_server(self._answer, sock=listening, backlog=_BACKLOG)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        self._server, self.port = None, 0

    async def ring(self, address: str) -> str:
        """Ring at another one, and have it ring here; return what does not work, "" if both do."""
        return await ring(address, self._secret, own=self.address)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_ringing += 1
        try:
            if self._num_ringing > _MOST_WAITING:
                return
            caller = await asyncio.wait_for(self._recognise(reader, writer), RING_S)
            async with self._turn:  # of those who know the token
                found = await _reach(caller, self._secret) if caller else ""
            _say(writer, found)
            await asyncio.wait_for(writer.drain(), RING_S)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            pass  # a stranger, or one that is gone
        except asyncio.CancelledError:
            pass  # this process ends; nobody waits for this, and streams of Python 3.11 log it for each connection
        finally:
            self._num_ringing -= 1
            writer.close()

    async def _recognise(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Return where to ring back; "" for nowhere.

        Raises:
            EOFError: Who rings does not know the token.
        """
        ours = nonce()
        writer.write(ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        if not is_proof(await reader.readexactly(PROOF_BYTES), self._secret, _RINGER, ours, theirs):
            raise EOFError
        writer.write(proof(self._secret, _BELL, ours, theirs))
        return await _hear(reader)


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
    host, _, port = address.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), RING_S)
        await asyncio.wait_for(_show(reader, writer, secret), RING_S)
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


async def _show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    theirs, ours = await reader.readexactly(NONCE_BYTES), nonce()
    writer.write(ours + proof(secret, _RINGER, theirs, ours))
    if not is_proof(await reader.readexactly(PROOF_BYTES), secret, _BELL, theirs, ours):
        raise EOFError


def _say(writer: asyncio.StreamWriter, text: str) -> None:
    said = text.encode()[:256]
    writer.write(_SIZE.pack(len(said)) + said)


async def _hear(reader: asyncio.StreamReader) -> str:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return (await reader.readexactly(size)).decode(errors="replace")
