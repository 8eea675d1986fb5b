"""Who leads a job, as etcd says: ``PREFIX/term`` and, for as long as a lease is kept, ``PREFIX/leader``.

Whoever finds no leader may become it: one transaction writes both keys, if nobody else has written either since. So of
several who stand one is elected, and no two of them ever in the same term. Calls wait for etcd: make them in a thread.
Must not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from resilient.common.network.etcd_connection import EtcdUnreachableError, etcd_client, reached
from resilient.errors import ArgumentError

SCHEME = "etcd://"
_FILES = ("ca", "certificate", "key")
_FORM = "etcd://HOST[:PORT],.../PREFIX[?ca=FILE&certificate=FILE&key=FILE]"


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads at a prefix.

    Args:
        run: Folder of the run.
        term: The coordinator's.
        address: Where it listens, host:port; "" while it takes the job over.
    """

    run: str
    term: int
    address: str = ""


@dataclass(frozen=True, kw_only=True)
class Election:
    """What came of standing: a term, for as long as the lease is kept.

    Args:
        term: Higher than all before.
        lease: etcd's number of the lease.
        ttl_s: How long it is kept without being refreshed; etcd may grant more than was asked for.
    """

    term: int
    lease: int
    ttl_s: float


def check_store(url: str) -> None:
    """Check what ``--store`` says.

    Raises:
        ArgumentError: It does not have the form, or names files that TLS needs in pairs alone.
        MissingPackageError: The client for etcd is not installed.
    """
    try:
        LeaderStore(url, timeout_s=1.0).close()
    except OSError as error:
        got = f"{error.filename} ({error.strerror})"
        raise ArgumentError("store", "name files for TLS that can be read", got, "give others") from error


def _parse(url: str) -> tuple[str, str, dict[str, str]]:
    servers, _, rest = url.removeprefix(SCHEME).partition("/")
    prefix, _, query = rest.partition("?")
    files = dict(parse_qsl(query, keep_blank_values=True))
    if not url.startswith(SCHEME) or not servers or not prefix.strip("/") or not files.keys() <= {*_FILES}:
        raise ArgumentError("store", f"look like {_FORM}", repr(url), "give each job a prefix of its own")
    return servers, prefix.strip("/"), files


class LeaderStore:
    """The two keys of a job.

    Every method raises ``EtcdUnreachableError`` where no server answers in time.

    Args:
        url: The servers, the prefix of the keys, and files for TLS: see ``--store``.
        timeout_s: How long one server may take to answer.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        servers, prefix, files = _parse(url)
        self._client = etcd_client(servers, timeout_s=timeout_s, **files)
        self._term_key, self._leader_key = f"/{prefix}/term", f"/{prefix}/leader"

    def close(self) -> None:
        """Use it no more."""
        self._client.close()

    def leader(self) -> Leader | None:
        """Return who leads; None when nobody does.

        Raises:
            ArgumentError: Something else is under the prefix.
        """
        value, _ = self._asked(lambda: self._client.get(self._leader_key))
        return None if value is None else self._read(self._leader_key, value, Leader)

    def stand(self, run: str, after: int, ttl_s: float) -> Election | None:
        """Begin the next term, if nobody leads.

        Args:
            run: Folder of the run.
            after: The highest term known otherwise.
            ttl_s: After which somebody else may be elected, unless the lease is refreshed.

        Returns:
            The term; None if somebody leads, or was elected meanwhile.
        """
        if self.leader() is not None:
            return None
        made = self._client.transactions
        value, about = self._asked(lambda: self._client.get(self._term_key))
        term = 1 + max(after, 0 if value is None else self._read(self._term_key, value, int))
        lease = self._asked(lambda: self._client.lease(max(1, round(ttl_s))))
        is_elected, _ = self._asked(
            lambda: self._client.transaction(
                compare=[
                    made.mod(self._leader_key) == 0,
                    made.mod(self._term_key) == (0 if about is None else about.mod_revision),
                ],
                success=[
                    made.put(self._term_key, str(term)),
                    made.put(self._leader_key, msgspec.json.encode(Leader(run=run, term=term)), lease),
                ],
                failure=[],
            )
        )
        if not is_elected:
            self.resign(lease.id)
            return None
        return Election(term=term, lease=lease.id, ttl_s=float(lease.ttl))

    def announce(self, election: Election, leader: Leader) -> bool:
        """Say where the leader is found; return whether it still leads."""
        made = self._client.transactions
        is_told, _ = self._asked(
            lambda: self._client.transaction(
                compare=[made.mod(self._leader_key) > 0, made.value(self._term_key) == str(election.term)],
                success=[made.put(self._leader_key, msgspec.json.encode(leader), election.lease)],
                failure=[],
            )
        )
        return bool(is_told)

    def refresh(self, lease: int) -> float:
        """Keep a lease; return for how many seconds from now on, 0 if it is over."""
        answers = self._asked(lambda: list(self._client.refresh_lease(lease)))
        return float(answers[0].TTL) if answers else 0.0

    def resign(self, lease: int) -> None:
        """Give a lease back, and the key with it, as far as etcd is there: else it ends by itself."""
        with contextlib.suppress(EtcdUnreachableError):
            self._asked(lambda: self._client.revoke_lease(lease))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Ask a server; where it does not answer, the next. What was done by one that could not say so is done again.

        So a transaction that was lost on its way back fails the second time: its lease is given back.
        """
        import grpc

        for left in reversed(range(len(self._client.endpoints))):
            try:
                with reached(self._client):
                    return ask()
            except EtcdUnreachableError:
                if not left:
                    raise
            except grpc.RpcError as error:  # the lease is over, this client may not do that, ...
                raise EtcdUnreachableError(f"etcd must do what it is asked, got {error}; look at its log") from error
        raise AssertionError("there is a server")

    def _read(self, key: str, value: bytes, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(value, type=kind)
        except msgspec.DecodeError:
            fix = "choose another prefix"
            raise ArgumentError("store", "have a prefix of its own", f"{key} = {value!r}", fix) from None
