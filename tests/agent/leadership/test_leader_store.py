"""Who leads, in a real etcd: of those who stand one is elected, for as long as its lease is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilient.agent.leadership.leader_store import Leader, LeaderStore, check_store
from resilient.common.network.etcd_connection import EtcdUnreachableError
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.mark.parametrize(
    "url", ["http://a:1/job", "etcd://a:1", "etcd:///job", "etcd://a:1/", "etcd://a:1/job?password=x"]
)
def test_store_that_does_not_have_the_form_is_refused(url: str) -> None:
    form = r"etcd://HOST[:PORT],.../PREFIX[?ca=FILE&certificate=FILE&key=FILE]"
    told = f"store must look like {form}, got {url!r}; give each job a prefix of its own"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        check_store(url)


def test_files_of_tls_are_checked_before_the_job_begins(tmp_path: Path) -> None:
    told = rf"^store must name files for TLS that can be read, got {tmp_path}/ca \(No such file or directory\); give"
    with pytest.raises(ValueError, match=told):
        check_store(f"etcd://a:1/job?ca={tmp_path}/ca")
    with pytest.raises(ValueError, match=r"^files for TLS must be an authority, .*, got key alone; add it$"):
        check_store("etcd://a:1/job?key=k")
    check_store("etcd://a:1,[::1]:2/jobs/mine")


@needs_etcd
def test_of_many_who_stand_at_once_one_is_elected(server: EtcdServer) -> None:
    stores = [LeaderStore(f"etcd://{server.endpoint}/many", 10) for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as threads:
        for after in (0, 1, 2):
            assert stores[0].leader() is None
            (elected,) = filter(None, threads.map(lambda store: store.stand("/run", 0, 60), stores))
            assert elected.term == after + 1
            assert stores[1].leader() == Leader(run="/run", term=elected.term)
            assert stores[2].announce(elected, told := Leader(run="/run", term=elected.term, address="h:1"))
            assert stores[3].leader() == told
            stores[0].resign(elected.lease)


@needs_etcd
def test_term_is_higher_than_all_that_are_known(server: EtcdServer) -> None:
    store = LeaderStore(f"etcd://{server.endpoint}/higher", 10)
    first = store.stand("/run", 4, 60)
    assert first is not None
    assert first.term == 5
    store.resign(first.lease)
    second = store.stand("/run", 0, 60)
    assert second is not None
    assert second.term == 6


@needs_etcd
def test_leader_whose_lease_is_over_is_none_and_can_say_nothing(server: EtcdServer) -> None:
    store = LeaderStore(f"etcd://{server.endpoint}/over", 10)
    first = store.stand("/run", 0, 60)
    assert first is not None
    assert 0 < store.refresh(first.lease) <= first.ttl_s
    store.resign(first.lease)  # as etcd does when its time is over
    assert store.refresh(first.lease) == 0
    assert not store.announce(first, Leader(run="/run", term=1, address="h:1"))
    assert store.stand("/run", 0, 60) is not None
    assert not store.announce(first, Leader(run="/run", term=1, address="h:1"))


@needs_etcd
def test_something_else_under_the_prefix_is_named(server: EtcdServer) -> None:
    store = LeaderStore(f"etcd://{server.endpoint}/other", 10)
    elected = store.stand("/run", 0, 60)
    assert elected is not None
    nested = LeaderStore(f"etcd://{server.endpoint}/other/leader", 10)
    nested._leader_key = "/other/term"
    with pytest.raises(ValueError, match=r"^store must have a prefix of its own, got /other/term = b'1'; choose"):
        nested.leader()


@needs_etcd
def test_any_server_that_answers_will_do(server: EtcdServer) -> None:
    for attempt in range(6):  # which one is asked first is chance
        store = LeaderStore(f"etcd://127.0.0.1:1,{server.endpoint},127.0.0.1:2/any", 10)
        elected = store.stand("/run", 0, 60)
        assert elected is not None
        assert elected.term == attempt + 1
        store.resign(elected.lease)
        assert store.leader() is None


def test_etcd_that_does_not_answer_is_named() -> None:
    with pytest.raises(EtcdUnreachableError, match=r"^etcd must answer at 127\.0\.0\.1:1, got "):
        LeaderStore("etcd://127.0.0.1:1/job", 1).leader()
