"""Strangers at the store that ranks meet in, and at their groups, change nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Sequence

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.comm import GlooCommunicator, StoreClient, StoreHost
from resilient.comm.store_client import GenerationStore, GroupStore, StoreConnection
from resilient.comm.store_messages import CLIENT, HOST, MAX_REQUEST_BYTES, Answer, Cut, Forget, Get, Request, Set
from resilient.common.framing import frame
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, proof
from resilient.errors import CommunicationError
from tests.resilient.ranks import HOST as LOCALHOST
from tests.resilient.ranks import SECRET, as_threads, join


def knock(host: StoreHost) -> socket.socket:
    name, _, port = host.address.rpartition(":")
    return socket.create_connection((name, int(port)), timeout=60)


def request(message: object) -> bytes:
    return frame(msgspec.msgpack.encode(message), MAX_REQUEST_BYTES)


def read_all(connection: socket.socket) -> bytes:
    found = bytearray()
    try:
        while more := connection.recv(4096):
            found += more
    except ConnectionError:  # closed with something unread
        pass
    return bytes(found)


def member(host: StoreHost) -> GenerationStore:
    return GenerationStore(StoreClient(SECRET).take(host.address, 60.0), 1)


@given(secret=st.binary(), other=st.binary(), ours=st.binary(min_size=32, max_size=32))
def test_only_who_knows_the_secret_shows_the_proof_and_each_end_its_own(
    secret: bytes, other: bytes, ours: bytes
) -> None:
    theirs = nonce()
    shown = proof(secret, CLIENT, ours, theirs)
    assert is_proof(shown, secret, CLIENT, ours, theirs)
    assert not is_proof(shown, secret, HOST, ours, theirs), "what one end shows is not to be shown by the other"
    assert not is_proof(shown, secret, CLIENT, nonce(), theirs), "nor on another connection"
    same = other.ljust(64, b"\0") == secret.ljust(64, b"\0")  # as HMAC pads short keys
    assert len(other) > 64 or len(secret) > 64 or is_proof(shown, other, CLIENT, ours, theirs) == same


@pytest.mark.parametrize("secret", [b"", b"of another job"])
def test_stranger_is_not_answered_and_changes_nothing(secret: bytes) -> None:
    host = StoreHost(LOCALHOST, SECRET)
    store = member(host)
    store.set("rank/0", b"a rank")
    with pytest.raises(ConnectionError, match="closed the connection"):
        StoreConnection(host.address, secret, 60.0)
    with knock(host) as stranger:
        theirs = stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
        ours = nonce()
        shown = proof(secret, CLIENT, theirs, ours, host.address.encode())
        stranger.sendall(ours + shown + request(Set({"g1/rank/0": b"me"})))
        assert read_all(stranger) == b""
    assert store.get("rank/0") == b"a rank"


def test_what_the_host_has_shown_does_not_let_a_stranger_in() -> None:
    """The stranger has a second connection tell it what the first one is asked for."""
    host = StoreHost(LOCALHOST, SECRET)
    with knock(host) as one, knock(host) as other:
        asked = one.recv(NONCE_BYTES, socket.MSG_WAITALL)
        other.recv(NONCE_BYTES, socket.MSG_WAITALL)
        other.sendall(asked + bytes(PROOF_BYTES))
        assert read_all(other) == b"", "the host shows nothing before the other end has"
        one.sendall(nonce() + bytes(PROOF_BYTES))
        assert read_all(one) == b""


def test_rank_leaves_a_host_that_does_not_know_the_secret() -> None:
    host = StoreHost(LOCALHOST, b"of another job")
    with socket.create_server((LOCALHOST, 0)) as listening:
        address = f"{LOCALHOST}:{listening.getsockname()[1]}"

        def answer_anybody() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(nonce())
                connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                connection.sendall(bytes(PROOF_BYTES))

        thread = threading.Thread(target=answer_anybody)
        thread.start()
        with pytest.raises(ConnectionError, match=rf"^who answers at {address} does not know the job's secret$"):
            StoreConnection(address, SECRET, 60.0)
        thread.join()
    with pytest.raises(ConnectionError):
        StoreConnection(host.address, SECRET, 60.0)


def test_who_listens_where_a_host_was_cannot_pass_on_to_another_what_comes_there() -> None:
    """The stranger says to each end what the other one says, and would speak for itself from then on."""
    host = StoreHost(LOCALHOST, SECRET)
    with socket.create_server((LOCALHOST, 0)) as listening:
        told: list[bytes] = []

        def pass_on() -> None:
            with contextlib.suppress(OSError):  # nobody listens any more
                while True:
                    to_rank, _ = listening.accept()
                    with to_rank, knock(host) as to_host:
                        to_rank.sendall(to_host.recv(NONCE_BYTES, socket.MSG_WAITALL))
                        to_host.sendall(to_rank.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL))
                        told.append(read_all(to_host))

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(ConnectionError, match="closed the connection"):
            StoreConnection(f"{LOCALHOST}:{listening.getsockname()[1]}", SECRET, 60.0)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert set(told) == {b""}


def test_idle_strangers_do_not_keep_ranks_out() -> None:
    host = StoreHost(LOCALHOST, SECRET)
    before = psutil.Process().num_fds()
    strangers = [knock(host) for _ in range(300)]
    try:
        store = member(host)
        store.set("key", b"value")
        assert store.get("key") == b"value"
        assert psutil.Process().num_fds() - before - len(strangers) < 100, "the host keeps few of them open"
    finally:
        for each in strangers:
            each.close()


@pytest.mark.parametrize(
    "said",
    [
        (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"),
        frame(b"\xc1", 9),
        request({"no": "request"}),
        request(Get(["g1/key"]))[:-1],
    ],
    ids=["too large", "no message", "no request", "cut off"],
)
def test_nonsense_of_a_member_ends_its_connection_alone(said: bytes) -> None:
    host = StoreHost(LOCALHOST, SECRET)
    store, connection = member(host), StoreConnection(host.address, SECRET, 60.0)
    store.set("key", b"value")
    connection._socket.sendall(said)
    connection._socket.shutdown(socket.SHUT_WR)
    assert read_all(connection._socket) == b""
    assert store.get("key") == b"value"


def test_connection_that_ends_while_it_waits_is_closed_at_both_ends() -> None:
    host = StoreHost(LOCALHOST, SECRET)
    connection = StoreConnection(host.address, SECRET, 60.0)
    connection._socket.sendall(request(Get(["g1/never"])))
    connection._socket.shutdown(socket.SHUT_WR)
    assert read_all(connection._socket) == b"", "the host closes it"
    store = member(host)
    store.set("never", b"now")
    assert store.get("never") == b"now"


def test_store_that_nobody_has_any_more_is_closed() -> None:
    process, before = psutil.Process(), set(threading.enumerate())
    descriptors = process.num_fds()
    host = StoreHost(LOCALHOST, SECRET)
    store = member(host)
    store.set("key", b"value")
    (thread,) = set(threading.enumerate()) - before
    del host
    thread.join(60)
    with pytest.raises(ConnectionError):
        store.check(["key"])
    del store
    assert process.num_fds() <= descriptors


def test_value_arrives_at_all_who_wait_for_it() -> None:
    host = StoreHost(LOCALHOST, SECRET)
    found: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(member(host).multi_get(["a", "b"]))) for _ in range(5)]
    for each in threads:
        each.start()
    store = member(host)
    store.set("b", b"2")
    assert not store.check(["a", "b"])
    store.set("a", b"1")
    for each in threads:
        each.join()
    assert found == [[b"1", b"2"]] * 5


class _Stranger(GenerationStore):
    """A rank that has not read in the store what the others show each other."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        told = [each.split(b" ", 2) for each in super().multi_get(keys)]
        if all(len(each) == 3 for each in told) and keys[0] == "rank/0":
            return [b" ".join((address, nonce().hex().encode(), gpu)) for address, _, gpu in told]
        return super().multi_get(keys)


