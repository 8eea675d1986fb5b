"""Workers that hold pieces of a layer's state have together what one has that holds it alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from resilient.models.layer import LayerSpec
from resilient.optim import SGD, AdamW, Optimizer, ParameterGroup
from resilient.state import peer_copy
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.peer_copy import copy_states, received_by
from resilient.state.witnesses import SEVERAL
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, merged
from resilient.templates.replan.transfer import Transfer, transfers_between
from tests.mixtures import SIZES, StateSizes, devices, holders
from tests.resilient.pieced import cut_from, number, piece_of
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import draw
from tests.resilient.state.test_layer_state import CPU

ELEMENTS = SIZES.map(lambda sizes: StateSizes(**{**vars(sizes), "itemsize": 8}))


@given(st.data(), ELEMENTS)
def test_pieces_start_with_the_values_of_the_whole(data: st.DataObject, sizes: StateSizes) -> None:
    whole = piece_of(sizes)
    whole.initialize(seed=5)
    assert not whole.buffer.numel() or whole.buffer.any()
    for held in data.draw(devices(sizes)):
        piece = piece_of(sizes, held)
        piece.buffer.fill_(7)
        piece.initialize(seed=5)
        assert torch.equal(piece.buffer, cut_from(whole.buffer, held))


@given(st.data(), ELEMENTS)
def test_parts_of_a_piece_are_views_of_what_they_are_parts_of(data: st.DataObject, sizes: StateSizes) -> None:
    whole = number(piece_of(sizes))
    for held in data.draw(devices(sizes)):
        piece = number(piece_of(sizes, held))
        numbers: list[float] = []
        for name, tensor in piece.tensors().items():
            in_whole, _, interval = name.partition("[")
            first, _, end = interval.strip("]").partition(":")
            expected = whole.tensors()[in_whole]
            assert torch.equal(tensor, expected[int(first) : int(end)] if interval else expected)
            numbers += tensor.tolist()
            tensor += 0.5  # a view
        assert sorted(numbers) == [value - 0.5 for value in piece.buffer.tolist()]
        number(piece)
        for start, end in held:
            assert piece.window(start, end).view(torch.float64).tolist() == list(range(start // 8, end // 8))
        some = held & data.draw(st.sampled_from([held, *data.draw(devices(sizes))]))
        assert torch.equal(piece.values(some), cut_from(whole.buffer, some))


@given(st.data(), ELEMENTS.filter(lambda sizes: sizes.trainable))
def test_optimizer_updates_pieces_as_it_does_the_whole(data: st.DataObject, sizes: StateSizes) -> None:
    optimizer = AdamW(lr=0.1, groups=(ParameterGroup("*trained1", lr=0.05),))
    sizes = StateSizes(**{**vars(sizes), "num_slots": len(optimizer.slots)})
    pieces = [piece_of(sizes, held, optimizer=optimizer) for held in data.draw(devices(sizes))]
    whole = piece_of(sizes, optimizer=optimizer)
    gradient = torch.randn(whole.grad.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for state in (whole, *pieces):
        state.initialize(seed=5)
        trainable = state.held & ByteIntervals.of(0, 8 * state.layout.num_trainable)
        state.grad.copy_(cut_from(gradient, trainable))
        if state.windows:
            optimizer.build([state], 0).step()
    for piece in pieces:
        torch.testing.assert_close(piece.buffer, cut_from(whole.buffer, piece.held), rtol=1e-14, atol=1e-14)


def numbered(sizes: StateSizes, held: ByteIntervals) -> list[float]:
    return number(piece_of(sizes, held)).buffer.tolist()


@given(st.data(), ELEMENTS, st.integers(1, 8))
def test_any_mixture_becomes_any_other(data: st.DataObject, sizes: StateSizes, num_ranks: int) -> None:
    before, after = (data.draw(holders(sizes, num_ranks)) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resilient.templates.replan.transfer._PAGE_BYTES", 16)
        patch.setattr("resilient.templates.replan.transfer._MAX_WHOLE_BYTES", 32)
        transfers, lost = transfers_between({"layer": after}, {"layer": before})
    held = {rank: number(piece_of(sizes, intervals)) for rank, intervals in before.items()}
    made = {rank: piece_of(sizes, intervals) for rank, intervals in after.items()}
    for rank, state in made.items():
        state.take(held[rank], state.held - received_by(rank, transfers).get("layer", NO_BYTES))
    for each in transfers:
        received = held[each.source].window(each.first_byte, each.end_byte)
        made[each.target].window(each.first_byte, each.end_byte).copy_(received)
    if not lost:
        for state in made.values():
            assert state.buffer.tolist() == numbered(sizes, state.held)


MIXED = StateSizes(trainable=(6, 5), frozen=(3,), num_slots=2, itemsize=8)
"""Held by rank 0 alone, by ranks 1 and 2 in halves, and by ranks 3 to 5 in uneven parts."""

WHOLE = MIXED.cut(0, 14)
HALVES = (MIXED.cut(0, 3) | MIXED.cut(6, 8) | MIXED.cut(11, 12), MIXED.cut(3, 6) | MIXED.cut(8, 11) | MIXED.cut(12, 14))
THIRDS = (MIXED.cut(0, 4), MIXED.cut(4, 5), MIXED.cut(5, 14))


def senders(transfers: Sequence[Transfer], target: int) -> set[int]:
    return {transfer.source for transfer in transfers if transfer.target == target}


def test_pieces_are_copied_between_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "CHUNK_BYTES", 16)
    before = dict(enumerate((*HALVES, *THIRDS)))
    after = dict(enumerate((*THIRDS, WHOLE, HALVES[1])))
    transfers, lost = transfers_between({"layer": after}, {"layer": before})
    assert lost == ()

    def work(rank: int, address: str) -> tuple[int, LayerState]:
        held, missing = number(piece_of(MIXED, before[rank])), piece_of(MIXED, after[rank])
        held.origin = 7 if rank in (0, 1) else 9
        return copy_states(join(address, rank, 5), transfers, {"layer": held}, {"layer": missing}), missing

    for rank, (num_bytes, state) in enumerate(as_threads(5, work)):
        assert state.buffer.tolist() == numbered(MIXED, after[rank])
        assert num_bytes == (after[rank] - before[rank]).size
        made_of = {7 if source in (0, 1) else 9 for source in senders(transfers, rank)}
        made_of |= {7 if rank in (0, 1) else 9} if after[rank] & before[rank] else set()
        assert state.origin == (made_of.pop() if len(made_of) == 1 else SEVERAL)


NUM_STEPS = 20
WIDTH, OUTPUTS = 31, 43
GROUPS = (ParameterGroup("*.bias", lr=2e-2, weight_decay=0.1),)


def parts(layout: BufferLayout, num_slots: int, cuts: list[int], itemsize: int) -> list[ByteIntervals]:
    """Return what each of several devices holds that divide the elements of the parameters, and of slots the same."""
    firsts = range(0, (1 + num_slots) * layout.num_trainable, layout.num_trainable)
    return [
        merged(((first + start) * itemsize, (first + end) * itemsize) for first in firsts)
        for start, end in zip([0, *cuts], [*cuts, layout.num_trainable], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(lr=1e-2, groups=GROUPS),
        SGD(lr=1e-2, momentum=0.9, groups=GROUPS),
        SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
    ids=["AdamW", "momentum", "Nesterov's"],
)
def test_parts_of_any_lengths_are_updated_as_the_whole_is(optimizer: Optimizer, dtype: torch.dtype) -> None:
    spec = LayerSpec(name="layer", unit="llm", build=lambda: nn.Linear(WIDTH, OUTPUTS), initialize=draw)
    layout = BufferLayout.of(spec, optimizer.rates)
    held = parts(layout, len(optimizer.slots), [7, 450, 907, 1332], dtype.itemsize)
    whole, *divided = [LayerState(spec, layout, optimizer.slots, dtype, CPU, each) for each in (None, *held)]
    for state in (whole, *divided):
        state.initialize(seed=0)
    built = [optimizer.build([state], 0) for state in (whole, *divided)]
    sizes = [len(state.grad) for state in divided]
    for step in range(NUM_STEPS):
        drawn = torch.Generator().manual_seed(step)
        whole.grad.copy_(torch.randn(layout.num_trainable, generator=drawn, dtype=torch.float64))
        for state, gradient in zip(divided, whole.grad.split(sizes), strict=True):
            state.grad.copy_(gradient)
        for each in built:
            each.step()
    assert sum(sizes) == layout.num_trainable
    assert all(torch.equal(state.bytes, whole.held_bytes(state.held)) for state in divided)
