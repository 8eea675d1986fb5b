"""Generations as they are sent: what is common to all workers once, small; of the copies, each worker its own.

A plan of a thousand nodes is told to a thousand workers, so its size counts twice. Templates are written once each,
pipelines as columns, nodes by their differences, which are mostly one; then all is compressed. A worker that was told
of the generation before is told the difference: nodes by their places in the plan before, so that those that stay side
by side take next to nothing, however mixed they have become; and what was told then is the dictionary of the
compression. Copies are written as columns, too: where a
tenth of a thousand nodes is lost, a worker may have some hundreds. Must not import torch.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import msgspec

from resilient.errors import ControlError
from resilient.protocol.checkpoint_pace import CheckpointPace
from resilient.protocol.messages import Generation, PackedGeneration, StepOutcome
from resilient.state.skipped import SkippedSteps
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.replan.transfer import Transfer
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec

MAX_UNPACKED_BYTES = 64 << 20
"""Larger ones are refused when they are unpacked."""

_LARGE_BYTES = 256
"""Copies of a worker that take less are sent as they are: to set up a compression takes longer than to send them."""

_ZLIB = 0x78
"""The first byte of what is compressed (RFC 1950); that of columns as they are is another."""


class PackedTemplate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A template whose stages are columns: one of 80 takes several kilobytes otherwise, which repeat little.

    Args:
        template: All but its stages.
        stages: By field of :class:`StageSpec`, in order, what each stage has there.
    """

    template: PipelineTemplate
    stages: tuple[tuple[Any, ...], ...]


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of :class:`Generation`, and its plan as columns.

    Args:
        templates: Those that pipelines have, each once.
        template_of: By pipeline, the template's place among them.
        joined: Nodes that the plan before has not, of a difference to it; their places follow those of the others.
        node_steps: What is to be added to a node for the next one, from 0 on, pipeline by pipeline; of a difference, to
            its place in the plan before.
        num_microbatches: By pipeline.
    """

    generation: int
    version: int
    roll_forward: StepOutcome | None
    source: str
    store_address: str
    num_sources: int
    skipped: SkippedSteps
    checkpoint_due: bool
    pace: CheckpointPace | None
    schedule_kind: ScheduleKind
    templates: tuple[PackedTemplate, ...]
    template_of: tuple[int, ...]
    joined: tuple[int, ...]
    node_steps: tuple[int, ...]
    num_microbatches: tuple[int, ...]


class PackedCopies(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The copies of one rank as columns, in their order.

    Args:
        states: Those that are copied, each once.
        state_of: By copy, the state's place among them.
        sources: By copy.
        targets: By copy.
        first_bytes: By copy.
        sizes: By copy.
    """

    states: tuple[str, ...]
    state_of: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    first_bytes: tuple[int, ...]
    sizes: tuple[int, ...]


_STAGE_FIELDS = tuple(field.name for field in fields(StageSpec))

_decode_common = msgspec.msgpack.Decoder(Common).decode
_decode_copies = msgspec.msgpack.Decoder(PackedCopies).decode


class GenerationPacker:
    """Packs one generation's announcements after the other's, of which all but rank and copies are the same."""

    def __init__(self) -> None:
        self._generation = self._generation_before = 0
        self._told = self._told_before = b""
        self._nodes: tuple[int, ...] = ()
        self._nodes_before: tuple[int, ...] = ()
        self._common: dict[int, bytes] = {}
        self._transfers: dict[int, list[Transfer]] = {}

    def pack(self, message: Generation, known: int = 0) -> PackedGeneration:
        """Return what is sent to one worker.

        Args:
            message: The announcement.
            known: The generation that the worker was last told of; 0 for none.
        """
        if message.generation != self._generation:
            self._generation_before, self._told_before = self._generation, self._told
            self._generation, self._told = message.generation, _told(message)
            self._nodes_before, self._nodes = self._nodes, message.plan.nodes
            self._common.clear()
            self._transfers = defaultdict(list)
            for transfer in message.transfers:
                self._transfers[transfer.source].append(transfer)
                if transfer.target != transfer.source:
                    self._transfers[transfer.target].append(transfer)
        own = () if message.rank is None else self._transfers.get(message.rank, ())
        base = known if known == self._generation_before else 0
        if base not in self._common:
            difference = _told(message, self._nodes_before) if base else self._told
            self._common[base] = _compressed(difference, self._told_before if base else b"")
        return PackedGeneration(
            rank=message.rank, base=base, common=self._common[base], copies=_packed(own) if own else b""
        )


class GenerationUnpacker:
    """Unpacks what one worker is sent, announcement by announcement."""

    def __init__(self) -> None:
        self._generation = 0
        self._told = b""
        self._nodes: tuple[int, ...] = ()

    def unpack(self, packed: PackedGeneration) -> Generation:
        """Return the announcement that the worker was sent.

        Raises:
            ControlError: It is none, or the difference to one that the worker was not told last.
        """
        if packed.base not in (0, self._generation):
            raise ControlError(
                f"a generation must differ from the one told before, {self._generation}, got a difference to "
                f"{packed.base}; start this worker anew"
            )
        try:
            common = _decode_common(_decompressed(packed.common, self._told if packed.base else b""))
            plan = _plan(common, self._nodes if packed.base else ())
            transfers = _unpacked(packed.copies) if packed.copies else ()
        except (zlib.error, msgspec.DecodeError, IndexError, ValueError) as error:
            raise ControlError(f"cannot read a generation: {error}") from error
        told = Generation(
            generation=common.generation,
            rank=packed.rank,
            plan=plan,
            version=common.version,
            roll_forward=common.roll_forward,
            transfers=transfers,
            source=common.source,
            store_address=common.store_address,
            num_sources=common.num_sources,
            skipped=common.skipped,
            checkpoint_due=common.checkpoint_due,
            pace=common.pace,
        )
        self._generation, self._told, self._nodes = told.generation, _told(told), plan.nodes
        return told


