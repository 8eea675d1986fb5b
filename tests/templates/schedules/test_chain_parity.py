"""Orders and times of chains are those from before there were units: what users see of them must not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.simulator import ActionCosts, simulate

RECORDED = Path(__file__).with_name("chain_parity.json")
"""By schedule: a digest of its text, the iteration's time, sums of all starts and ends, and of the rows' peaks."""


def grid() -> Iterator[tuple[ScheduleKind, int, int, int, list[int] | None]]:
    for kind in ScheduleKind:
        for num_rows in (1, 2, 3, 4, 7, 16):
            for num_microbatches in (1, 2, 5, 8, 13, 32):
                for chunks in sorted({chunks_of(kind, 2), chunks_of(kind, 3)}):
                    yield kind, num_rows, num_microbatches, chunks, None
                    if kind is ScheduleKind.EAGER:
                        limits = [1 + (3 * row + num_microbatches) % 5 for row in range(num_rows)]
                        yield kind, num_rows, num_microbatches, chunks, limits


def measured(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, chunks: int, limits: list[int] | None
) -> list[object]:
    num_stages, trains = num_rows * chunks, kind is not ScheduleKind.FORWARD_ONLY
    states = [[stage, num_stages + stage % 3] for stage in range(num_stages)] if trains else None
    schedule = generate(kind, num_rows, num_microbatches, states=states, num_chunks=chunks, max_in_flight=limits)
    stage, cell = np.arange(num_stages)[:, None], np.arange(num_microbatches)
    costs = ActionCosts(
        forward_ms=1 + (stage * 7 + cell * 3) % 5 / 4,
        backward_input_ms=1 + (stage + cell * 5) % 7 / 8,
        backward_weight_ms=(stage * 3 + cell) % 4 / 2,
        latency_ms=0.125,
        transfer_ms=((stage * 5 + cell) % 3 / 16)[:-1],
        activation_bytes=1 + (stage + 2 * cell) % 9 if trains else 0,
        reduce_ms={state: 0.5 + state % 3 for state in range(num_stages + 3)} if trains else {},
        layer_backward_ms=dict.fromkeys(range(num_stages + 3), 0.25),
    )
    timeline = simulate(schedule, costs)
    return [
        hashlib.sha256(str(schedule).encode()).hexdigest()[:16],
        timeline.iteration_ns,
        int(timeline.start_ns.sum()),
        int(timeline.end_ns.sum()),
        sum(timeline.peak_bytes),
    ]


def test_orders_times_and_memory_of_chains_are_those_recorded() -> None:
    recorded = json.loads(RECORDED.read_text())
    found: dict[str, list[object]] = {}
    for kind, rows, count, chunks, limits in grid():
        limited = "" if limits is None else " limited"
        name = f"{kind.value} rows={rows} microbatches={count} chunks={chunks}{limited}"
        found[name] = measured(kind, rows, count, chunks, limits)
    assert found == recorded
