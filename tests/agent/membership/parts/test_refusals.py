"""A script that refuses its job ends it with exit code 1, whatever else comes before, between and after."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from resilient.agent.membership.parts.events import NodeConnected, NodeLost, Stimulus, WorkerEnded
from tests.agent.membership.simulated import Job

REFUSAL = "ArgumentError: sharding must be off"
KILLED, ABORTED, CRASHED = -9, -6, -11


def interleaved(*sequences: tuple[Stimulus, ...]) -> Iterator[tuple[Stimulus, ...]]:
    """Yield every order of all stimuli that keeps the order of each sequence."""
    left = [sequence for sequence in sequences if sequence]
    if not left:
        yield ()
    for index, (first, *rest) in enumerate(left):
        for others in interleaved(*left[:index], tuple(rest), *left[index + 1 :]):
            yield first, *others


def of_node(node: int, exit_codes: tuple[int, int]) -> Iterator[tuple[Stimulus, ...]]:
    """Yield what is heard of a node whose workers end so, which may be lost meanwhile."""
    connected = NodeConnected(node=node, host=f"host-{node}", pid=100 + node, num_workers=2)
    ends = [
        WorkerEnded(node=node, local_rank=rank, exit_code=code, error=REFUSAL if code > 0 else "")
        for rank, code in enumerate(exit_codes)
    ]
    for order in (ends, ends[::-1]):
        yield connected, *order
        for lost_at in range(3):
            yield connected, *order[:lost_at], NodeLost(node=node, cause="node lost"), *order[lost_at:]


@pytest.mark.parametrize("last", [1, KILLED, ABORTED, CRASHED])
def test_refusals_end_the_job_with_1_in_every_order(last: int) -> None:
    """Of two nodes, a worker of which may end by a signal; who refuses while its node is there is the reason."""
    for first, second in product(of_node(0, (1, 1)), of_node(1, (1, last))):
        for order in interleaved(first, second):
            job, refused, live = Job(num_nodes=2, workers_per_node=2), False, set[int]()
            for stimulus in order:
                if job.stop is not None:
                    break
                job.feed(stimulus)
                if isinstance(stimulus, NodeConnected):
                    live.add(stimulus.node)
                elif isinstance(stimulus, WorkerEnded) and stimulus.exit_code > 0:
                    refused = refused or stimulus.node in live
                elif isinstance(stimulus, NodeLost | WorkerEnded):
                    live.discard(stimulus.node)
            assert job.stop is not None
            assert job.stop.exit_code == 1
            assert job.stop.reason.endswith(REFUSAL) == refused
