"""The worker's client against a real Unix-domain socket."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from resilient.errors import ControlError
from resilient.protocol.agent_client import AgentClient, decode_attach, frame, socket_address
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Arm,
    Finish,
    Injection,
    Note,
    PackedGeneration,
    Regroup,
    ToWorkerMessage,
    decode_from_worker,
    encode,
)


class FakeAgent:
    """The agent's end of one worker's connection."""

    def __init__(self) -> None:
        self.name = f"resilient-test-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(socket_address(self.name))
        self.listener.listen()
        self.lost = threading.Event()

    def connect(self) -> AgentClient:
        client = AgentClient(
            self.name, token="secret", node=3, local_rank=1, run_directory="runs/x", on_lost=self.lost.set
        )
        self.connection, _ = self.listener.accept()
        self.attach = decode_attach(self.read())
        return client

    def read(self) -> bytes:
        size = int.from_bytes(self.connection.recv(4, socket.MSG_WAITALL), "big")
        return self.connection.recv(size, socket.MSG_WAITALL)

    def send(self, message: ToWorkerMessage) -> None:
        self.connection.sendall(frame(encode(message), MAX_MESSAGE_BYTES))

    def close(self) -> None:
        self.connection.close()
        self.listener.close()


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    agent = FakeAgent()
    yield agent
    agent.close()


def test_client_introduces_itself_and_exchanges_messages(agent: FakeAgent) -> None:
    client = agent.connect()
    assert (agent.attach.token, agent.attach.local_rank) == ("secret", 1)
    client.send(Note(name="accuracy", value=0.5))
    assert decode_from_worker(agent.read()) == Note(name="accuracy", value=0.5)
    agent.send(Finish())
    assert client.receive() == Finish()
    client.close()
    assert not agent.lost.is_set()


def test_worker_of_one_user_says_nothing_to_another(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of an agent that was killed is free for anybody."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ControlError, match=rf"cannot reach the node agent .*user {user} listens there"):
        agent.connect()
    agent.connection, _ = agent.listener.accept()
    assert agent.connection.recv(1) == b""


def test_regroup_is_announced_in_the_reader_thread_and_kept_for_the_main_thread(agent: FakeAgent) -> None:
    client = agent.connect()
    seen: list[tuple[Regroup, str]] = []
    called = threading.Event()

    def on_regroup(message: Regroup) -> None:
        seen.append((message, threading.current_thread().name))
        called.set()

    client.on_regroup = on_regroup
    agent.send(Regroup(generation=2))
    called.wait()
    assert seen == [(Regroup(generation=2), "agent-reader")]
    assert client.receive() == Regroup(generation=2)
    client.close()


def test_arm_goes_to_its_callback_only(agent: FakeAgent) -> None:
    client = agent.connect()
    armed: list[Arm] = []
    client.on_arm = armed.append
    arm = Arm(injection=Injection(node=3, at_step=5))
    agent.send(arm)
    agent.send(Finish())
    assert client.receive() == Finish()
    assert armed == [arm]
    client.close()


def test_receive_without_a_message_times_out(agent: FakeAgent) -> None:
    client = agent.connect()
    with pytest.raises(TimeoutError, match=r"no message from the node agent within 0\.01 s"):
        client.receive(timeout=0.01)
    client.close()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", ""),
        ((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), f"at most {MAX_MESSAGE_BYTES} bytes"),
        (frame(b"\xc1nonsense", MAX_MESSAGE_BYTES), "MessagePack data is malformed"),
        (frame(encode(PackedGeneration(rank=0, common=b"", base=7)), MAX_MESSAGE_BYTES), "got a difference to 7"),
    ],
)
def test_closed_or_nonsensical_connection_counts_as_lost(
    agent: FakeAgent, data: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = agent.connect()
    agent.connection.sendall(data)
    if not data:
        agent.connection.shutdown(socket.SHUT_RDWR)
    agent.lost.wait()
    assert told in caplog.text
    assert bool(told) == bool(caplog.messages)
    for _ in range(2):
        with pytest.raises(ControlError, match="the connection to the node agent is closed"):
            client.receive()
    client.close()


def test_oversize_message_is_refused_before_it_is_sent(agent: FakeAgent) -> None:
    client = agent.connect()
    with pytest.raises(ControlError, match=rf"at most {MAX_MESSAGE_BYTES} bytes"):
        client.send(Note(name="huge", value="x" * MAX_MESSAGE_BYTES))
    client.close()


def test_unreachable_agent_is_named() -> None:
    with pytest.raises(ControlError, match=r"^cannot reach the node agent at nobody: .*Connection refused$"):
        AgentClient("nobody", token="t", node=0, local_rank=0, run_directory="r")


def test_no_client_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_AGENT", raising=False)
    assert AgentClient.from_environment() is None


def test_worker_process_dies_with_its_agent(agent: FakeAgent) -> None:
    script = """
import threading
from resilient.protocol.agent_client import AgentClient
client = AgentClient.from_environment()
threading.Event().wait()
"""
    environment = {"RESILIENT_AGENT": agent.name, "RESILIENT_TOKEN": "t", "RESILIENT_NODE": "0", "LOCAL_RANK": "0"}
    environment = {**os.environ, **environment, "RESILIENT_RUN_DIR": "runs/x"}
    worker = subprocess.Popen([sys.executable, "-c", script], env=environment)
    agent.connection, _ = agent.listener.accept()
    agent.read()
    agent.connection.close()
    assert worker.wait() == 1
