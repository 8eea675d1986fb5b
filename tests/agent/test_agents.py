"""Who may speak as a node: the agent that was given its number, and nobody else who has the job's token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest

from resilient.agent.journal.stimulus_log import read_stimuli
from resilient.agent.membership.parts.events import NodeConnected
from resilient.agent.network.conversation import Attached, Hello, decode_attached, decode_first_answer
from resilient.agent.network.introductions import Introduce, Introduced
from resilient.protocol.messages import Failed, FromWorker, Note, Ready, Shutdown, encode
from tests.agent.membership.simulated import job_spec
from tests.agent.served import HELLO, Served, decode_to_agent, with_coordinator

KEYED = msgspec.structs.replace(HELLO, key="of one agent alone")


async def answer_to(served: Served, hello: Hello) -> Attached:
    socket = await served.open()
    await socket.send_bytes(encode(hello))
    return decode_attached(await socket.receive_bytes())


@pytest.mark.parametrize("num_heard", [0, 1])
def test_who_has_the_token_does_not_get_a_nodes_place_by_its_number(tmp_path: Path, num_heard: int) -> None:
    async def scenario(served: Served) -> None:
        agent = await served.open()
        await agent.send_bytes(encode(KEYED))
        await agent.receive_bytes()
        other = msgspec.structs.replace(HELLO, key="another", node=0, num_heard=num_heard)
        assert (await answer_to(served, other)).is_new
        assert (await answer_to(served, msgspec.structs.replace(other, key=""))).is_new
        assert [(await served.event("node_connected"))["node"] for _ in range(3)] == [0, 1, 2]
        await agent.send_bytes(encode(FromWorker(local_rank=0, message=Note(name="still", value="heard"))))
        assert (await served.event("note"))["value"] == "heard"
        await agent.close()
        assert not (await answer_to(served, msgspec.structs.replace(KEYED, node=0, num_heard=1))).is_new

    with_coordinator(tmp_path, scenario)


def test_key_of_an_agent_is_in_no_file_of_the_run(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await answer_to(served, KEYED)
        await served.event("node_connected")

    with_coordinator(tmp_path, scenario)
    told = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert b"NodeConnected" in told["stimuli.jsonl"]
    assert [name for name, content in told.items() if KEYED.key.encode() in content] == []


@pytest.mark.parametrize(
    "wrong", [{"num_workers": 0}, {"num_workers": 2**40}, {"bell_port": 65536}, {"bell_port": -1}], ids=str
)
def test_hello_with_numbers_that_cannot_be_is_not_heard(tmp_path: Path, wrong: dict[str, int]) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.open()
        await socket.send_bytes(encode(msgspec.structs.replace(HELLO, **wrong)))
        await socket.receive()
        assert socket.closed
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)


def test_agent_that_hangs_up_before_it_says_who_it_is_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.open()
        host, port = socket.get_extra_info("sockname")
        await socket.close()
        assert f"an agent at {host}:{port} did not introduce itself: it hung up" in caplog.messages
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)


async def come(served: Served, port: int) -> tuple[aiohttp.ClientWebSocketResponse[bool], Sequence[str]]:
    """Come as a node whose doorbell is at a port; return whose doors it was to ring at."""
    socket = await served.open()
    await socket.send_bytes(encode(msgspec.structs.replace(HELLO, address="127.0.0.1", is_chosen=True)))
    asked = decode_first_answer(await socket.receive_bytes())
    assert isinstance(asked, Introduce)
    await socket.send_bytes(encode(Introduced(port=port)))
    assert decode_attached(await socket.receive_bytes()).is_new
    return socket, asked.peers


def test_nodes_are_introduced_to_those_that_train_and_not_to_visitors(tmp_path: Path) -> None:
    """Who tells an address that nobody reaches would keep others from joining."""

    async def scenario(served: Served) -> None:
        ready = Ready(job=job_spec(max_failures=0), store_address="h:1", pid=5, device="cpu")
        for port in (1, 2):
            socket, _ = await come(served, port)
            await socket.send_bytes(encode(FromWorker(local_rank=0, message=ready)))
        await served.event("generation")
        for visitor in (3, 4, 5):
            await come(served, visitor)
        _, peers = await come(served, 6)
        assert peers == ("127.0.0.1:1", "127.0.0.1:2")

    with_coordinator(tmp_path, scenario)


def test_port_that_cannot_be_is_told_to_no_other_node(tmp_path: Path) -> None:
    """It would end the agents that try it."""

    async def scenario(served: Served) -> None:
        visitor = await served.open()
        await visitor.send_bytes(encode(msgspec.structs.replace(HELLO, address="127.0.0.1", is_chosen=True)))
        await visitor.receive_bytes()
        await visitor.send_bytes(encode(Introduced(port=99999)))
        await visitor.receive()
        assert visitor.closed
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)


def test_node_that_is_introduced_while_the_job_ends_is_told_that_and_not_refused(tmp_path: Path) -> None:
    """Whom it was to reach has gone with the job."""

    async def scenario(served: Served) -> None:
        socket, _ = await come(served, 1)
        late = await served.open()
        await late.send_bytes(encode(msgspec.structs.replace(HELLO, address="127.0.0.1", is_chosen=True)))
        asked = decode_first_answer(await late.receive_bytes())
        assert isinstance(asked, Introduce)
        assert asked.peers == ("127.0.0.1:1",)
        await socket.send_bytes(encode(FromWorker(local_rank=0, message=Failed(error="a mistake"))))
        await served.event("stopped")
        await late.send_bytes(encode(Introduced(port=2, failures=("127.0.0.1:2 cannot connect to 127.0.0.1:1",))))
        assert decode_attached(await late.receive_bytes()).is_new
        assert decode_to_agent(await late.receive_bytes()) == Shutdown(exit_code=0, reason="the job is over")
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)


def test_node_is_told_of_with_how_many_are_at_the_door_behind_it(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        waiting = [await served.open() for _ in range(2)]
        host, port = served.coordinator.address.split(":")
        _, stranger = await asyncio.open_connection(host, int(port))
        await answer_to(served, HELLO)
        stranger.close()
        await waiting[0].close()
        await waiting[1].send_bytes(encode(HELLO))
        await waiting[1].receive_bytes()
        assert [(await served.event("node_connected"))["node"] for _ in range(2)] == [0, 1]

    with_coordinator(tmp_path, scenario)
    _, told = read_stimuli(tmp_path / "stimuli.jsonl")
    assert [each.num_behind for _, each in told if isinstance(each, NodeConnected)] == [3, 0]
