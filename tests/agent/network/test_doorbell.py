"""Two ends that try each other over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from resilient.agent.network.doorbell import Doorbell, can_ring
from resilient.agent.network.introductions import Introduce, chosen_peers, introduce_oneself, why_refused

HOST = "127.0.0.1"


def play(story: Callable[[Doorbell, Doorbell], Awaitable[None]], tokens: tuple[str, str] = ("t", "t")) -> None:
    async def run() -> None:
        ours, theirs = map(Doorbell, tokens)
        await ours.open(HOST, "")
        await theirs.open(HOST, "")
        try:
            await asyncio.wait_for(story(ours, theirs), 60)
        finally:
            ours.close()
            theirs.close()

    asyncio.run(run())


def unused() -> str:
    with socket.create_server((HOST, 0)) as taken:
        return f"{HOST}:{taken.getsockname()[1]}"


def test_ends_that_reach_each_other_have_nothing_to_tell() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        assert await ours.ring(theirs.address) == await theirs.ring(ours.address) == ""
        assert await can_ring(ours.address, "t") == ""

    play(story)


def test_many_may_ring_at_once() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        assert set(await asyncio.gather(*(ours.ring(theirs.address) for _ in range(200)))) == {""}

    play(story)


@pytest.mark.parametrize(("refusals", "told"), [(3, ""), (1000, "No route to host")])
def test_machine_whose_link_has_just_come_back_is_given_a_moment_to_find_the_way(
    refusals: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, left = asyncio.open_connection, [refusals]

    async def sometimes(*where: Any, **accepted: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if where and left[0]:
            left[0] -= 1
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return await connect(*where, **accepted)

    monkeypatch.setattr(asyncio, "open_connection", sometimes)

    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        assert await can_ring(theirs.address, "t") == told

    play(story)


def test_way_that_does_not_work_is_told_with_its_direction() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        own, nobody = ours.address, unused()
        assert await ours.ring(nobody) == f"{own} cannot connect to {nobody} (Connection refused)"
        ours.close()  # it still connects to others
        ours.port = int(own.rpartition(":")[2])
        assert await ours.ring(theirs.address) == f"{theirs.address} cannot connect to {own} (Connection refused)"

    play(story)


def test_port_that_cannot_be_is_told_as_one_where_nobody_answers() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        assert await can_ring(f"{HOST}:70000", "t") == "it does not answer as a node of this job"

    play(story)


def test_who_has_another_token_is_nobody_of_the_job_at_either_end() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        told = "it does not answer as a node of this job"
        assert await ours.ring(theirs.address) == f"{ours.address} cannot connect to {theirs.address} ({told})"
        assert await can_ring(theirs.address, "t") == told

    play(story, ("t", "u"))


def test_stranger_has_nobody_connect_anywhere() -> None:
    async def story(ours: Doorbell, _: Doorbell) -> None:
        with socket.create_server((HOST, 0)) as listening:
            listening.setblocking(False)
            reader, writer = await asyncio.open_connection(HOST, ours.port)
            address = "{}:{}".format(*listening.getsockname()).encode()
            writer.write(bytes(64) + len(address).to_bytes(2, "big") + address)
            assert len(await reader.read()) == 32, "its number, and then nothing"
            writer.close()
            try:
                listening.accept()
            except BlockingIOError:
                return
        raise AssertionError("somebody has connected")

    play(story)


def test_who_listens_where_a_node_was_cannot_pass_on_to_another_what_comes_there() -> None:
    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while said := await source.read(4096):
                target.write(said)
        target.close()

    async def story(_: Doorbell, theirs: Doorbell) -> None:
        async def sit_between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_node, to_node = await asyncio.open_connection(HOST, theirs.port)
            await asyncio.gather(pass_on(reader, to_node), pass_on(from_node, writer))

        async with await asyncio.start_server(sit_between, HOST, 0) as stranger:
            address = "{}:{}".format(*stranger.sockets[0].getsockname())
            assert await can_ring(address, "t") == "it does not answer as a node of this job"

    play(story)


def test_crowd_of_strangers_keeps_no_node_out() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        crowd = [await asyncio.open_connection(HOST, theirs.port) for _ in range(400)]
        assert await ours.ring(theirs.address) == ""
        for _, writer in crowd:
            writer.close()

    play(story)


def test_one_peer_that_is_reached_will_do_and_failures_are_told_of_all() -> None:
    async def story(ours: Doorbell, theirs: Doorbell) -> None:
        nobody, nobody_else = unused(), unused()
        asked = Introduce(peers=(nobody, theirs.address), ports="")
        told = await introduce_oneself(asked, ours, HOST)
        assert (told.port, told.failures) == (ours.port, ())
        asked = Introduce(peers=(nobody, nobody_else), ports="1:2")
        told = await introduce_oneself(asked, ours, HOST)
        assert sorted(told.failures) == sorted(
            f"{ours.address} cannot connect to {each} (Connection refused)" for each in asked.peers
        )
        reason = await why_refused(asked, told, HOST, "t", is_chosen=True)
        assert reason.startswith(f"a node and the others must reach each other, got {'; '.join(told.failures)}; open ")
        assert f"open ports 1:2 between the job's machines, both ways, or give another address of {HOST}'s" in reason

    play(story)


def test_first_node_is_tried_by_the_coordinator_unless_its_address_was_chosen() -> None:
    async def story(ours: Doorbell, _: Doorbell) -> None:
        asked = Introduce(peers=(), ports="")
        told = await introduce_oneself(asked, ours, HOST)
        assert await why_refused(asked, told, HOST, "t", is_chosen=False) == ""
        ours.close()
        refused = f"got the coordinator cannot connect to {HOST}:{told.port} (Connection refused); open all ports ("
        assert refused in await why_refused(asked, told, HOST, "t", is_chosen=False)
        assert await why_refused(asked, told, HOST, "t", is_chosen=True) == ""

    play(story)


def test_peers_are_of_early_and_of_late_nodes() -> None:
    bells = [str(node) for node in range(9)]
    assert [chosen_peers(bells[:count]) for count in range(4)] == [(), ("0",), ("0", "1"), ("0", "1", "2")]
    assert chosen_peers(bells) == ("0", "4", "8")
