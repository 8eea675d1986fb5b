"""Keys and values of one job in etcd, as torch's stores keep them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented

from resilient.common.network.etcd_connection import EtcdUnreachableError, KeptLease, asked_until, reached

if TYPE_CHECKING:
    from pyetcd import MultiEndpointEtcd3Client

_WATCH_S = 5.0
"""A watch is renewed after this long: its connection may have broken without a word."""


class EtcdStore(Store):
    """A ``torch.distributed.Store`` in etcd, which outlives every process of the job.

    While no server answers, calls go on asking until the store's timeout is over, and raise ``EtcdUnreachableError``
    then; a change that depends on what was read before, and whose answer is lost, raises it at once.
    """

    def __init__(self, client: MultiEndpointEtcd3Client, prefix: str, timeout: timedelta, lease: KeptLease) -> None:
        """Wrap a client; ``prefix`` ends in a slash; keys end with the lease."""
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._lease = lease
        self.set_timeout(timeout)
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._asked(lambda: self._client.put(self._prefix + key, value, lease=self._lease.id()))

    def get(self, key: str) -> bytes:
        """Return a value, when it is there.

        Raises:
            LookupError: It did not come within the store's timeout.
        """
        value = self._wait_for(key, time.monotonic() + self._timeout.total_seconds())
        if value is None:
            raise LookupError(
                f"key {key!r} must come within {self._timeout.total_seconds():g} s, got none; see what its writer does"
            )
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 where there is none yet, and return the sum."""
        while True:
            old, revision = self._read(key)
            new = int(old or b"0") + value
            if self._replace(key, revision, str(new).encode()):
                return new

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write a value where the old one is as expected, none where nothing is; return what is there then."""
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        while True:
            old, revision = self._read(key)
            if (old or b"") != expected:
                return expected if old is None else old
            if self._replace(key, revision, desired):
                return desired

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            LookupError: One did not come in time.
        """
        allowed = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + allowed.total_seconds()
        for key in keys:
            if self._wait_for(key, deadline) is None:
                raise LookupError(
                    f"key {key!r} must come within {allowed.total_seconds():g} s, got none; see what its writer does"
                )

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there now."""
        return all(self._read(key)[1] for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._asked(lambda: self._client.delete(self._prefix + key)))

    def num_keys(self) -> int:
        """Return how many keys of this job there are."""
        return int(self._asked(lambda: self._client.get_prefix_response(self._prefix, count_only=True)).count)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        return asked_until(time.monotonic() + self._timeout.total_seconds(), self._client, ask)

    def _read(self, key: str) -> tuple[bytes | None, int]:
        """Return a key's value and the revision that wrote it, 0 where there is none."""
        value, about = self._asked(lambda: self._client.get(self._prefix + key))
        return value, about.mod_revision if about is not None else 0

    def _replace(self, key: str, revision: int, value: bytes) -> bool:
        made = self._client.transactions
        with reached(self._client):
            done, _ = self._client.transaction(
                compare=[made.mod(self._prefix + key) == revision],
                success=[made.put(self._prefix + key, value, self._lease.id())],
                failure=[],
            )
        return bool(done)

    def _wait_for(self, key: str, deadline: float) -> bytes | None:
        """Return a key's value when it comes, None if it does not."""
        from pyetcd.exceptions import Etcd3Exception, WatchTimedOut

        while True:
            try:
                with reached(self._client):
                    found = self._client.get_response(self._prefix + key)
                if found.count:
                    return found.kvs[0].value
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._client.watch_once_response(
                    self._prefix + key, timeout=min(left, _WATCH_S), start_revision=found.header.revision + 1
                )
            except WatchTimedOut:
                continue
            except (EtcdUnreachableError, Etcd3Exception):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(left, 0.5))  # as long as the client leaves a server alone that failed


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
