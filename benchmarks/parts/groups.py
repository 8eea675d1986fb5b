"""What it takes the ranks of a generation to meet, at many ranks: simulated ones, in a real store.

    python benchmarks/parts/groups.py [--ranks 64 256 1024] [--encoder] [--json FILE]

The job has the 80 blocks of Llama 3 70B in pipelines of at least six nodes, as in ``control_plane.py``. Those that
meet are those of its plan: all ranks, and each set of ranks that hold the same, along the lines of a grid where they
are many; and neighbours in a pipeline. With ``--encoder``, each pipeline's first stage is one, whose features may go to
any pipeline. The store is that of rank 0, a process of its own; the ranks are connections of this one, which ask what
they and gloo ask, in their order. When all have what they asked for, each rank connects to others, some when it first
sends them something: how many those may be is counted, and not done.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing as mp
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from agents import job
from rich.console import Console

from resilient.agent.membership.next_generation.forming import problem_of
from resilient.cli.shared.printing import plain_table
from resilient.comm import Group, StoreHost
from resilient.comm.grid import connections_of
from resilient.comm.interface import name_of
from resilient.comm.store_messages import (
    CLIENT,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Answer,
    Cut,
    Get,
    Request,
    Set,
    decode_answer,
)
from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.common.handshake import NONCE_BYTES, PROOF_BYTES, nonce, proof
from resilient.common.processes import allow_many_files
from resilient.runtime.steps.exchanges import LaneRows, exchanging_pairs, lanes_of
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.replan.replan import first_plan
from resilient.templates.schedules.graph import LaneName

SECRET = b"benchmark"
ADDRESS_BYTES = 170
"""What gloo of torch 2.13 leaves of a rank beside its numbers, with a host's name of ten letters."""
NUMBER_BYTES = 8
ANNOUNCED = b"10.0.0.1:30000 " + bytes(64) + b" 10.0.0.1:30001/" + bytes(64) + b" "
"""What a rank leaves of itself before its groups."""
FEEDS = (("encoder", "llm"),)
AT_ONCE = 32
"""Ranks that introduce themselves: this process plays all of them, and the store waits for none for long."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What it takes the ranks of a generation to meet.

    Args:
        ranks: How many there are.
        groups: Different ones.
        meetings_of_a_rank: The most groups that one meets in, all of whose ranks are connected.
        connections: That a rank may make, on average.
        connections_of_a_rank: The most.
        requests: That the store answers.
        sent_bytes: By the store.
        met_s: Until the last has its answers.
    """

    ranks: int
    groups: int
    meetings_of_a_rank: int
    connections: float
    connections_of_a_rank: int
    requests: int
    sent_bytes: int
    met_s: float


def job_of(num_ranks: int) -> tuple[Plan, list[Group]]:
    """Return the first plan of so many nodes with a worker each, and its groups."""
    spec = job()
    plan = first_plan(problem_of(spec, 1, Link(), 3600.0), range(num_ranks))
    holders = [piece.holders for pieces in plan.pieces(spec.profile).values() for piece in pieces]
    everybody = tuple(range(len(plan.slots)))
    return plan, [group for group in dict.fromkeys([everybody, *holders]) if len(group) > 1]


def with_encoders(plan: Plan) -> Plan:
    """Return the plan with an encoder as the first stage of each pipeline."""

    def with_encoder(pipeline: Pipeline) -> Pipeline:
        names = [LaneName(unit, 0) for unit in FEEDS[0]]
        stages = tuple(replace(stage, lane=names[n > 0]) for n, stage in enumerate(pipeline.template.stages))
        return replace(pipeline, template=replace(pipeline.template, stages=stages))

    return replace(plan, pipelines=tuple(map(with_encoder, plan.pipelines)))


