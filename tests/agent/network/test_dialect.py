"""Agents and coordinators that would misunderstand each other find out before anything is said."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from resilient.agent.leadership import knocking
from resilient.agent.network import dialect as spoken
from resilient.agent.network.dialect import REFUSED, SPOKEN, dialect
from resilient.agent.node import NodeAgent, NodeOptions
from resilient.protocol.messages import ToAgentMessage
from tests.agent.served import TOKEN, Served, with_coordinator

OTHER = "9.9.9/0123456789ab"
FIX = "install the same versions of resilient and msgspec on all nodes"


def told(got: str) -> str:
    return f"an agent must exchange the messages of its coordinator, {dialect()}, got {got}; {FIX}"


@pytest.mark.parametrize(
    ("headers", "got"), [({}, "those of an old version"), ({SPOKEN: OTHER}, OTHER)], ids=["none", "another"]
)
def test_agent_of_another_dialect_is_refused_with_the_reason(headers: dict[str, str], got: str, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for _ in range(2):
            with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
                await served.session.ws_connect(served.url("/agent"), headers=headers)
            assert raised.value.status == 426
            assert raised.value.headers is not None
            assert raised.value.headers[REFUSED] == told(got)
        event = await served.event("node_refused")
        assert (event["host"], event["reason"]) == ("127.0.0.1", told(got))
        assert served.events.empty(), "it is told once, however often an agent tries"

    with_coordinator(tmp_path, scenario)


def test_agent_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knocking, "dialect", lambda: OTHER)

    async def scenario(served: Served) -> None:
        options = NodeOptions(coordinator=served.coordinator.address, token=TOKEN)
        assert await NodeAgent(options).run() == 1

    with_coordinator(tmp_path, scenario)
    assert f"this node: {told(OTHER)}" in caplog.messages


def test_dialect_is_that_of_the_messages_and_not_of_what_is_told_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_messages(*messages: object) -> str:
        monkeypatch.setattr(spoken, "_MESSAGES", messages)
        return spoken.dialect.__wrapped__()

    class Said(msgspec.Struct, tag="Said"):
        """In some words."""

        number: int

    class InOtherWords(msgspec.Struct, tag="Said"):
        """In others."""

        number: int

    class Longer(msgspec.Struct, tag="Said"):
        number: int
        more: str = ""

    InOtherWords.__name__ = Longer.__name__ = "Said"
    assert with_messages(Said, ToAgentMessage) == with_messages(InOtherWords, ToAgentMessage)
    assert with_messages(Longer, ToAgentMessage) != with_messages(Said, ToAgentMessage)
