"""What the control plane costs at many nodes: a coordinator's process, and agents that are connections alone.

    python benchmarks/control_plane.py [--nodes 64 256 1024 4096] [--repeats 3] [--json FILE]

The coordinator is a process of its own. The agents are real connections in this process; they answer at once, as their
workers would, install in 0.1 s, and train nothing; Python looks for no garbage among them meanwhile. Their job has the
80 blocks of Llama 3 70B in pipelines of at least six nodes. One node, three at once and a tenth of all say goodbye in
mid-step, then others join, up to a hundred and up to a thousand at once. "until the last" is from the first goodbye, or
connection, to the moment when the last agent has its place in the generation that all are in; of the status page, until
it is read. Medians; bytes are what the coordinator sends, processor time and memory are its own. What takes longer than
--limit-s ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from parts.agents import Fleet
from rich.console import Console

from resilient.agent.coordinator import Coordinator
from resilient.agent.journal.term import Term
from resilient.agent.leadership.knocking import session_for
from resilient.agent.membership.parts.context import Settings
from resilient.cli.shared.printing import plain_table
from resilient.common.memory import Sweeper
from resilient.common.processes import allow_many_files

TOKEN = "benchmark"
NUM_JOINING = (100, 1000)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one change of membership cost.

    Args:
        nodes: Before it.
        what: It was.
        generations: It took.
        last_ms: Until the last agent had its place.
        sent_bytes: By the coordinator.
        cpu_ms: Of the coordinator.
        memory_bytes: Of the coordinator, afterwards.
    """

    nodes: int
    what: str
    generations: int
    last_ms: float
    sent_bytes: int
    cpu_ms: float
    memory_bytes: int


def serve(num_nodes: int, folder: str, told: Connection) -> None:
    """Run a coordinator, in a process of its own, until it is killed."""

    async def run() -> None:
        settings = Settings(
            script="train.py", directory=folder, run_directory=folder, num_nodes=num_nodes, heartbeat_s=600.0
        )
        coordinator = Coordinator(settings, TOKEN, lambda _: None, Term.claim(folder))
        await coordinator.start("127.0.0.1", 0)
        told.send(coordinator.address)
        await coordinator.wait()

    allow_many_files()
    asyncio.run(run())


async def measure(num_nodes: int, repeats: int, limit_s: float) -> list[Measured]:
    """Return what changes cost, each as often as asked for; each may take so long."""
    ours, theirs = mp.get_context("spawn").Pipe()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = mp.get_context("spawn").Process(target=serve, args=(num_nodes, folder, theirs), daemon=True)
        process.start()
        coordinator = psutil.Process(process.pid)
        address = await asyncio.to_thread(ours.recv)
        async with session_for(TOKEN) as session:
            fleet, sweeper = Fleet(session, address), Sweeper(0.0)

            async def settled() -> None:
                await asyncio.wait_for(fleet.until_running(), limit_s)

            async def look() -> None:
                fleet.received_bytes += await fleet.look()

            async def note(what: str, change: Callable[[], Awaitable[None]]) -> None:
                nodes, cpu_s, received = fleet.size, sum(coordinator.cpu_times()[:2]), fleet.received_bytes
                generation = fleet.generation
                sweeper.pass_time(time.monotonic(), is_calm=True)
                began = time.perf_counter()
                fleet.last_placed_at = 0.0
                await change()
                await settled()
                last_ms = 1e3 * ((fleet.last_placed_at or time.perf_counter()) - began)
                cpu_ms = 1e3 * (sum(coordinator.cpu_times()[:2]) - cpu_s)
                memory_bytes = coordinator.memory_info().rss
                sent = fleet.received_bytes - received
                found.append(
                    Measured(
                        nodes=nodes,
                        what=what,
                        generations=fleet.generation - generation,
                        last_ms=last_ms,
                        sent_bytes=sent,
                        cpu_ms=cpu_ms,
                        memory_bytes=memory_bytes,
                    )
                )

            await note("first generation", partial(fleet.join, num_nodes))
            for _ in range(repeats):
                await note("status page", look)
                for what, lost in (("1 lost", 1), ("3 lost", 3), ("a tenth lost", num_nodes // 10)):
                    await note(what, partial(fleet.leave, lost))
                    await fleet.join(num_nodes - fleet.size)
                    await settled()
                for joining in sorted({min(most, num_nodes // 4) for most in NUM_JOINING}):
                    await fleet.leave(joining)
                    await settled()
                    await note(f"{joining} join", partial(fleet.join, joining))
            sweeper.close()
            await fleet.close()
        process.kill()
        process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for each change")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    allow_many_files()
    columns = ("nodes", "what", "generations", "until the last", "sent", "an agent", "processor", "memory")
    table = plain_table(*columns, left=("what",), title=f"medians of {options.repeats}")
    rows: list[dict[str, Any]] = []
    for num_nodes in options.nodes:
        measured = asyncio.run(measure(num_nodes, options.repeats, options.limit_s))
        rows += [asdict(each) for each in measured]
        for what in dict.fromkeys(each.what for each in measured):
            of_kind = [each for each in measured if each.what == what]
            sent = median(each.sent_bytes for each in of_kind)
            table.add_row(
                f"{num_nodes}",
                what,
                f"{median(each.generations for each in of_kind):g}",
                f"{median(each.last_ms for each in of_kind):.0f} ms",
                f"{sent / 1e6:.2f} MB",
                f"{sent / num_nodes / 1e3:.1f} kB",
                f"{median(each.cpu_ms for each in of_kind):.0f} ms",
                f"{max(each.memory_bytes for each in of_kind) / 1e6:.0f} MB",
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
