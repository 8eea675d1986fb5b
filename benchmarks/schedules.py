"""What schedules cost: how long generating and simulating them takes, and the bubbles and memory of each kind.

    python benchmarks/schedules.py [--rows 64] [--microbatches 512]

Times of generating and simulating are medians of 7 after a warm-up that compiles. Bubbles are of a forward, a backward
for inputs and one for weights of equal length, with messages that take no time and a fifth of a forward.
"""

from __future__ import annotations

import argparse
import statistics
import time

from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind, chunks_of
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate

REPEATS = 7
LATENCIES_MS = (0.0, 0.2)


def run(
    kind: ScheduleKind, num_rows: int, num_microbatches: int, latency_ms: float
) -> tuple[Timeline, tuple[float, float]]:
    """Return the timeline, and how many milliseconds generating and simulating took."""
    num_chunks = chunks_of(kind, 2)
    part_ms = 1.0 / num_chunks
    costs = ActionCosts(
        forward_ms=part_ms,
        backward_input_ms=part_ms,
        backward_weight_ms=part_ms,
        latency_ms=latency_ms,
        activation_bytes=1,
    )
    started = time.perf_counter()
    schedule = generate(kind, num_rows, num_microbatches, num_chunks=num_chunks)
    generated = time.perf_counter()
    timeline = simulate(schedule, costs)
    return timeline, (1e3 * (generated - started), 1e3 * (time.perf_counter() - generated))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    args = parser.parse_args()
    columns = ("schedule", "generate", "simulate", *(f"bubble at {ms} F" for ms in LATENCIES_MS), "in flight")
    table = plain_table(*columns, left=columns[:1], title=f"{args.rows} rows, {args.microbatches} microbatches")
    run(ScheduleKind.ONE_F_ONE_B, 2, 2, 0.0)
    for kind in ScheduleKind:
        if kind is ScheduleKind.FORWARD_ONLY:
            continue
        taken = [run(kind, args.rows, args.microbatches, 0.0)[1] for _ in range(REPEATS)]
        timelines = [run(kind, args.rows, args.microbatches, ms)[0] for ms in LATENCIES_MS]
        bubbles = [100 * timeline.bubble_ms[0] / timeline.iteration_ms for timeline in timelines]
        table.add_row(
            kind.value,
            *(f"{statistics.median(each):.0f} ms" for each in zip(*taken, strict=True)),
            *(f"{bubble:.1f} %" for bubble in bubbles),
            str(max(timelines[0].peak_bytes)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
