"""``resilient status``, ``drain`` and ``stop``, of a coordinator that runs."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from resilient.agent.membership import lifecycle
from resilient.agent.membership.parts.events import StopWanted
from resilient.agent.network.conversation import Hello
from resilient.cli import operate
from resilient.common.job_certificate import client_context
from resilient.protocol.messages import encode
from tests.agent.served import TOKEN, Served, make_ready, with_coordinator


async def _said(*arguments: str) -> tuple[int, str]:
    """Run a command in a process of its own: one in a thread would share its streams with everybody here."""
    command = Path(sys.executable).with_name("resilient")
    process = await asyncio.create_subprocess_exec(command, *arguments, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    return await process.wait(), output.decode()


def test_status_tells_what_nodes_do(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await make_ready(served, max_failures=0)
        await served.event("generation")
        exit_code, text = await _said("status", "--run", str(tmp_path))
        assert exit_code == 0
        lines = text.splitlines()
        assert lines[0] == "installing: step 0, loss none yet"
        assert lines[1] == "generation 1: 1 pipeline on 2 nodes (2 training)"
        assert [line.split()[:4] for line in lines[3:]] == [["0", "h", "training", "0"], ["1", "h", "training", "0"]]
        exit_code, text = await _said("status", "--json", "--run", str(tmp_path))
        assert (exit_code, json.loads(text)["pipelines"]) == (0, [[0, 1]])

    with_coordinator(tmp_path, scenario)


def test_hosts_move_nobodys_cursor(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await (await served.open()).send_bytes(encode(Hello(host="h\x1b[2J", pid=1, num_workers=1)))
        await served.event("node_connected")
        _, text = await _said("status", "--run", str(tmp_path))
        assert "h\\x1b[2J" in text
        assert "\x1b" not in text

    with_coordinator(tmp_path, scenario)


def test_of_many_nodes_those_that_train_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "_MOST_NODES", 1)

    async def scenario(served: Served) -> None:
        await make_ready(served, max_failures=0)
        await served.event("generation")
        await served.connect()
        console = Console(width=120)
        with console.capture() as shown:
            console.print(operate._shown(await asyncio.to_thread(operate.ask, tmp_path, "status")))
        text = shown.get()
        assert "(2 training, 1 getting ready)" in text
        assert [line.split()[0] for line in text.splitlines()[3:]] == ["2"]

    with_coordinator(tmp_path, scenario)


def test_job_that_waits_for_its_nodes_has_no_generation(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        lines = (await _said("status", "--run", str(tmp_path)))[1].splitlines()
        assert lines == ["starting: step 0, loss none yet", "no generation yet: 0 nodes, 2 are needed"]
        await served.connect()
        lines = (await _said("status", "--run", str(tmp_path)))[1].splitlines()
        assert lines[1] == "no generation yet: 1 node (1 getting ready), 2 are needed"

    with_coordinator(tmp_path, scenario)


def test_drained_nodes_leave(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await make_ready(served, max_failures=0)
        await served.event("generation")
        assert await _said("drain", "1", "--run", str(tmp_path)) == (0, "")
        assert (await served.event("node_leaving"))["node"] == 1
        exit_code, text = await _said("drain", "7", "--run", str(tmp_path))
        assert exit_code == 2
        assert "node must be one of the live nodes [0, 1], got 7" in text

    with_coordinator(tmp_path, scenario)


def test_job_that_is_over_has_no_nodes_to_drain_or_kill(tmp_path: Path) -> None:
    """Its last nodes may yet be leaving."""

    async def scenario(served: Served) -> None:
        await make_ready(served, max_failures=0)
        await served.event("generation")
        served.coordinator.feed(StopWanted(exit_code=1, reason="enough"))
        for command in (("drain", "1"), ("inject", "kill", "--node", "1")):
            exit_code, text = await _said(*command, "--run", str(tmp_path))
            assert exit_code == 2
            assert "the job is over" in text

    with_coordinator(tmp_path, scenario)


def test_stopped_job_is_interrupted_and_said_again_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_ONE_WISH_S", 0.0)

    async def scenario(served: Served) -> None:
        await make_ready(served, max_failures=0)
        await served.event("generation")
        assert await _said("stop", "--run", str(tmp_path)) == (0, "")
        assert (await served.event("interrupted"))["reason"] == "asked to stop"
        assert await _said("stop", "--run", str(tmp_path)) == (0, "")
        stopped = await served.event("stopped")
        assert stopped["exit_code"] == 130
        assert stopped["reason"].startswith("interrupted twice (asked to stop)")

    with_coordinator(tmp_path, scenario)


def test_metrics_need_the_token_and_health_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_ONE_WISH_S", 0.0)

    async def scenario(served: Served) -> None:
        async def get(path: str, headers: dict[str, Any]) -> tuple[int, str]:
            connector = aiohttp.TCPConnector(ssl=client_context(TOKEN))
            async with (
                aiohttp.ClientSession(headers=headers, connector=connector) as stranger,
                stranger.get(served.url(path)) as answer,
            ):
                return answer.status, await answer.text()

        assert (await get("/metrics", {}))[0] == 401
        assert await get("/healthz", {}) == (200, "ok")
        await make_ready(served, max_failures=0)
        await served.event("generation")
        async with served.session.get(served.url("/metrics")) as answer:
            assert "resilient_training_nodes 2.0" in (await answer.text()).splitlines()
        for _ in range(2):
            await _said("stop", "--run", str(tmp_path))
        await served.event("stopped")
        assert await get("/healthz", {}) == (503, "the job is over")

    with_coordinator(tmp_path, scenario)