def _compressed(told: bytes, told_before: bytes) -> bytes:
    """Return something packed, as the difference to what was told before, if anything was."""
    packing = zlib.compressobj(zdict=told_before) if told_before else zlib.compressobj()
    return packing.compress(told) + packing.flush()


def _decompressed(packed: bytes, told_before: bytes = b"") -> bytes:
    unpacking = zlib.decompressobj(zdict=told_before)  # whose checksum is compared
    told = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
    if unpacking.unconsumed_tail:
        raise ControlError(f"a generation must have at most {MAX_UNPACKED_BYTES} bytes, got more")
    if not unpacking.eof:
        raise zlib.error("it ends too early")
    return told


def _packed(transfers: Sequence[Transfer]) -> bytes:
    places: dict[str, int] = {}
    state_of = [places.setdefault(transfer.state, len(places)) for transfer in transfers]
    copies = PackedCopies(
        states=tuple(places),
        state_of=tuple(state_of),
        sources=tuple([transfer.source for transfer in transfers]),
        targets=tuple([transfer.target for transfer in transfers]),
        first_bytes=tuple([transfer.first_byte for transfer in transfers]),
        sizes=tuple([transfer.end_byte - transfer.first_byte for transfer in transfers]),
    )
    packed = msgspec.msgpack.encode(copies)
    if len(packed) < _LARGE_BYTES:
        return packed
    return zlib.compress(packed, zlib.Z_BEST_SPEED)  # done a thousand times in a row


def _unpacked(packed: bytes) -> tuple[Transfer, ...]:
    copies = _decode_copies(_decompressed(packed) if packed[0] == _ZLIB else packed)
    columns = (copies.state_of, copies.sources, copies.targets, copies.first_bytes, copies.sizes)
    return tuple(
        Transfer(state=copies.states[state], source=source, target=target, first_byte=first, end_byte=first + size)
        for state, source, target, first, size in zip(*columns, strict=True)
    )


def _told(message: Generation, nodes_before: Sequence[int] = ()) -> bytes:
    """Return what all are told, or those who know of a plan of some nodes, before it is compressed."""
    nodes = message.plan.nodes
    joined = tuple(sorted(set(nodes) - set(nodes_before))) if nodes_before else ()
    if nodes_before:
        places = {node: place for place, node in enumerate((*nodes_before, *joined))}
        nodes = [places[node] for node in nodes]
    pipelines = message.plan.pipelines
    templates = list(dict.fromkeys(pipeline.template for pipeline in pipelines))
    place = {template: index for index, template in enumerate(templates)}
    common = Common(
        generation=message.generation,
        version=message.version,
        roll_forward=message.roll_forward,
        source=message.source,
        store_address=message.store_address,
        num_sources=message.num_sources,
        skipped=message.skipped,
        checkpoint_due=message.checkpoint_due,
        pace=message.pace,
        schedule_kind=message.plan.schedule_kind,
        templates=tuple(map(_packed_template, templates)),
        template_of=tuple(place[pipeline.template] for pipeline in pipelines),
        joined=joined,
        node_steps=tuple(after - before for before, after in pairwise((0, *nodes))),
        num_microbatches=tuple(pipeline.num_microbatches for pipeline in pipelines),
    )
    return msgspec.msgpack.encode(common)


def _packed_template(template: PipelineTemplate) -> PackedTemplate:
    columns = zip(*map(attrgetter(*_STAGE_FIELDS), template.stages), strict=True)
    return PackedTemplate(template=replace(template, stages=()), stages=tuple(columns))


def _unpacked_template(packed: PackedTemplate) -> PipelineTemplate:
    """Return a template.

    Raises:
        ValueError: Its columns are others than those of stages, or differ in length.
    """
    stages = [dict(zip(_STAGE_FIELDS, stage, strict=True)) for stage in zip(*packed.stages, strict=True)]
    return replace(packed.template, stages=msgspec.convert(stages, tuple[StageSpec, ...], strict=True))


def _plan(common: Common, nodes_before: Sequence[int]) -> Plan:
    nodes = tuple(accumulate(common.node_steps))
    if nodes_before:
        in_order = (*nodes_before, *common.joined)
        nodes = tuple(in_order[place] for place in nodes)
    templates = [_unpacked_template(packed) for packed in common.templates]
    pipelines: list[Pipeline] = []
    first = 0
    for index, num_microbatches in zip(common.template_of, common.num_microbatches, strict=True):
        template = templates[index]
        of_pipeline = nodes[first : first + template.num_nodes]
        first += template.num_nodes
        pipelines.append(Pipeline(template=template, nodes=of_pipeline, num_microbatches=num_microbatches))
    return Plan(pipelines=tuple(pipelines), schedule_kind=common.schedule_kind)
