"""A worker that leaves a generation: what it keeps of it, and what it tells."""

from __future__ import annotations

import gc
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.protocol.messages import (
    Finish,
    FromWorkerMessage,
    Installed,
    Ready,
    Regroup,
    Report,
    StepDone,
    Suspect,
    ToWorkerMessage,
)
from tests.resilient.ranks import join, processes
from tests.resilient.runtime.test_worker import ScriptedClient, generation, make_worker
from tests.resilient.small import make_plan


@pytest.mark.parametrize("broken", [False, True])
def test_generation_that_was_left_is_freed_without_the_collector(tmp_path: Path, broken: bool) -> None:
    # what torch imports for its first step keeps frames, those of the caller among them
    make_worker(ScriptedClient(tmp_path, generation(), Finish()), num_steps=1).run()
    client = ScriptedClient(tmp_path, generation())
    worker = make_worker(client)
    sessions: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def leave_after_the_first_step(message: FromWorkerMessage) -> None:
        if isinstance(message, StepDone) and message.outcome.step == 1:
            session = worker._session
            assert session is not None
            sessions.extend([weakref.ref(session), weakref.ref(session.executor)])
            client.announce(Regroup(generation=2, at_boundary=not broken))
        elif isinstance(message, Report):
            alive.extend(session() is not None for session in sessions)
            client.inbox.append(Finish())

    client.hears = leave_after_the_first_step
    gc.disable()
    try:
        worker.run()
    finally:
        gc.enable()
    assert ("Suspect" in client.kinds()) is broken
    assert alive == [False, False]


def test_report_tells_of_the_steps_that_were_not_heard_of_and_still_count(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation())
    told: list[list[tuple[int, int]]] = []

    def change(message: FromWorkerMessage) -> None:
        if isinstance(message, StepDone) and message.outcome.step == 2:
            heard_step = 1 if message.generation == 1 else 0
            client.announce(Regroup(generation=message.generation + 1, at_boundary=True, heard_step=heard_step))
        elif isinstance(message, Report):
            told.append([(done.generation, done.outcome.step) for done in message.steps])
            client.inbox.append(generation(2) if len(told) == 1 else Finish())  # first, all is to be done again

    client.hears = change
    make_worker(client, num_steps=5).run()
    assert told == [[(1, 2), (1, 3)], [(2, 1), (2, 2), (2, 3)]]


def peer(index: int, pipe: Connection) -> None:
    """Be rank 1 or 2 of the worker's generation; once told so, send it something."""
    comm = join(pipe.recv(), 1 + index, 2, num_sources=1)
    pipe.recv()
    comm.send(torch.ones(1), 0, 7).wait()
    pipe.recv()


def test_worker_that_suspects_a_peer_keeps_its_other_connections_until_all_are_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient(tmp_path)
    worker = make_worker(client)
    received: list[float] = []

    def act(message: FromWorkerMessage) -> None:
        if isinstance(message, Ready):
            address = message.store_address
            for _, pipe in peers:
                pipe.send(address)
            change = generation(plan=make_plan(((0, 3, 6), 8)), num_sources=1, store_address=address)
            client.inbox.append(change)
        elif isinstance(message, Installed):
            peers[0][0].kill()
        elif isinstance(message, Report):
            client.inbox.append(Finish())

    def receive() -> ToWorkerMessage:
        if not client.inbox:
            comm, tensor = worker._guard._comm, torch.zeros(1)
            assert comm is not None
            peers[1][1].send("send")
            comm.recv(tensor, 2, 7).wait()
            received.append(tensor.item())
            client.announce(Regroup(generation=2))
        return client.inbox.popleft()

    client.hears = act
    monkeypatch.setattr(client, "receive", receive)
    with processes(peer, 2) as peers:
        worker.run()
    assert client.kinds() == ["Ready", "Installed", "Suspect", "Report"]
    assert client.last(Suspect).peer == 1
    assert received == [1.0]
