"""Copies between ranks: any ranges from any senders, verified."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from resilient.errors import CommunicationError
from resilient.models.layer import LayerSpec
from resilient.state import peer_copy as copying
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.peer_copy import copy_states
from resilient.state.witnesses import SEVERAL
from resilient.templates.replan.transfer import Transfer
from tests.resilient.ranks import as_threads, join

NUMEL = 3 * 4096


def make_state(name: str, fill: int | None) -> LayerState:
    spec = LayerSpec(name=name, unit="llm", build=lambda: nn.Linear(NUMEL, 1, bias=False), initialize=lambda _: None)
    state = LayerState(spec, BufferLayout.of(spec), (), torch.float32, torch.device("cpu"))
    if fill is not None:
        state.buffer.copy_(torch.arange(NUMEL) + fill)
    return state


def transfer(state: str, source: int, target: int, first: int = 0, end: int = 4 * NUMEL) -> Transfer:
    return Transfer(state=state, source=source, target=target, first_byte=first, end_byte=end)


TRANSFERS = [
    transfer("a", 0, 2, 0, 16384),
    transfer("a", 1, 2, 16384, 4 * NUMEL),
    transfer("b", 2, 0),
    transfer("b", 2, 1),
    transfer("a", 1, 3, 0, 4096),
    transfer("a", 0, 3, 4096, 4 * NUMEL),
]


def test_states_arrive_from_several_senders_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 8192)
    holds = {0: {"a"}, 1: {"a"}, 2: {"b"}, 3: set()}
    wants = {0: {"b"}, 1: {"b"}, 2: {"a"}, 3: {"a"}}
    fills = {"a": 5, "b": 70}

    def work(rank: int, address: str) -> tuple[int, bool]:
        held = {name: make_state(name, fills[name]) for name in holds[rank]}
        missing = {name: make_state(name, None) for name in wants[rank]}
        num_bytes = copy_states(join(address, rank, 4), TRANSFERS, held, missing)
        states = held | missing
        return num_bytes, all(torch.equal(s.buffer, make_state(n, fills[n]).buffer) for n, s in states.items())

    assert as_threads(4, work) == [(4 * NUMEL, True)] * 4


@pytest.mark.parametrize("bounded", [False, True], ids=["all at once", "one piece after the other"])
def test_ranks_know_of_their_own_copies_only(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are told of a generation: each has a list of its own, and the two ends of a copy other ones before it.

    Also as between devices whose copies are staged, where a rank has few pieces under way: here those of the hosts.
    """
    if bounded:
        monkeypatch.setattr(copying, "CHUNK_BYTES", 8192)
        monkeypatch.setattr(copying, "STAGED_BYTES", 1)
        monkeypatch.setattr(copying, "_are_staged", lambda comm, states: True)
    fills = {"a": 5, "b": 70, "c": 900}
    senders = {"a": 0, "b": 1, "c": 2}
    transfers = [transfer(name, source, target) for name, source in senders.items() for target in (3, 1, 0, 2)]
    transfers = [each for each in transfers if each.source != each.target]
    random.Random(0).shuffle(transfers)

    def work(rank: int, address: str) -> bool:
        held = {name: make_state(name, fills[name]) for name, source in senders.items() if source == rank}
        missing = {name: make_state(name, None) for name in fills if name not in held}
        own = [each for each in transfers if rank in (each.source, each.target)]
        copy_states(join(address, rank, 4), own, held, missing)
        states = held | missing
        return all(torch.equal(s.buffer, make_state(n, fills[n]).buffer) for n, s in states.items())

    assert as_threads(4, work) == [True] * 4


def test_other_piece_than_the_expected_one_does_not_count() -> None:
    def work(rank: int, address: str) -> str:
        comm = join(address, rank, 2)
        try:
            if rank == 0:
                copy_states(comm, [transfer("a", 0, 1)], {"a": make_state("a", 5)}, {})
            else:
                copy_states(comm, [transfer("b", 0, 1)], {}, {"b": make_state("b", None)})
        except CommunicationError as error:
            return str(error)
        return "sent"

    assert as_threads(2, work) == ["sent", "another piece than 'b' from byte 0 arrived from rank 0"]


@pytest.mark.parametrize(("origins", "copied"), [((7, 8), SEVERAL), ((7, 7), 7), ((7, SEVERAL), SEVERAL)])
def test_copy_has_the_origin_of_all_that_it_is_made_of(origins: tuple[int, int], copied: int) -> None:
    def work(rank: int, address: str) -> list[int]:
        states = {name: make_state(name, 5) for name in "ab"}
        for state in states.values():
            state.origin = 9 if rank == 2 else origins[rank % 2]
        received = "a" if rank > 1 else "b"
        held = {name: state for name, state in states.items() if name != received}
        copy_states(join(address, rank, 4), TRANSFERS, held, {received: states[received]})
        return [states["a"].origin, states["b"].origin]

    assert as_threads(4, work) == [[origins[0], 9], [origins[1], 9], [copied, 9], [copied, origins[1]]]


def test_rank_without_copies_has_nothing_to_do() -> None:
    def work(rank: int, address: str) -> int:
        held, missing = ({"a": make_state("a", 5)}, {}) if rank == 0 else ({}, {"a": make_state("a", None)})
        return copy_states(join(address, rank, 3), [transfer("a", 0, 1)], held, missing)

    assert as_threads(3, work) == [0, 4 * NUMEL, 0]


def test_damaged_bytes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    true_fingerprint = copying.fingerprint

    def work(rank: int, address: str) -> str:
        held, missing = ({"a": make_state("a", 5)}, {}) if rank == 0 else ({}, {"a": make_state("a", None)})
        comm = join(address, rank, 2)
        try:
            copy_states(comm, [transfer("a", 0, 1)], held, missing)
        except CommunicationError as error:
            return str(error)
        return "arrived"

    # the sender's fingerprint is over what it meant to send: here a byte differs from what goes over the wire
    def of_what_was_meant(data: torch.Tensor) -> int:
        meant = data.clone()
        if not damaged:
            damaged.append(True)
            meant[100] ^= 1
        return true_fingerprint(meant)

    damaged: list[bool] = []
    monkeypatch.setattr(copying, "fingerprint", of_what_was_meant)
    assert as_threads(2, work) == ["arrived", "state 'a' arrived damaged from rank 0"]
