"""Generations as they are sent: nothing of them is lost on the way, and what is nonsense is refused."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.errors import ControlError
from resilient.protocol import generation_packing
from resilient.protocol.generation_packing import GenerationPacker, GenerationUnpacker, PackedCopies
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
        assert GenerationUnpacker().unpack(sent) == msgspec.structs.replace(message, transfers=own)


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
    assert GenerationUnpacker().unpack(packer.pack(second)) == second


def _of(generation: int, nodes: Sequence[int]) -> Generation:
    """Return an announcement of pipelines of four nodes each."""
    pipelines = tuple(
        Pipeline(template=_template(4), nodes=tuple(nodes[first : first + 4]), num_microbatches=3)
        for first in range(0, len(nodes), 4)
    )
    return msgspec.structs.replace(_TOLD, generation=generation, plan=Plan(pipelines=pipelines))


def test_thousand_nodes_are_told_of_in_little() -> None:
    packed = encode(ToWorkers(message=GenerationPacker().pack(_of(1, range(1024))), local_rank=0))
    assert len(packed) < 1024  # a byte a node


def test_template_of_many_stages_takes_little() -> None:
    template = _template(80)
    plan = Plan(pipelines=(Pipeline(template=template, nodes=tuple(range(80)), num_microbatches=7),))
    told = GenerationPacker().pack(msgspec.structs.replace(_of(1, range(1)), plan=plan))
    assert GenerationUnpacker().unpack(told).plan == plan
    alone = len(zlib.compress(msgspec.msgpack.encode(template)))
    assert len(told.common) < alone


def test_change_is_told_in_little_of_thousands_of_nodes_in_any_order() -> None:
    nodes = Random(0).sample(range(4096), 4096)
    packer, unpacker = GenerationPacker(), GenerationUnpacker()
    whole = packer.pack(_of(1, nodes))
    unpacker.unpack(whole)
    changed = _of(2, [*nodes[:1000], 5000, *nodes[1001:3996]])
    difference = packer.pack(changed, known=1)
    assert len(whole.common) > 4096
    assert len(difference.common) < 120
    assert unpacker.unpack(difference) == changed


@given(st.lists(_generations(), min_size=1, max_size=6), st.data())
def test_every_worker_knows_the_plan_in_force_whatever_happens(told: list[Generation], data: st.DataObject) -> None:
    """Workers come, are lost and come anew; a coordinator is lost, and the next one says again what was not heard."""
    packer = GenerationPacker()
    known: dict[int, int] = {}
    unpackers: dict[int, GenerationUnpacker] = {}
    said: list[tuple[Generation, dict[int, int]]] = []
    for generation, message in enumerate(told, start=1):
        for worker in data.draw(st.sets(st.integers(0, 3)), label="begin anew"):
            known.pop(worker, None)
            unpackers.pop(worker, None)
        present = data.draw(st.sets(st.integers(0, 3), min_size=1), label="are told")
        if data.draw(st.booleans(), label="is lost"):
            packer = GenerationPacker()
            for before, to in said:
                for of in to.values():
                    packer.pack(before, known=of)
        announced = msgspec.structs.replace(message, generation=generation, rank=None, transfers=())
        said.append((announced, {worker: known.get(worker, 0) for worker in present}))
        for worker, of in said[-1][1].items():
            sent = packer.pack(announced, known=of)
            assert unpackers.setdefault(worker, GenerationUnpacker()).unpack(sent) == announced
            known[worker] = generation


def test_difference_to_what_a_worker_was_not_told_last_is_refused() -> None:
    packer, unpacker = GenerationPacker(), GenerationUnpacker()
    first, second, third = (_of(generation, range(8)) for generation in (1, 2, 3))
    unpacker.unpack(packer.pack(first))
    packer.pack(second, known=1)
    refused = "a generation must differ from the one told before, 1, got a difference to 2; start this worker anew"
    with pytest.raises(ControlError, match=refused):
        unpacker.unpack(packer.pack(third, known=2))
    whole = packer.pack(third, known=1)
    assert whole.base == 0
    assert unpacker.unpack(whole) == third


def test_difference_to_another_plan_is_refused() -> None:
    packer, unpacker = GenerationPacker(), GenerationUnpacker()
    unpacker.unpack(GenerationPacker().pack(_of(1, range(8))))
    packer.pack(_of(1, range(1, 9)))
    with pytest.raises(ControlError, match="cannot read a generation"):
        unpacker.unpack(packer.pack(_of(2, range(8)), known=1))


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
    assert GenerationUnpacker().unpack(packed) == message


_NONSENSE = [zlib.compress(b"ends too early")[:-1], b"nonsense", zlib.compress(b"nonsense"), zlib.compress(b"x" * 1000)]


@pytest.mark.parametrize("common", [b"", *_NONSENSE])
def test_nonsense_is_refused(common: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_packing, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(ControlError, match="a generation"):
        GenerationUnpacker().unpack(PackedGeneration(rank=0, common=common))


def _columns(**columns: tuple[int, ...]) -> bytes:
    """Return copies, one unless said otherwise."""
    names = ("state_of", "sources", "targets", "first_bytes", "sizes")
    copies = PackedCopies(states=("layer",), **{name: columns.get(name, (0,)) for name in names})
    return zlib.compress(msgspec.msgpack.encode(copies))


@pytest.mark.parametrize("copies", [*_NONSENSE, _columns(state_of=(1,)), _columns(sizes=(1, 2))])
def test_nonsense_of_copies_is_refused(copies: bytes) -> None:
    common = GenerationPacker().pack(_TOLD).common
    with pytest.raises(ControlError, match="a generation"):
        GenerationUnpacker().unpack(PackedGeneration(rank=0, common=common, copies=copies))
