"""Messages between any two ranks, connected when they first have one for each other: for jobs in which not all are.

A connection is made by the lower of two ranks when it is first to send something to the other, or to receive it; the
higher one waits for it to come. Both know of every message, so they need not agree on anything. Each side shows the
other that it knows what the higher rank has left in the store (:mod:`resilient.common.network.reception`).

One thread carries everything. It sees a broken connection at once, whatever was under way, and ends all messages with
that rank. (Gloo forgets a message of which a part has come.)
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from resilient.comm.channel_peer import ENDED, BrokenError, ChannelMessage, ChannelPeer
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.common.network.ports import listen
from resilient.common.network.reception import PAUSES_S, Reception

_CALLER, _OWN = b"lower rank", b"higher rank"
_BACKLOG = 1024
_STRANGER_S = 10.0
_CLOSE_S = 1.0
_RANK = struct.Struct("!I")
_WELCOME = b"!"


class Channels:
    """The messages of one rank of a generation; any thread may use them.

    Args:
        rank: This one.
        host: Address of this machine that its peers can reach.
        timeout_s: Last resort for a message that nothing else ends.
        ports: The range to listen in, as :func:`resilient.common.network.ports.port_range` reads it; "" for any port.

    Attributes:
        told: What the rank leaves in the store for :meth:`meet`, without blanks.

    Raises:
        OSError: No port is free, or no descriptor.
    """

    def __init__(self, rank: int, host: str, timeout_s: float, ports: str = "") -> None:
        listening = listen(host, 0, ports, _BACKLOG)
        address, port = listening.getsockname()[:2]
        self.rank = rank
        self.told = f"{address}:{port}/{nonce().hex()}"
        self._timeout_s = timeout_s
        self._carrier = carrier = _Carrier(rank, self.told)
        threading.Thread(target=lambda: carrier.run(listening), name="channels", daemon=True).start()
        weakref.finalize(self, carrier.stop).atexit = False  # nobody closes what was left behind half built

    def meet(self, told: Mapping[int, str]) -> None:
        """Take in with whom there may be messages; called once, before any.

        Args:
            told: By rank, its :attr:`told`.
        """
        self._carrier.told = dict(told)

    def send(self, tensor: Tensor, target: int, tag: int) -> ChannelMessage:
        """Send a contiguous tensor in host memory; the target receives with the same tag and number of bytes.

        Args:
            tensor: Untouched until the message's ``wait`` has returned.
            target: Rank.
            tag: 0 .. 2^64 - 1.
        """
        return self._start(ChannelMessage(target, tag, tensor, self._timeout_s, is_sent=True))

    def recv(self, tensor: Tensor, source: int, tag: int) -> ChannelMessage:
        """Receive into a contiguous tensor in host memory; see :meth:`send`."""
        return self._start(ChannelMessage(source, tag, tensor, self._timeout_s, is_sent=False))

    def _start(self, message: ChannelMessage) -> ChannelMessage:
        pair = tuple(sorted((self.rank, message.peer)))
        assert message.peer in self._carrier.told, f"ranks {pair} send each other tensors, of which neither was told"
        self._carrier.post(message)
        return message

    def abort(self) -> None:
        """Hang up on everybody: all messages end, and those to come. Any thread may call it; it does not block."""
        self._carrier.stop()

    def close(self) -> None:
        """Abort, and wait a moment until nothing touches a tensor."""
        self._carrier.stop()
        self._carrier.is_done.wait(_CLOSE_S)


class _Carrier:
    """What carries the messages, in a thread of its own."""

    def __init__(self, rank: int, own: str) -> None:
        self.told: dict[int, str] = {}
        self.is_done = threading.Event()
        self._rank = rank
        self._address, self._key = _parsed(own)
        self._peers: dict[int, ChannelPeer] = {}
        self._posting = threading.RLock()  # whatever is dropped in this thread meanwhile may stop it
        self._posted: deque[ChannelMessage] = deque()
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def post(self, message: ChannelMessage) -> None:
        """Carry a message; any thread may call it."""
        with self._posting:
            if not self._is_over:
                self._posted.append(message)
                if len(self._posted) == 1:
                    self._loop.call_soon_threadsafe(self._take)
                return
        message.end(ENDED)

    def stop(self) -> None:
        """End all messages, and the thread; any thread may call it."""
        with self._posting:
            if not self._is_over:
                self._is_over = True
                self._loop.call_soon_threadsafe(self._stopping.set)

    def run(self, listening: socket.socket) -> None:
        """Carry messages until stopped."""
        try:
            self._loop.run_until_complete(self._serve(listening))
        finally:
            self._loop.close()

    async def _serve(self, listening: socket.socket) -> None:
        reception = Reception(
            self._key, caller=_CALLER, own=_OWN, address=self._address, patience_s=_STRANGER_S, serve=self._welcome
        )
        serving = reception.start(listening)
        await self._stopping.wait()
        self._take()
        for peer in self._peers.values():
            peer.end(ENDED)
        self.is_done.set()
        serving.cancel()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # calls, too, which are cancelled

    def _take(self) -> None:
        while True:
            with self._posting:
                if not self._posted:
                    return
                posted, self._posted = self._posted, deque()
            for message in posted:
                self._peer(message.peer).post(message)

    def _peer(self, rank: int) -> ChannelPeer:
        if (peer := self._peers.get(rank)) is None:
            peer = self._peers[rank] = ChannelPeer(rank, self._loop)
            if self._rank < rank:
                peer.connect(partial(self._call, *_parsed(self.told[rank])))
        return peer

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (rank,) = _RANK.unpack(await reader.readexactly(_RANK.size))
        if rank >= self._rank or self._stopping.is_set():
            return
        # the streams, which copy what comes, close theirs; who calls says nothing before it is welcome
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        peer = self._peer(rank)
        try:
            if not peer.is_awaited:
                raise EOFError
            connection.send(_WELCOME)
        except (OSError, EOFError):
            connection.close()
            raise
        peer.attach(connection)

    async def _call(self, address: str, key: bytes) -> socket.socket:
        for pause_s in (*PAUSES_S, None):
            try:
                return await self._call_once(address, key)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                if pause_s is None:  # in a crowd, who has not shown yet what it knows has to make room
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError

    async def _call_once(self, address: str, key: bytes) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, (host, int(port)))
            theirs, ours = await self._read(connection, NONCE_BYTES), nonce()
            said = theirs, ours, address.encode()
            await self._loop.sock_sendall(connection, ours + proof(key, _CALLER, *said))
            if not is_proof(await self._read(connection, PROOF_BYTES), key, _OWN, *said):
                raise BrokenError(f"who answers at {address} is somebody else")
            await self._loop.sock_sendall(connection, _RANK.pack(self._rank))
            await self._read(connection, len(_WELCOME))
        except BaseException:
            connection.close()
            raise
        return connection

    async def _read(self, connection: socket.socket, num_bytes: int) -> bytes:
        found = b""
        while len(found) < num_bytes:
            more = await self._loop.sock_recv(connection, num_bytes - len(found))
            if not more:
                raise EOFError
            found += more
        return found


def _parsed(told: str) -> tuple[str, bytes]:
    address, _, key = told.rpartition("/")
    return address, bytes.fromhex(key)
