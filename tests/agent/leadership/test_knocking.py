"""Where a node knocks when a real etcd says who leads its job: nowhere else, and not for longer than that is so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from resilient.agent.leadership.knocking import Door, session_for
from resilient.agent.leadership.leader_store import Leader, LeaderStore
from resilient.agent.leadership.office import Office, write_office
from resilient.common.job_certificate import server_context
from resilient.errors import ResilientError
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd

pytestmark = needs_etcd

HEARTBEAT_S = 60.0
"""So much that nobody is given up for silence in these tests."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where connections are taken, as by a process that is stopped, and nobody answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield "127.0.0.1:{1}".format(*listening.getsockname())


async def _serve_agents() -> tuple[web.AppRunner, str]:
    async def serve(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive()
        return connection

    app = web.Application()
    app.add_routes([web.get("/agent", serve)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context("t")).start()
    return runner, "127.0.0.1:{1}".format(*runner.addresses[0])


def _elect(server: EtcdServer, run: Path, address: str) -> tuple[LeaderStore, int]:
    store = LeaderStore(f"etcd://{server.endpoint}{run}", 10)
    elected = store.stand(str(run), 0, 600)
    assert elected is not None
    assert store.announce(elected, Leader(run=str(run), term=elected.term, address=address))
    return store, elected.lease


def test_node_that_knows_the_store_alone_finds_the_leader(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        runner, address = await _serve_agents()
        door = Door(f"etcd://{server.endpoint}{tmp_path}", HEARTBEAT_S)
        waits: list[object] = []

        def wait(waited_s: float, why: object) -> None:
            waits.append(why)
            if len(waits) == 2:
                assert door.vacant_s > 0
                _elect(server, tmp_path, address)

        async with session_for("t") as session, await door.knock(session, 0, wait) as connection:
            assert connection.get_extra_info("peername")[1] == int(address.rpartition(":")[2])
        assert waits == ["nobody leads the job"] * 2
        assert door.vacant_s == 0
        await runner.cleanup()

    asyncio.run(story())


def test_nobody_waits_at_an_address_that_is_no_leaders_any_more(
    server: EtcdServer, silent: str, tmp_path: Path
) -> None:
    """The folder's own file still names it, and the store is known from there."""

    async def story() -> None:
        heartbeat_s = 2.0
        store, lease = _elect(server, tmp_path, silent)
        url = f"etcd://{server.endpoint}{tmp_path}"
        write_office(tmp_path, Office(address=silent, token="t", pid=1, term=1, store=url))
        runner, address = await _serve_agents()
        door = Door(silent, heartbeat_s)
        door.run_directory = str(tmp_path)
        waits: list[object] = []

        def follow() -> None:
            store.resign(lease)
            _elect(server, tmp_path, address)

        async with session_for("t") as session:
            knocking = asyncio.create_task(door.knock(session, 1, lambda _, why: waits.append(why)))
            await asyncio.sleep(heartbeat_s / 4)  # it knocks
            assert not knocking.done()
            await asyncio.to_thread(follow)
            async with await knocking as connection:
                assert connection.get_extra_info("peername")[1] == int(address.rpartition(":")[2])
        assert waits == ["it does not answer"]
        await runner.cleanup()

    asyncio.run(story())


def test_leader_of_another_job_at_the_same_prefix_is_not_followed(server: EtcdServer, tmp_path: Path) -> None:
    async def story() -> None:
        runner, address = await _serve_agents()
        store, _ = _elect(server, tmp_path, "127.0.0.1:1")
        assert store.leader() == Leader(run=str(tmp_path), term=1, address="127.0.0.1:1")
        own = tmp_path / "own"
        own.mkdir()
        url = f"etcd://{server.endpoint}{tmp_path}"
        write_office(own, Office(address=address, token="t", pid=1, term=3, store=url))
        door = Door(url, HEARTBEAT_S)
        door.run_directory = str(own)
        async with session_for("t") as session, await door.knock(session, 2, lambda *_: None) as connection:
            assert connection.get_extra_info("peername")[1] == int(address.rpartition(":")[2])
        await runner.cleanup()

    asyncio.run(story())


def test_node_that_cannot_ask_the_store_says_so_and_over_which_link(tmp_path: Path) -> None:
    """That nobody leads the job is not known; nor is it when a coordinator whose address is known does not open."""

    async def story(address: str) -> None:
        store = f"127.0.0.1:{address.rpartition(':')[2]}"
        told = f"etcd must answer at {store}, got "
        waits: list[str] = []

        def wait(waited_s: float, why: object) -> None:
            waits.append(str(why))
            if len(waits) == 2:
                raise ResilientError("enough")

        door = Door(f"etcd://{store}/job", 0.5)
        async with session_for("t") as session:
            with pytest.raises(ResilientError, match=r"^enough$"):
                await door.knock(session, 0, wait)
            assert all(why.startswith(told) and f"(127.0.0.1 -> {store}: no answer yet" in why for why in waits), waits
            write_office(tmp_path, Office(address=address, token="t", pid=1, term=1, store=f"etcd://{store}/job"))
            door.run_directory = str(tmp_path)
            waits.clear()
            with pytest.raises(ResilientError, match=r"^enough$"):
                await door.knock(session, 0, wait)
        assert all(f"; {told}" in why for why in waits), waits

    with socket.socket() as unheard:  # nobody listens
        unheard.bind(("127.0.0.1", 0))
        asyncio.run(story("127.0.0.1:{1}".format(*unheard.getsockname())))
