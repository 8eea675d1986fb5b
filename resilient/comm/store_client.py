"""A worker's connection to the store of rank 0, and what torch takes for a store.

Tried with torch 2.13: gloo's groups take a store written in Python.
"""

from __future__ import annotations

import socket
import threading
import time
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
    Cut,
    Get,
    Request,
    Set,
    decode_answer,
)
from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.common.network.reception import PAUSES_S

_NUMBER_BYTES = 8


class _HungUpError(ConnectionError):
    """The other end has closed the connection."""


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
        for pause_s in (*PAUSES_S, None):
            try:
                self._open(*self._made_of)
                return
            except _HungUpError:  # in a crowd, who has not shown yet that it knows the secret has to make room
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def _open(self, address: str, secret: bytes, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            theirs, ours = self._read(NONCE_BYTES), nonce()
            said = theirs, ours, address.encode()
            self._socket.sendall(ours + proof(secret, CLIENT, *said))
            if not is_proof(self._read(PROOF_BYTES), secret, HOST, *said):
                raise ConnectionError(f"who answers at {address} does not know the job's secret")
        except (ConnectionResetError, BrokenPipeError) as error:
            self.close()
            raise _HungUpError(f"the store at {address} closed the connection") from error
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
                raise _HungUpError(f"the store at {self.address} closed the connection")
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

    def multi_get_cut(self, keys: Sequence[str], tail: int, first: int, end: int) -> list[bytes]:
        """Return values as :meth:`multi_get`; of the last ``tail`` bytes of each only those from first to end."""
        found = self._connection.ask(Cut([self._key(key) for key in keys], tail, first, end))
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


class GroupStore(Store):
    """What gloo takes for the store of one group: what its ranks leave there is fetched at once, and little of it.

    Each leaves its address, and for every rank of the group a number by which that one is to introduce itself. A rank
    needs all addresses, and of the numbers its own: of 1,024 ranks, 1,024 of a million. Gloo takes whole lists, so it
    is given its own numbers at their places in lists of zeros. Whoever gives it to torch keeps it.

    Args:
        store: Of the generation.
        name: Of the group.
        rank: This one's place in the group.
        size: Ranks of the group.
    """

    def __init__(self, store: GenerationStore, name: str, rank: int, size: int) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._has_numbers = False
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._has_numbers = _has_numbers(data, self._size)
        self._store.set(f"{self._name}/{key}", data)

    def get(self, key: str) -> bytes:
        if key not in self._found:
            start = key.rpartition("/")[0]
            self._found |= self._fetched([f"{start}/{rank}" for rank in range(self._size)])
        value = self._found[key]
        if not self._has_numbers:
            return value
        before, after = self._rank * _NUMBER_BYTES, (self._size - self._rank - 1) * _NUMBER_BYTES
        return value[:-_NUMBER_BYTES] + bytes(before) + value[-_NUMBER_BYTES:] + bytes(after)

    def _fetched(self, keys: Sequence[str]) -> dict[str, bytes]:
        named = [f"{self._name}/{key}" for key in keys]
        if not self._has_numbers:
            return dict(zip(keys, self._store.multi_get(named), strict=True))
        first = self._rank * _NUMBER_BYTES
        found = self._store.multi_get_cut(named, self._size * _NUMBER_BYTES, first, first + _NUMBER_BYTES)
        return dict(zip(keys, found, strict=True))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([f"{self._name}/{key}" for key in keys])


def _has_numbers(data: bytes, size: int) -> bool:
    """Return whether this is what a rank leaves: its machine's name, its address, each after its length, and numbers.

    Others' are likewise, for all have the same torch; if they were not, ranks would read them whole.
    """
    place = 0
    for _ in range(2):
        place += _NUMBER_BYTES + int.from_bytes(data[place : place + _NUMBER_BYTES], "little")
    return len(data) == place + size * _NUMBER_BYTES


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
