"""Finds out whether the stages of a pipeline read the same samples, and which one they did not.

Whether is told by a number of the prepare barrier; which is asked for only once they did not, by all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap

import msgspec
import torch
import xxhash

from resilient.comm import Communicator, Group
from resilient.comm.agreement import Shares
from resilient.data.reader import REPEATABLE, Cell, Reading, Reads
from resilient.errors import SampleError
from resilient.models.layer import Model
from resilient.runtime.batches import reads_of
from resilient.runtime.job import Job
from resilient.templates.plan import Plan, Slot
from resilient.templates.schedules.graph import LaneName

_Told = list[tuple[Cell, Reading]]
_decode = msgspec.msgpack.Decoder(_Told).decode


def slot_reads(model: Model, slot: Slot) -> Reads:
    """Return the entries of cells that a worker's layers read, and the loss, if it is there; None for all."""
    return reads_of(
        tuple(layer for stage in slot.stages for layer in model.layers[stage.first_layer : stage.end_layer])
    )


class SampleAgreement:
    """Compares what one rank read of a step with what the others of its pipeline did: those of the same lane.

    Args:
        job: The job.
        plan: Of the generation.
        slot: The rank's place in it.

    Attributes:
        reads: Entries of cells that this rank reads.
    """

    def __init__(self, job: Job, plan: Plan, slot: Slot) -> None:
        self._plan = plan
        self._rank = slot.rank
        self._dataset = type(job.dataset).__name__
        self._own = self._ranks(slot.pipeline_index, slot.group_index)
        self._lanes = {other.rank: {stage.lane for stage in other.stages} for other in plan.slots}
        self._reads = {other.rank: slot_reads(job.model, other) for other in plan.slots}
        self.reads = self._reads[slot.rank]

    def share(self, readings: Mapping[Cell, Reading]) -> int:
        """Return this rank's part of a sum over all ranks that tells whether all read the same."""
        shares = Shares(self._rank)
        for cell, reading in readings.items():
            lane = LaneName(cell.unit, cell.lane)
            readers = [rank for rank in self._own if lane in self._lanes[rank]]
            for entry, checksum in reading.batch.items():
                holders = tuple(rank for rank in readers if self._reads_entry(rank, entry))
                if len(holders) > 1:
                    placed = msgspec.msgpack.encode((cell, entry, checksum))  # bare ones, swapped, would cancel out
                    shares.add(xxhash.xxh3_64_intdigest(placed), holders)
        return shares.total

    def difference(self, comm: Communicator, step: int, readings: Mapping[Cell, Reading]) -> SampleError:
        """Return the error that names what was read differently; all ranks call this, and get the same.

        Raises:
            CommunicationError: A peer is gone.
        """
        told = [dict(_decode(text)) for text in _gathered(comm, msgspec.msgpack.encode(list(readings.items())))]
        readers = sorted({(slot.pipeline_index, slot.group_index) for slot in self._plan.slots})
        for ranks in starmap(self._ranks, readers):
            for cell in sorted({cell for rank in ranks for cell in told[rank]}):
                read = {rank: told[rank][cell] for rank in ranks if cell in told[rank]}
                found = self._in_samples(read, step) or self._in_batch(read, step)
                if found is not None:
                    return found
        return SampleError(
            f"stages must read the same samples, got other checksums in step {step} than when they were asked again; "
            "check the memory of these machines"
        )

    def _in_samples(self, read: Mapping[int, Reading], step: int) -> SampleError | None:
        one = next(iter(read.values()))
        for place, index in enumerate(one.indices):
            found = self._first_difference({rank: reading.samples[place] for rank, reading in read.items()})
            if found is not None:
                return SampleError(
                    f"sample {index} of {self._dataset}: {found[0]!r} must be the same on all stages, got different "
                    f"ones on {self._named(found[1:])} in step {step}; {REPEATABLE}"
                )
        return None

    def _in_batch(self, read: Mapping[int, Reading], step: int) -> SampleError | None:
        found = self._first_difference({rank: reading.batch for rank, reading in read.items()})
        if found is None:
            return None
        indices = next(iter(read.values())).indices
        return SampleError(
            f"samples {list(indices)} of {self._dataset}: collate must make the same of equal samples, got different "
            f"{found[0]!r} on {self._named(found[1:])} in step {step}; have it depend on the samples alone, and draw "
            "random numbers in __getitem__"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        return " and ".join(
            f"stage {self._plan.slots[rank].row_index} (node {self._plan.slots[rank].node})" for rank in ranks
        )

    def _first_difference(self, found: Mapping[int, Mapping[str, int]]) -> tuple[str, int, int] | None:
        """Return the first entry whose checksums differ, or that one has not, and two ranks that show it."""
        for entry in sorted({entry for checksums in found.values() for entry in checksums}):
            holders = [rank for rank in found if entry in found[rank] or self._reads_entry(rank, entry)]
            for rank in holders[1:]:
                if found[rank].get(entry) != found[holders[0]].get(entry):
                    return entry, holders[0], rank
        return None

    def _reads_entry(self, rank: int, entry: str) -> bool:
        reads = self._reads[rank]
        return reads is None or entry in reads

    def _ranks(self, pipeline: int, group: int) -> Group:
        """Return who reads the same cells: groups of devices of sharded stages have microbatches of their own."""
        return tuple(
            slot.rank for slot in self._plan.slots if (slot.pipeline_index, slot.group_index) == (pipeline, group)
        )


def _gathered(comm: Communicator, own: bytes) -> list[bytes]:
    """Return what each rank has brought, by rank."""
    everybody = tuple(range(comm.size))
    lengths = torch.zeros(comm.size, dtype=torch.int64)
    lengths[comm.rank] = len(own)
    comm.all_reduce(lengths, everybody).wait()
    texts = torch.zeros(comm.size, int(lengths.max()), dtype=torch.uint8)
    texts[comm.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    comm.all_reduce(texts, everybody).wait()
    return [text[:length].numpy().tobytes() for text, length in zip(texts, lengths.tolist(), strict=True)]
