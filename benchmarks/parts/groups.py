"""What it takes the ranks of a generation to meet, at many ranks: simulated ones, in a real store.

    python benchmarks/parts/groups.py [--ranks 64 256 1024] [--json FILE]

The job has the 80 blocks of Llama 3 70B in pipelines of at least six nodes, as in ``control_plane.py``. Those that
meet are those of its plan: all ranks, and each set of ranks that hold the same, both along the lines of a grid where
they are many; and neighbours in a pipeline. The store is that of rank 0, a process of its own; the ranks are
connections of this one, which ask what gloo asks, in its order. When all have what they asked for, each rank connects
to the others of its groups: how many those are is counted, and not done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from agents import job
from rich.console import Console

from resilient.agent.membership.next_generation.forming import problem_of
from resilient.cli.shared.printing import plain_table
from resilient.comm import Group, StoreHost
from resilient.comm.grid import parts_to_connect
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
from resilient.runtime.steps.exchanges import exchanging_pairs
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Plan
from resilient.templates.replan.replan import first_plan

SECRET = b"benchmark"
ADDRESS_BYTES = 170
"""What gloo of torch 2.13 leaves of a rank beside its numbers, with a host's name of ten letters."""
NUMBER_BYTES = 8
ANNOUNCED = b"10.0.0.1:30000 " + bytes(64) + b" "
"""What a rank leaves of itself before its groups."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What it takes the ranks of a generation to meet.

    Args:
        ranks: How many there are.
        groups: Different ones.
        meetings_of_a_rank: The most groups, lines of a grid and pairs that one is in.
        connections_of_a_rank: The most that one makes afterwards.
        requests: That the store answers.
        sent_bytes: By the store.
        met_s: Until the last has its answers.
    """

    ranks: int
    groups: int
    meetings_of_a_rank: int
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


class Rank:
    """One that meets the others, and goes no further."""

    def __init__(self, number: int, plan: Plan, groups: Sequence[Group]) -> None:
        self._number = number
        self.parts = parts_to_connect(number, groups[0], groups, exchanging_pairs(plan, "", number))
        self.num_requests = self.num_bytes = 0

    async def meet(self, address: str) -> None:
        """Ask for what all others leave, in all groups."""
        reader, writer = await _let_in(address)

        async def ask(request: Request) -> Answer:
            writer.write(frame(msgspec.msgpack.encode(request), MAX_REQUEST_BYTES))
            answer = await reader.readexactly(frame_size(await reader.readexactly(HEADER_BYTES), MAX_ANSWER_BYTES))
            self.num_requests += 1
            self.num_bytes += len(answer)
            return decode_answer(answer)

        await ask(Set({f"g1/rank/{self._number}": ANNOUNCED}))
        await ask(Get([f"g1/rank/{rank}" for rank in sorted({rank for _, ranks in self.parts for rank in ranks})]))
        for group, ranks in self.parts:
            start = f"g1/{name_of(group if group == ranks else (group, ranks))}/0"
            tail, index = len(ranks) * NUMBER_BYTES, ranks.index(self._number)
            await ask(Set({f"{start}/{index}": bytes(ADDRESS_BYTES + tail)}))
            keys, first = [f"{start}/{rank}" for rank in range(len(ranks))], index * NUMBER_BYTES
            await ask(Cut(keys, tail, first, first + NUMBER_BYTES))
        writer.close()
        await writer.wait_closed()


async def _let_in(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect; again where others have to make room, too, for this one process is slow to answer for all of them."""
    host, _, port = address.rpartition(":")
    while True:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            theirs, ours = await reader.readexactly(NONCE_BYTES), nonce()
            writer.write(ours + proof(SECRET, CLIENT, theirs, ours, address.encode()))
            await reader.readexactly(PROOF_BYTES)
            return reader, writer
        except (EOFError, ConnectionResetError):
            writer.close()


def host_store(told: Connection) -> None:
    """Host a store, in a process of its own, until it is killed."""
    store = StoreHost("127.0.0.1", SECRET)
    told.send(store.address)
    told.recv()


async def measure(num_ranks: int) -> Measured:
    """Return what it takes so many to meet."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=host_store, args=(theirs,), daemon=True)
    process.start()
    address = await asyncio.to_thread(ours.recv)
    plan, groups = job_of(num_ranks)
    ranks = [Rank(number, plan, groups) for number in groups[0]]
    began = time.perf_counter()
    await asyncio.gather(*(rank.meet(address) for rank in ranks))
    met_s = time.perf_counter() - began
    process.kill()
    process.join()
    return Measured(
        ranks=len(ranks),
        groups=len(groups),
        meetings_of_a_rank=max(len(rank.parts) for rank in ranks),
        connections_of_a_rank=max(sum(len(part) - 1 for _, part in rank.parts) for rank in ranks),
        requests=sum(rank.num_requests for rank in ranks),
        sent_bytes=sum(rank.num_bytes for rank in ranks),
        met_s=met_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    allow_many_files()
    found = [asyncio.run(measure(num_ranks)) for num_ranks in options.ranks]
    table = plain_table("ranks", "groups", "meetings of a rank", "its connections", "requests", "sent", "all have met")
    for each in found:
        table.add_row(
            f"{each.ranks}",
            f"{each.groups}",
            f"{each.meetings_of_a_rank}",
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
