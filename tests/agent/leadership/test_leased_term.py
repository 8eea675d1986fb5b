"""A term in a real etcd: by its own clock its holder is out of office before anybody else can be elected."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient.agent.journal.term import DeposedError, Term, newest_term
from resilient.agent.leadership.leader_store import Leader, LeaderStore
from resilient.agent.leadership.leased_term import LeasedTerm
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd

pytestmark = needs_etcd

LONG_S, SHORT_S = 20.0, 0.8
"""Heartbeats; a lease is three."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def win(server: EtcdServer, run: Path, heartbeat_s: float = LONG_S, clock: Clock | None = None) -> LeasedTerm:
    url = f"etcd://{server.endpoint}{run}"
    term = await LeasedTerm.win(url, run, heartbeat_s, *([] if clock is None else [clock]))
    assert term is not None
    return term


def is_in_office(term: LeasedTerm) -> bool:
    try:
        with term.in_office():
            return True
    except DeposedError:
        return False


def test_term_is_that_of_the_store_and_of_the_folder(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        for number in (1, 2):
            term = await win(server, tmp_path)
            assert (term.number, newest_term(tmp_path)) == (number, number)
            assert is_in_office(term)
            assert await LeasedTerm.win(f"etcd://{server.endpoint}{tmp_path}", tmp_path, LONG_S) is None
            await term.announce("h:1")
            told = LeaderStore(f"etcd://{server.endpoint}{tmp_path}", 10).leader()
            assert told == Leader(run=str(tmp_path), term=number, address="h:1")
            term.close()  # the next is elected at once

    asyncio.run(story())


def test_office_ends_a_sixth_before_the_lease_by_its_own_clock(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        clock = Clock()
        term = await win(server, tmp_path, clock=clock)
        clock.now += 3 * LONG_S * 5 / 6 - 1
        assert is_in_office(term)
        clock.now += 2
        with pytest.raises(DeposedError, match=r"^the lease of term 1 is over: another coordinator may lead this job$"):
            term.in_office().__enter__()
        term.close()
        assert await LeasedTerm.win(f"etcd://{server.endpoint}{tmp_path}", tmp_path, LONG_S) is None, "the lease is on"

    asyncio.run(story())


def test_lease_is_kept_for_as_long_as_the_loop_runs(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        term = await win(server, tmp_path, SHORT_S)
        store = LeaderStore(f"etcd://{server.endpoint}{tmp_path}", 10)
        await asyncio.sleep(3 * SHORT_S * 2)
        assert is_in_office(term)
        assert store.leader() is not None
        time.sleep(3 * SHORT_S)  # the loop hangs
        assert not is_in_office(term)
        term.close()

    asyncio.run(story())


def test_who_cannot_refresh_is_out_of_office_before_another_is_elected(tmp_path: Path) -> None:
    """etcd stands still and wakes up; at each moment at most one of two is in office."""

    async def story(server: EtcdServer) -> None:
        first = await win(server, tmp_path, SHORT_S)
        server.send(signal.SIGSTOP)
        while is_in_office(first):
            await asyncio.sleep(0.02)
        server.send(signal.SIGCONT)
        second: LeasedTerm | None = None
        while second is None:
            second = await LeasedTerm.win(f"etcd://{server.endpoint}{tmp_path}", tmp_path, SHORT_S)
            assert second is None or not is_in_office(first)
        assert (second.number, is_in_office(first), is_in_office(second)) == (2, False, True)
        first.close()
        second.close()

    with etcd_server(tmp_path / "etcd") as server:
        asyncio.run(story(server))


def test_whoever_took_the_folder_without_the_store_deposes_who_was_elected(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        term = await win(server, tmp_path)
        Term.claim(tmp_path).close()
        with pytest.raises(DeposedError, match=r"^another coordinator has taken this job over \(term 2 in "):
            term.in_office().__enter__()
        term.close()
        assert (await win(server, tmp_path)).number == 3

    asyncio.run(story())


def test_leader_that_nobody_can_find_does_not_begin(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        term = await win(server, tmp_path)
        store = LeaderStore(f"etcd://{server.endpoint}{tmp_path}", 10)
        assert term._election is not None
        store.resign(term._election.lease)
        with pytest.raises(DeposedError, match=r"^the lease of term 1 is over: "):
            await term.announce("h:1")
        term.close()

    asyncio.run(story())
