"""The coordinator's port: who may speak, and what nonsense costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest

from resilient.agent import coordinator
from resilient.agent.coordinator import Coordinator
from resilient.agent.journal.term import Term
from resilient.agent.membership import regrouping
from resilient.agent.membership.parts.events import (
    FailureWanted,
    ManifestFailed,
    ManifestWritten,
    Stop,
    StopWanted,
    Tick,
    WriteManifest,
)
from resilient.agent.network.conversation import GOODBYE, Attached, Heard, Hello, decode_attached
from resilient.common.job_certificate import client_context
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FromWorker,
    Injection,
    Kill,
    Ready,
    Shutdown,
    Welcome,
    encode,
)
from resilient.state.manifest import Manifest, read_manifest
from resilient.templates.plan import PlanningProblem
from tests.agent.membership.simulated import RECIPE, job_spec, settings
from tests.agent.served import HELLO, TOKEN, Served, decode_to_agent, make_ready, with_coordinator

CLOSINGS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)


@pytest.mark.parametrize("path", ["/agent", "/status"])
@pytest.mark.parametrize("authorization", ["Bearer wrong", "", "Bearer sécret"])
def test_wrong_token_is_turned_away(tmp_path: Path, path: str, authorization: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.session.get(served.url(path), headers={"Authorization": authorization}) as answer:
            assert answer.status == 401

    with_coordinator(tmp_path, scenario)


def test_header_that_is_no_text_is_turned_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(served: Served) -> None:
        host, _, port = served.coordinator.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(TOKEN))
        writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()

    with_coordinator(tmp_path, scenario)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("local_rank", [-1, 1, 99])
def test_agent_that_speaks_for_a_worker_it_does_not_have_is_done_without(tmp_path: Path, local_rank: int) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.connect()
        ready = Ready(job=job_spec(), store_address="h:1", pid=5, device="cpu")
        await socket.send_bytes(encode(FromWorker(local_rank=local_rank, message=ready)))
        assert (await served.event("node_lost"))["node"] == 0

    with_coordinator(tmp_path, scenario)


def test_job_file_is_private_and_says_where_to_connect(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        file = tmp_path / "job.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        job = json.loads(file.read_text())
        assert (job["address"], job["token"]) == (served.coordinator.address, TOKEN)

    with_coordinator(tmp_path, scenario)


def test_address_that_others_can_reach_is_told(tmp_path: Path) -> None:
    async def play() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        served = Coordinator(
            settings(run_directory=str(tmp_path), num_nodes=2), TOKEN, events.append, Term.claim(tmp_path)
        )
        await served.start("0.0.0.0", 0)
        await served.close()
        assert [event["address"] for event in events] == [served.address]
        return events

    assert [event["kind"] for event in asyncio.run(play())] == ["listening"]


@pytest.mark.parametrize("data", [b"\xc1", b"", encode(HELLO), encode(Shutdown(exit_code=0, reason=""))])
def test_nonsense_costs_a_connection_and_said_again_the_node(tmp_path: Path, data: bytes) -> None:
    async def scenario(served: Served) -> None:
        good, bad = await served.connect(), await served.connect()
        await bad.send_bytes(data)
        assert (await bad.receive()).type in CLOSINGS
        again = await served.resume(node=1, num_heard=1)
        await again.send_bytes(data)
        assert (await served.event("node_lost"))["node"] == 1
        assert (await again.receive()).type in CLOSINGS
        ready = Ready(job=job_spec(), store_address="h:1", pid=5, device="cpu")
        await good.send_bytes(encode(FromWorker(local_rank=0, message=ready)))
        assert (await served.event("node_ready"))["node"] == 0

    with_coordinator(tmp_path, scenario)


@pytest.mark.parametrize("data", [encode(Heard(num_messages=2)), encode(Heard(num_messages=-1))])
def test_agent_that_speaks_out_of_turn_is_lost(tmp_path: Path, data: bytes) -> None:
    async def scenario(served: Served) -> None:
        good, bad = await served.connect(), await served.connect()
        await bad.send_bytes(data)
        assert (await served.event("node_lost"))["node"] == 1
        assert (await bad.receive()).type in CLOSINGS
        assert not good.closed

    with_coordinator(tmp_path, scenario)


def test_oversize_message_closes_that_connection_only(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        good, bad = await served.connect(), await served.connect()
        with contextlib.suppress(ConnectionError):  # the header alone is enough to be refused
            await bad.send_bytes(bytes(MAX_MESSAGE_BYTES + 1))
        assert (await bad.receive()).type in CLOSINGS
        assert not good.closed

    with_coordinator(tmp_path, scenario)


@pytest.mark.parametrize(
    "first",
    [b"\xc1", encode(FromWorker(local_rank=0, message=Ready(job=job_spec(), store_address="", pid=1, device="cpu")))],
)
def test_agent_that_does_not_introduce_itself_gets_no_number(tmp_path: Path, first: bytes) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.open()
        await socket.send_bytes(first)
        assert (await socket.receive()).type in CLOSINGS
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)


def test_text_where_bytes_belong_closes_the_connection(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.open()
        await socket.send_str("hello")
        assert (await socket.receive()).type in CLOSINGS

    with_coordinator(tmp_path, scenario)


def test_agent_that_begins_anew_gets_a_new_number_and_its_old_connection_is_dead(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.connect()
        again = await served.open()
        await again.send_bytes(encode(Hello(host="h", pid=1, num_workers=1, node=0)))
        assert decode_attached(await again.receive_bytes()) == Attached(is_new=True, num_heard=0, term=1)
        welcome = decode_to_agent(await again.receive_bytes())
        assert isinstance(welcome, Welcome)
        assert welcome.node == 1
        assert (await served.event("node_lost"))["node"] == 0

    with_coordinator(tmp_path, scenario)


def test_process_that_ended_is_lost_with_its_connection_and_says_nothing_of_a_later_one_of_its_number(
    tmp_path: Path,
) -> None:
    async def scenario(served: Served) -> None:
        served.coordinator.note_agent_ended(HELLO.pid)
        connection = await served.open()
        await connection.send_bytes(encode(msgspec.structs.replace(HELLO, host=socket.gethostname())))
        await connection.receive_bytes()
        await connection.close()
        again = await served.resume(node=0, num_heard=1)
        served.coordinator.note_agent_ended(HELLO.pid)
        await again.close()
        assert (await served.event("node_lost"))["node"] == 0

    with_coordinator(tmp_path, scenario)


def test_injection_over_http_reaches_the_agent(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.connect()
        ready = Ready(job=job_spec(), store_address="h:1", pid=5, device="cpu")
        await socket.send_bytes(encode(FromWorker(local_rank=0, message=ready)))
        await served.event("node_ready")
        for worker in (-1, 1):
            body = {"node": 0, "worker_only": True, "worker": worker}
            async with served.session.post(served.url("/inject"), json=body) as answer:
                assert answer.status == 404
                assert await answer.text() == f"worker must be 0 to 0 on node 0, got {worker}"
        async with served.session.post(served.url("/inject"), json={"node": 0}) as answer:
            assert answer.status == 200
        assert isinstance(decode_to_agent(await socket.receive_bytes()), Kill)

    with_coordinator(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("{}", 400, "cannot read the injection: "),
        ('{"node": "0"}', 400, "cannot read the injection: "),
        ('{"node": 0, "at_phase": "lunch"}', 400, "phase must be one of forward, send"),
        ('{"node": 5}', 404, "node must be a live one, got 5; no node is connected"),
    ],
)
def test_bad_injection_is_explained(tmp_path: Path, body: str, status: int, text: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.session.post(served.url("/inject"), data=body) as answer:
            assert answer.status == status
            assert re.search(text, await answer.text())

    with_coordinator(tmp_path, scenario)


def test_departure_asked_for_over_http_is_announced(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.connect()
        async with served.session.post(served.url("/leave"), json={"node": 0}) as answer:
            assert answer.status == 200
        assert (await served.event("node_leaving"))["reason"] == "asked to leave"
        assert decode_to_agent(await socket.receive_bytes()) == Shutdown(exit_code=0, reason="left")

    with_coordinator(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ('{"node": 0.5}', 400, "cannot read the departure: "),
        ('{"node": 5}', 404, "node must be a live one, got 5; no node is connected"),
    ],
)
def test_bad_departure_is_explained(tmp_path: Path, body: str, status: int, text: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.session.post(served.url("/leave"), data=body) as answer:
            assert answer.status == status
            assert re.search(text, await answer.text())

    with_coordinator(tmp_path, scenario)


def test_port_is_served_while_plans_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = asyncio.Event(), threading.Event()

    async def scenario(served: Served) -> None:
        loop = asyncio.get_running_loop()

        def prepare(problem: PlanningProblem, num_nodes: int, most_chunks: int) -> None:
            loop.call_soon_threadsafe(asked.set)
            made.wait(20)

        monkeypatch.setattr(coordinator, "choose_and_prepare", prepare)
        try:
            await make_ready(served, min_pipeline_nodes=1)
            await asked.wait()
            async with served.session.get(served.url("/status")) as answer:
                assert (await answer.json())["generation"] == 0
        finally:
            made.set()
        assert (await served.event("generation"))["generation"] == 1

    with_coordinator(tmp_path, scenario)


def test_job_that_cannot_be_planned_is_stopped_with_the_reason(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await make_ready(served, min_pipeline_nodes=2)
        stopped = await served.event("stopped")
        assert stopped["exit_code"] == 3
        needed = "4 are needed, for 2 pipelines of 2 nodes (max_failures=1, min_pipeline_nodes=2)"
        assert stopped["reason"].startswith(f"2 nodes are live ([0, 1]), {needed}; start again with: ")

    with_coordinator(tmp_path, scenario)


def test_error_of_the_planner_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def form(*_: object) -> None:
        raise RuntimeError("no")

    async def scenario(served: Served) -> None:
        await make_ready(served, min_pipeline_nodes=1)
        stopped = await served.event("stopped")
        assert stopped["exit_code"] == 1
        assert stopped["reason"].startswith("the coordinator failed: RuntimeError('no'); start again with: ")

    monkeypatch.setattr(regrouping, "form", form)
    with_coordinator(tmp_path, scenario)


def test_stop_tells_everybody_and_gives_the_exit_code(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.connect()
        served.coordinator.feed(StopWanted(exit_code=130, reason="interrupted"))
        message = decode_to_agent(await socket.receive_bytes())
        assert message == Shutdown(exit_code=130, reason="interrupted")
        await socket.close(code=GOODBYE)
        assert await served.coordinator.wait() == 130

    with_coordinator(tmp_path, scenario)


def test_full_disk_keeps_the_log_from_growing_and_not_the_job_from_ending(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        (tmp_path / "events.jsonl").mkdir()
        served.coordinator.feed(StopWanted(exit_code=3, reason="enough"))
        assert (await served.event("stopped"))["reason"] == "enough"
        assert await served.coordinator.wait() == 3

    with_coordinator(tmp_path, scenario)


def test_machine_is_told_what_came_of_a_manifest(tmp_path: Path) -> None:
    there, nowhere = (str(tmp_path / name / "step-00000001") for name in ("there", "nowhere"))
    Path(there).mkdir(parents=True)
    manifest = Manifest(step=1, recipe=RECIPE, states={})
    wanted = [WriteManifest(path=path, manifest=manifest, nodes={}) for path in (there, nowhere)]

    async def scenario(served: Served) -> None:
        ends = [wanted, [], [Stop(exit_code=130, reason="resume")]]
        machine = served.coordinator._machine = Mock(handle=Mock(side_effect=ends))
        served.coordinator.feed(Tick())
        _, written, failed = (call.args[0] for call in machine.handle.call_args_list)
        assert written == ManifestWritten(path=there)
        assert isinstance(failed, ManifestFailed)
        assert (failed.path, "No such file" in failed.error) == (nowhere, True)
        assert read_manifest(there) == manifest
        assert await served.coordinator.wait() == 130

    with_coordinator(tmp_path, scenario)


def test_whoever_follows_the_events_cannot_keep_the_job_from_ending(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.coordinator._events._on_event = Mock(side_effect=RuntimeError("no"))
        socket = await served.open()
        await socket.send_bytes(encode(HELLO))
        assert await served.coordinator.wait() == 1

    with_coordinator(tmp_path, scenario)


def test_events_and_injections_of_the_dead_are_written_down(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        socket = await served.connect()
        line = {"time": 1.5, "node": 0, "phase": None, "step": None, "worker_only": False, "worker": None}
        (tmp_path / "injections.jsonl").write_text(json.dumps(line) + "\n")
        await socket.close(code=GOODBYE)
        await served.event("node_lost")
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [event["kind"] for event in events] == ["node_connected", "injected", "node_lost"]
        assert events[1] == {"kind": "injected", "generation": 0, **line}

    with_coordinator(tmp_path, scenario)


def test_injections_that_never_came_to_it_are_written_down_at_the_end(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.connect()
        for node in (0, 9):
            served.coordinator.feed(FailureWanted(injection=Injection(node=node, at_step=5, at_phase="commit")))
        line = {"time": 1.5, "node": 0, "phase": "commit", "step": 5, "worker_only": False, "worker": None}
        (tmp_path / "injections.jsonl").write_text(json.dumps(line) + "\n")
        served.coordinator.feed(StopWanted(exit_code=1, reason="enough"))
        for connection in served.sockets:
            await connection.close(code=GOODBYE)
        assert await served.coordinator.wait() == 1
        missed = await served.event("not_injected")
        del missed["time"]
        own = {"kind": "not_injected", "generation": 0}
        assert missed == {**own, "node": 9, "phase": "commit", "step": 5, "worker_only": False, "worker": None}
        assert served.events.empty()

    with_coordinator(tmp_path, scenario)
