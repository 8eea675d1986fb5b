"""Keys and values in a real etcd, as torch's own stores have them."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from resilient.common.network.etcd_connection import EtcdUnreachableError, KeptLease, endpoints, etcd_client
from resilient.rendezvous.etcd_store import EtcdStore
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def _store(server: EtcdServer, name: str, timeout_s: float = 20) -> EtcdStore:
    client = etcd_client(server.endpoint, timeout_s=5)
    return EtcdStore(client, f"/{name}/", timedelta(seconds=timeout_s), KeptLease(client, 60))


def _story(store: Store) -> list[object]:
    """Do a little of everything; return what came of it."""
    store.set("a", "1")
    told: list[object] = [store.get("a"), store.add("n", 3), store.add("n", -5), store.check(["a"]), store.check(["b"])]
    told += [store.compare_set("a", "1", "2"), store.compare_set("a", "1", "3"), store.get("a")]
    told += [store.compare_set("c", "", "new"), store.get("c")]
    store.wait(["c", "n"], timedelta(seconds=1))
    return told


@needs_etcd
def test_it_does_what_torchs_own_stores_do(server: EtcdServer) -> None:
    expected = _story(HashStore())
    assert _story(_store(server, "plain")) == expected
    store = _store(server, "below")
    told = _story(PrefixStore("round.0", store))
    assert told == expected
    assert store.get("round.0/c") == b"new"


@needs_etcd
def test_keys_are_counted_and_deleted(server: EtcdServer) -> None:
    for store in (HashStore(), _store(server, "deleted")):
        store.set("a", "1")
        store.set("b", "1")
        assert [store.num_keys(), store.delete_key("a"), store.delete_key("a"), store.check(["a"])] == [
            2,
            True,
            False,
            False,
        ]


@needs_etcd
def test_a_value_is_waited_for(server: EtcdServer) -> None:
    read, written = _store(server, "late"), _store(server, "late")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(read.get("key")))
    reader.start()
    written.set("other", "x")
    written.set("key", "value")
    reader.join(10)
    assert found == [b"value"]


@needs_etcd
def test_what_never_comes_is_told(server: EtcdServer) -> None:
    store = _store(server, "never", timeout_s=0.2)
    told = r"^key 'key' must come within 0.2 s, got none; see what its writer does$"
    with pytest.raises(LookupError, match=told):
        store.get("key")
    with pytest.raises(LookupError, match=told.replace("0.2", "0.1")):
        store.wait(["key"], timedelta(seconds=0.1))


@needs_etcd
def test_counts_of_many_at_once_are_not_lost(server: EtcdServer) -> None:
    def count() -> None:
        store = _store(server, "many")
        for _ in range(20):
            store.add("n", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert _store(server, "many").add("n", 0) == 80


@needs_etcd
def test_a_restart_of_the_server_is_outlived_as_long_as_a_store_may_wait(tmp_path: Path) -> None:
    with etcd_server(tmp_path / "etcd") as server:
        read, brief = _store(server, "restarted", timeout_s=60), _store(server, "restarted", timeout_s=0.2)
        brief.set("other", "x")
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(read.get("key")))
        reader.start()
        server.send(signal.SIGKILL)
        with pytest.raises(
            EtcdUnreachableError,
            match=rf"^etcd must answer at {server.endpoint}, got \w+ \(127\.0\.0\.1 -> {server.endpoint}: last "
            r"answer \d+ s ago(, now [^;]+)?\); start it, mend the network between, or name other endpoints$",
        ):
            brief.set("key", "lost")
        writer = threading.Thread(target=lambda: read.set("key", "value"))
        writer.start()
        server.start()
        writer.join(30)
        reader.join(30)
    assert found == [b"value"]


def test_endpoints_are_read() -> None:
    assert endpoints("one, two:80,[::1]:5,[::2]") == [("one", 2379), ("two", 80), ("[::1]", 5), ("[::2]", 2379)]


@pytest.mark.parametrize("text", ["", "one,", ":5", "one:x", "one:0", "one:65536", "one:²"])
def test_bad_endpoints_are_refused(text: str) -> None:
    message = (
        f"etcd's endpoints must be HOST[:PORT],..., got {text!r}; give one or more of HOST[:PORT], separated by commas"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        endpoints(text)


def test_a_certificate_has_a_key_and_an_authority() -> None:
    with pytest.raises(
        ValueError, match=r"^files for TLS must be an authority, and a certificate with its key, got cer"
    ):
        etcd_client("one", timeout_s=1, certificate="file")
