"""A worker's connection to the store of rank 0, and what torch takes for a store.

Tried with torch 2.13: gloo's groups take a store written in Python.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.comm.store_messages import (
    CLIENT,
    HOST,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Check,
    Get,
    Request,
    Set,
    decode_answer,
)
from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof


class StoreConnection:
    """A connection to a store; any thread may use it, one at a time.

    Args:
        address: ``host:port``.
        secret: The job's.
        timeout_s: Last resort for a wait that nothing else ends.

    Raises:
        OSError: Nobody answers there, or somebody who does not know the secret.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        self.address = address
        self._made_of = address, secret, timeout_s
        self._lock = threading.Lock()
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            theirs, ours = self._read(NONCE_BYTES), nonce()
            said = theirs, ours, address.encode()
            self._socket.sendall(ours + proof(secret, CLIENT, *said))
            if not is_proof(self._read(PROOF_BYTES), secret, HOST, *said):
                raise ConnectionError(f"who answers at {address} does not know the job's secret")
        except OSError:
            self.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def another(self) -> StoreConnection:
        """Return another one to the same store."""
        return StoreConnection(*self._made_of)

    def ask(self, request: Request) -> Answer:
        """Return the answer.

        Raises:
            OSError: The store is gone, or the time is over.
            ControlError: The request is too long.
        """
        with self._lock:
            self._socket.sendall(frame(msgspec.msgpack.encode(request), MAX_REQUEST_BYTES))
            return decode_answer(self._read(frame_size(self._read(HEADER_BYTES), MAX_ANSWER_BYTES)))

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            more = self._socket.recv(size - len(found))
            if not more:
                raise ConnectionError(f"the store at {self.address} closed the connection")
            found += more
        return bytes(found)


class GenerationStore(Store):
    """The keys of one generation, as torch takes a store. Whoever gives it to torch keeps it: torch keeps half of it.

    Args:
        connection: To the store.
        generation: Its number.
    """

    def __init__(self, connection: StoreConnection, generation: int) -> None:
        super().__init__()
        self._connection = connection
        self._generation = generation

    def _key(self, key: str) -> str:
        return f"g{self._generation}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value.encode() if isinstance(value, str) else value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._connection.ask(Set({self._key(key): value for key, value in zip(keys, values, strict=True)}))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._connection.ask(Get([self._key(key) for key in keys]))
        assert isinstance(found, list)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        return self._connection.ask(Check([self._key(key) for key in keys])) == len(keys)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        return GenerationStore(self._connection.another(), self._generation)


class StoreClient:
    """This worker's connection to the store of rank 0, kept between generations: rank 0 is mostly the one of before.

    Args:
        secret: The job's.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._idle: StoreConnection | None = None

    def take(self, address: str, timeout_s: float) -> StoreConnection:
        """Return a connection to the store at ``address``, the caller's alone until it is given back.

        Args:
            address: ``host:port``.
            timeout_s: Last resort for a wait that nothing else ends; of a new connection.

        Raises:
            OSError: Nobody answers there, or somebody who does not know the secret.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle.address == address:
            return idle
        return StoreConnection(address, self._secret, timeout_s)

    def give_back(self, connection: StoreConnection) -> None:
        """Keep a connection on which nothing is under way."""
        self._idle = connection