def test_who_connects_as_a_rank_and_cannot_have_read_the_store_is_refused() -> None:
    host = StoreHost(LOCALHOST, SECRET)
    raised: dict[int, BaseException] = {}

    def enter(rank: int) -> None:
        make = _Stranger if rank == 1 else GenerationStore
        store = make(StoreClient(SECRET).take(host.address, 60.0), 1)
        try:
            GlooCommunicator(
                generation=1, rank=rank, size=2, groups=[], store=store, host=LOCALHOST, timeout_s=60.0
            )  # fmt: skip
        except CommunicationError as error:
            raised[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert str(raised[0]) == "rank 0: who connected as rank 1 is somebody else (generation 1)"


@pytest.mark.parametrize("size", [2, 7])
def test_rank_asks_once_for_what_a_group_leaves_and_gets_little_of_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks there are: an address and a number of each."""
    asked: list[tuple[Request, Answer]] = []
    ask = StoreConnection.ask

    def ask_and_remember(self: StoreConnection, request: Request) -> Answer:
        asked.append((request, ask(self, request)))
        return asked[-1][1]

    monkeypatch.setattr(StoreConnection, "ask", ask_and_remember)
    for comm in as_threads(size, lambda rank, address: join(address, rank, size)):
        comm.close()
    kinds = Counter(type(request) for request, _ in asked if not isinstance(request, Forget))
    assert kinds == {Set: 2 * size, Get: size, Cut: size}
    left = {len(value) for request, _ in asked if isinstance(request, Set) for value in request.values.values()}
    told = [answer for request, answer in asked if isinstance(request, Cut)]
    assert {len(each) for answer in told if isinstance(answer, list) for each in answer} == {max(left) - 8 * (size - 1)}


def test_what_gloo_would_leave_otherwise_is_read_as_it_is() -> None:
    host = StoreHost(LOCALHOST, SECRET)
    ours, theirs = (GroupStore(member(host), "group", rank, 2) for rank in range(2))
    ours.set("0/0", b"of another form")
    theirs.set("0/1", "and this")
    assert [ours.get("0/1"), theirs.get("0/0")] == [b"and this", b"of another form"]
    assert ours.check(["0/0", "0/1"])
    assert not ours.check(["0/2"])
