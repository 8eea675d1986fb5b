"""Generations as they are sent: nothing of them is lost on the way, and what is nonsense is refused."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import ControlError
from resilient.protocol import generation_packing
from resilient.protocol.generation_packing import GenerationPacker, PackedCopies, unpack
from resilient.protocol.messages import (
    INIT,
    Generation,
    PackedGeneration,
    StepOutcome,
    ToWorkers,
    decode_to_worker,
    encode,
)
from resilient.state.skipped import NONE_SKIPPED
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.replan.transfer import Transfer
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec


def _template(num_nodes: int) -> PipelineTemplate:
    stages = tuple(
        StageSpec(
            first_layer=index,
            end_layer=index + 1,
            node_index=index,
            forward_ms=0.1 * num_nodes,
            backward_ms=1.0,
            send_ms=0.0,
            memory_bytes=7,
        )
        for index in range(num_nodes)
    )
    return PipelineTemplate(num_nodes=num_nodes, stages=stages)


@st.composite
def _generations(draw: st.DrawFn) -> Generation:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    nodes = draw(st.permutations(range(2 * sum(sizes))))
    plan = Plan(
        pipelines=tuple(
            Pipeline(
                template=_template(size),
                nodes=tuple(nodes[sum(sizes[:index]) : sum(sizes[: index + 1])]),
                num_microbatches=draw(st.integers(1, 1000)),
            )
            for index, size in enumerate(sizes)
        ),
        schedule_kind=draw(st.sampled_from([ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1])),
    )
    ranks = st.integers(0, sum(sizes) - 1)
    transfers = st.builds(
        Transfer,
        state=st.sampled_from(["layer", "head"]),
        source=ranks,
        target=ranks,
        first_byte=st.integers(0, 1 << 40),
        end_byte=st.integers(0, 1 << 40),
    )
    outcome = StepOutcome(step=3, loss=0.5, grad_norm=float("inf"), skipped=NONE_SKIPPED.after(is_finite=False))
    return Generation(
        generation=draw(st.integers(1, 1000)),
        rank=draw(st.none() | ranks),
        plan=plan,
        version=draw(st.integers(0, 5)),
        roll_forward=draw(st.none() | st.just(outcome)),
        transfers=tuple(draw(st.lists(transfers, max_size=8))),
        source=INIT,
        store_address="h:1",
        num_sources=draw(st.integers(0, 2)),
        skipped=outcome.skipped,
        checkpoint_due=draw(st.booleans()),
    )


@given(_generations())
def test_every_worker_is_told_all_but_others_copies(told: Generation) -> None:
    packer = GenerationPacker()
    for rank in (told.rank, *range(len(told.plan.slots))):
        message = msgspec.structs.replace(told, rank=rank)
        sent = decode_to_worker(encode(packer.pack(message)))
        assert isinstance(sent, PackedGeneration)
        own = tuple(each for each in told.transfers if rank in (each.source, each.target))
        assert unpack(sent) == msgspec.structs.replace(message, transfers=own)


_TOLD = Generation(
    generation=1,
    rank=0,
    plan=Plan(pipelines=(Pipeline(template=_template(1), nodes=(0,), num_microbatches=1),)),
    version=0,
    roll_forward=None,
    transfers=(),
    source=INIT,
    store_address="h:1",
)


def test_next_generation_is_packed_anew() -> None:
    packer = GenerationPacker()
    copy = Transfer(state="layer", source=0, target=0, first_byte=0, end_byte=1)
    first = msgspec.structs.replace(_TOLD, transfers=(copy,))
    packer.pack(first)
    second = msgspec.structs.replace(first, generation=2, transfers=())
    assert unpack(packer.pack(second)) == second


def test_thousand_nodes_are_told_of_in_little() -> None:
    pipelines = tuple(
        Pipeline(template=_template(4), nodes=tuple(range(first, first + 4)), num_microbatches=3)
        for first in range(0, 1024, 4)
    )
    message = Generation(
        generation=1,
        rank=0,
        plan=Plan(pipelines=pipelines),
        version=0,
        roll_forward=None,
        transfers=(),
        source=INIT,
        store_address="h:1",
    )
    packed = encode(ToWorkers(message=GenerationPacker().pack(message), local_rank=0))
    assert len(packed) < 1024  # a byte a node


def test_hundreds_of_copies_of_a_worker_take_little() -> None:
    size = 919339008
    transfers = tuple(
        Transfer(
            state=f"layer.{of}", source=9 * sender, target=144, first_byte=sender * size, end_byte=sender * size + size
        )
        for of in range(14)
        for sender in range(16)
    )
    message = msgspec.structs.replace(_TOLD, rank=144, transfers=transfers)
    packed = GenerationPacker().pack(message)
    assert len(packed.copies) < 6 * len(transfers)
    assert unpack(packed) == message


_NONSENSE = [b"nonsense", zlib.compress(b"nonsense"), zlib.compress(b"x" * 1000)]


@pytest.mark.parametrize("common", [b"", *_NONSENSE])
def test_nonsense_is_refused(common: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_packing, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(ControlError, match="a generation"):
        unpack(PackedGeneration(rank=0, common=common))


def _columns(**columns: tuple[int, ...]) -> bytes:
    """Return copies, one unless said otherwise."""
    names = ("state_of", "sources", "targets", "first_bytes", "sizes")
    copies = PackedCopies(states=("layer",), **{name: columns.get(name, (0,)) for name in names})
    return zlib.compress(msgspec.msgpack.encode(copies))


@pytest.mark.parametrize("copies", [*_NONSENSE, _columns(state_of=(1,)), _columns(sizes=(1, 2))])
def test_nonsense_of_copies_is_refused(copies: bytes) -> None:
    common = GenerationPacker().pack(_TOLD).common
    with pytest.raises(ControlError, match="a generation"):
        unpack(PackedGeneration(rank=0, common=common, copies=copies))