class Rank:
    """One that meets the others, and goes no further."""

    def __init__(self, number: int, lanes: tuple[PlanLanes, LaneRows], groups: Sequence[Group]) -> None:
        self._number = number
        pairs = exchanging_pairs(*lanes, number)
        self._connections = connections_of(number, groups[0], groups, pairs)
        self.num_requests = self.num_bytes = 0

    @property
    def num_meetings(self) -> int:
        return len(self._connections.groups)

    @property
    def num_connections(self) -> int:
        return sum(len(group) - 1 for group in self._connections.groups) + len(self._connections.peers)

    async def meet(self, address: str, entering: asyncio.Semaphore) -> None:
        """Ask for what others leave, all that it may be connected to and those of its groups."""
        async with entering:
            reader, writer = await _let_in(address)

        async def ask(request: Request) -> Answer:
            writer.write(frame(msgspec.msgpack.encode(request), MAX_REQUEST_BYTES))
            answer = await reader.readexactly(frame_size(await reader.readexactly(HEADER_BYTES), MAX_ANSWER_BYTES))
            self.num_requests += 1
            self.num_bytes += len(answer)
            return decode_answer(answer)

        await ask(Set({f"g1/rank/{self._number}": ANNOUNCED}))
        await ask(Get([f"g1/rank/{rank}" for rank in self._connections.ranks]))
        for group in self._connections.groups:
            start = f"g1/{name_of(group)}/0"
            tail, index = len(group) * NUMBER_BYTES, group.index(self._number)
            await ask(Set({f"{start}/{index}": bytes(ADDRESS_BYTES + tail)}))
            keys, first = [f"{start}/{rank}" for rank in range(len(group))], index * NUMBER_BYTES
            await ask(Cut(keys, tail, first, first + NUMBER_BYTES))
        writer.close()
        await writer.wait_closed()


async def _let_in(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    theirs, ours = await reader.readexactly(NONCE_BYTES), nonce()
    writer.write(ours + proof(SECRET, CLIENT, theirs, ours, address.encode()))
    await reader.readexactly(PROOF_BYTES)
    return reader, writer


def host_store(told: Connection) -> None:
    """Host a store, in a process of its own, until it is killed."""
    store = StoreHost("127.0.0.1", SECRET)
    told.send(store.address)
    told.recv()


async def measure(num_ranks: int, *, has_encoder: bool) -> Measured:
    """Return what it takes so many to meet."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=host_store, args=(theirs,), daemon=True)
    process.start()
    address = await asyncio.to_thread(ours.recv)
    plan, groups = job_of(num_ranks)
    trained = [True] * len(job().profile.layers)
    if has_encoder:
        plan = with_encoders(plan)

    @functools.cache
    def lanes(pipeline: int | None) -> tuple[PlanLanes, LaneRows]:
        return lanes_of(plan, pipeline or 0, FEEDS if has_encoder else None, trained)

    places = [None if has_encoder else slot.pipeline_index for slot in plan.slots]
    ranks = [Rank(number, lanes(place), groups) for number, place in enumerate(places)]
    entering = asyncio.Semaphore(AT_ONCE)
    began = time.perf_counter()
    await asyncio.gather(*(rank.meet(address, entering) for rank in ranks))
    met_s = time.perf_counter() - began
    process.kill()
    process.join()
    return Measured(
        ranks=len(ranks),
        groups=len(groups),
        meetings_of_a_rank=max(rank.num_meetings for rank in ranks),
        connections=sum(rank.num_connections for rank in ranks) / len(ranks),
        connections_of_a_rank=max(rank.num_connections for rank in ranks),
        requests=sum(rank.num_requests for rank in ranks),
        sent_bytes=sum(rank.num_bytes for rank in ranks),
        met_s=met_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--encoder", action="store_true", help="features go from any pipeline to any")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    allow_many_files()
    found = [asyncio.run(measure(num_ranks, has_encoder=options.encoder)) for num_ranks in options.ranks]
    table = plain_table("ranks", "groups", "meetings", "connections", "at most", "requests", "sent", "all have met")
    for each in found:
        table.add_row(
            f"{each.ranks}",
            f"{each.groups}",
            f"{each.meetings_of_a_rank}",
            f"{each.connections:.1f}",
            f"{each.connections_of_a_rank}",
            f"{each.requests}",
            f"{each.sent_bytes / 1e6:.1f} MB",
            f"{each.met_s:.2f} s",
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
