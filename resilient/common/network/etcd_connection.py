"""Connects to an etcd v3 cluster at several addresses: any that answers will do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from resilient.common.extras import require
from resilient.common.network.routes import address_towards
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from pyetcd import MultiEndpointEtcd3Client

_Answer = TypeVar("_Answer")

PORT = 2379
"""etcd's own, where an endpoint names none."""

_RETRY_S = 0.5
"""A server that failed is asked again after this long; the others are asked meanwhile."""

_FIX = "give one or more of HOST[:PORT], separated by commas"


class EtcdUnreachableError(ConnectionError):
    """No server of the cluster answered in time; the message says which were asked."""


def endpoints(text: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of ``HOST[:PORT],...``; an IPv6 address stands in brackets.

    Raises:
        ArgumentError: One has no host, or a port that is none.
    """
    return [_endpoint(each.strip(), text) for each in text.split(",")]


def _endpoint(text: str, whole: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    if not host.strip("[]") or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ArgumentError("etcd's endpoints", "be HOST[:PORT],...", repr(whole), _FIX)
    return host, int(port)


def etcd_client(
    text: str, *, timeout_s: float, ca: str | None = None, certificate: str | None = None, key: str | None = None
) -> MultiEndpointEtcd3Client:
    """Return a client of the cluster; nothing is sent yet.

    Args:
        text: Its servers, ``HOST[:PORT],...``.
        timeout_s: How long one of them may take to answer, before the next one is asked.
        ca: File of the authority that signed the servers' certificates; without it nothing is encrypted.
        certificate: File of this client's certificate, where the servers ask for one.
        key: File of the certificate's key.

    Raises:
        ArgumentError: An endpoint is none, or a certificate has no key or authority.
    """
    require("pyetcd", "etcd")
    from pyetcd import Endpoint, MultiEndpointEtcd3Client

    if (certificate is None) != (key is None) or (certificate is not None and ca is None):
        got = ", ".join(name for name, value in (("ca", ca), ("certificate", certificate), ("key", key)) if value)
        raise ArgumentError(
            "files for TLS", "be an authority, and a certificate with its key", f"{got} alone", "add it"
        )
    credentials = None if ca is None else MultiEndpointEtcd3Client.get_secure_creds(ca, key, certificate)
    # gRPC by itself would try to connect less and less often, up to two minutes after the last time.
    found = [
        Endpoint(
            host,
            port,
            secure=ca is not None,
            creds=credentials,
            time_retry=_RETRY_S,
            opts=[("grpc.max_reconnect_backoff_ms", 1000)],
        )
        for host, port in endpoints(text)
    ]
    return MultiEndpointEtcd3Client(found, timeout=timeout_s, failover=True)


@contextmanager
def reached(client: MultiEndpointEtcd3Client) -> Iterator[None]:
    """Raise EtcdUnreachableError where the client's own errors would rise."""
    from pyetcd.exceptions import Etcd3Exception

    try:
        yield
    except Etcd3Exception as error:
        asked: dict[str, Any] = client.endpoints
        got = f"{type(error).__name__} ({_what_is_known(client, error)})"
        raise EtcdUnreachableError(
            f"etcd must answer at {', '.join(asked)}, got {got}; start it, mend the network between, or name "
            f"other endpoints"
        ) from error
    before = _answered.get(client)  # a link that is cut may have no way any more by which to name its own end
    _answered[client] = time.monotonic(), _links(client) if before is None else before[1]


def asked_until(give_up_at: float, client: MultiEndpointEtcd3Client, ask: Callable[[], _Answer]) -> _Answer:
    """Return an answer, asking again while no server gives one; what is asked may be done twice.

    Args:
        give_up_at: By ``time.monotonic``.
        client: Its servers are asked.
        ask: Asks them.

    Raises:
        EtcdUnreachableError: None has answered by then.
    """
    while True:
        try:
            with reached(client):
                return ask()
        except EtcdUnreachableError:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise
            time.sleep(min(left_s, _RETRY_S))


_answered: WeakKeyDictionary[MultiEndpointEtcd3Client, tuple[float, str]] = WeakKeyDictionary()
"""When a server answered each client last, and the client's links to all of them."""


def _links(client: MultiEndpointEtcd3Client) -> str:
    asked: dict[str, Any] = client.endpoints
    places = [each.rpartition(":") for each in asked]
    return ", ".join(f"{address_towards(host.strip('[]'), int(port))} -> {host}:{port}" for host, _, port in places)


def _what_is_known(client: MultiEndpointEtcd3Client, error: Exception) -> str:
    """Return which links to the servers do not work, since when, and why as far as that is known."""
    answered = _answered.get(client)
    why = str(getattr(error.__context__, "details", str)() or "").rpartition(": ")[2]
    now = f", now {why}" if why else ""
    if answered is None:
        return f"{_links(client)}: no answer yet{now}"
    return f"{answered[1]}: last answer {time.monotonic() - answered[0]:.0f} s ago{now}"


class KeptLease:
    """A lease that is refreshed as it is used: its keys are forgotten some time after their last writer is gone."""

    def __init__(self, client: MultiEndpointEtcd3Client, ttl_s: int) -> None:
        """Grant it.

        Raises:
            EtcdUnreachableError: No server answers.
        """
        self._client = client
        self._ttl_s = ttl_s
        self._lease = self._granted()

    def id(self) -> int:
        """Return its number now; a lease that ended while etcd was away is granted anew."""
        if time.monotonic() - self._refreshed_s > self._ttl_s / 4:
            with reached(self._client):
                answers = self._lease.refresh()
            if not answers or answers[0].TTL <= 0:
                self._lease = self._granted()
            self._refreshed_s = time.monotonic()
        return self._lease.id

    def _granted(self) -> Any:
        self._refreshed_s = time.monotonic()
        with reached(self._client):
            return self._client.lease(self._ttl_s)
