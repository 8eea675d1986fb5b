"""Kills a node, has another join, over and over, and shows what the survivors keep of it.

``python -m tests.integration.recoveries --recoveries 200`` prints threads, descriptors and memory of two workers that
live through all of them. They run without the collector of cycles, so that whatever it would have to find stays.
After the last recovery they are looked at until they have about as many threads and descriptors as early on: gloo may
forget what it was to send when a connection breaks, and then its group stays until the communication timeout is over.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import psutil
from rich.console import Console
from rich.table import Table

from resilient import testing
from resilient.agent.launch import Launcher
from resilient.agent.membership.next_generation.speeds import NodeSpeeds
from resilient.protocol.messages import Injection
from tests.integration.harness import CHAIN, Event

NODES = 5
SURVIVORS = (0, 1)
EARLY = slice(3, 6)
"""The recoveries by which all is there that is kept once."""
PLACES = 6
"""Descriptors, or threads, by which a node's place in one generation may differ from another: of its groups."""
_FIRST_STEPS = 3
COMM_TIMEOUT_S = 20
CHAIN_ARGUMENTS = ("--no-collector", "--comm-timeout-s", str(COMM_TIMEOUT_S))


class Usage(NamedTuple):
    """What a worker has, while nothing changes; of its memory, what no other process shares, nor a file holds."""

    threads: int
    descriptors: int
    memory_mb: float


class Recoveries:
    """Has the node that came last killed, and another join, whenever all have done some steps.

    Args:
        count: Recoveries after which the job is interrupted.

    Attributes:
        usages: By survivor, what it had after each recovery; last what it had when nothing was left, or at the latest
            when the communication timeout of the last recovery was over.
    """

    def __init__(self, count: int) -> None:
        self.usages: dict[int, list[Usage]] = {node: [] for node in SURVIVORS}
        self._count = count
        self._pids: dict[int, int] = {}
        self._nodes: list[int] = []
        self._steps = 0
        self._last_look = math.inf
        self._is_over = False

    def on_event(self, launcher: Launcher, event: Event) -> None:
        """Take in an event of the job; ask for the next change when it is time."""
        if event["kind"] == "node_ready":
            self._pids[event["node"]] = event["pids"][0]
        elif event["kind"] == "generation":
            self._nodes, self._steps = event["nodes"], 0
        elif event["kind"] == "step":
            self._steps += 1
            if self._last_look < math.inf:
                self._look_again(launcher)
            elif self._steps == _FIRST_STEPS and len(self._nodes) == NODES:
                self._go_on(launcher)

    def _go_on(self, launcher: Launcher) -> None:
        for node, usages in self.usages.items():
            usages.append(_usage(self._pids[node]))
        if len(self.usages[SURVIVORS[0]]) > self._count:
            self._last_look = time.monotonic() + 2 * COMM_TIMEOUT_S
        else:
            launcher.add_node()  # it gets ready while the others recover
            launcher.inject(Injection(node=max(self._nodes)))

    def _look_again(self, launcher: Launcher) -> None:
        if self._is_over:  # a second interrupt would end the job without its checkpoint
            return
        for node, usages in self.usages.items():
            usages[-1] = _usage(self._pids[node])
        if self._last_look < time.monotonic() or all(map(_has_settled, self.usages.values())):
            self._is_over = True
            launcher.interrupt("enough")


def _has_settled(usages: list[Usage]) -> bool:
    early, last = usages[EARLY], usages[-1]
    return last.threads <= max(PLACES + usage.threads for usage in early) and last.descriptors <= max(
        PLACES + usage.descriptors for usage in early
    )


def _usage(pid: int) -> Usage:
    process = psutil.Process(pid)
    memory = process.memory_info()
    # not its unique set size: that grows with every page of the forkserver's that it happens to write to
    return Usage(process.num_threads(), process.num_fds(), (memory.rss - memory.shared) / 2**20)


def recover(
    directory: Path, count: int, script: Path = CHAIN, arguments: Sequence[str] = CHAIN_ARGUMENTS
) -> dict[int, list[Usage]]:
    """Run a job of ``count`` recoveries; return by survivor what it had before the first and after each.

    Args:
        directory: Of the run.
        count: Of recoveries.
        script: The job's, which trains until it is interrupted.
        arguments: The script's own, but for ``--steps``; its communication timeout is :data:`COMM_TIMEOUT_S`.
    """
    recoveries = Recoveries(count)
    # nodes that a busy machine slows down would be given places that need other groups, or none
    with patch.object(NodeSpeeds, "observe"):
        run = testing.run_job(
            script, "--steps", "1000000", *arguments, directory=directory, nodes=NODES, act=recoveries.on_event
        )
    assert run.reason.startswith("interrupted (enough)"), run.reason
    return recoveries.usages


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, default=200)
    options = parser.parse_args()
    table = Table("recoveries", "node", *Usage._fields)
    for node, usages in recover(Path(tempfile.mkdtemp(prefix="recoveries-")), options.recoveries).items():
        for number in range(0, len(usages), max(1, options.recoveries // 10)):
            usage = usages[number]
            table.add_row(*map(str, (number, node, usage.threads, usage.descriptors)), f"{usage.memory_mb:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
