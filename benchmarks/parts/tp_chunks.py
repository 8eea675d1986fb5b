"""Step time of tensor-parallel workers that exchange tokens in chunks while they compute, beside those that do not.

    python benchmarks/parts/tp_chunks.py [--repeats 5] [--steps 15] [--chunks 2 4] [--degree 2] [--json FILE]

A model of Llama's shape on one node. All settings run in turns; a run counts with its median step, a row is the median
over runs, and ratios are those to the run of the same turn in which tokens are exchanged all at once. Microbatches of
few samples make small messages, those of many make large ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from rich.console import Console
from steps import run_steps

from resilient.cli.shared.printing import plain_table

BATCH, MICROBATCHES = 16, (1, 8)
"""Samples of a step, and of its microbatches."""


def step_ms(options: argparse.Namespace, microbatch: int, num_chunks: int) -> float:
    """Run the job; return its median step in ms."""
    found = run_steps(
        "text.py",
        {"--steps": options.steps, "--batch": BATCH, "--microbatch": microbatch},
        num_nodes=1,
        workers_per_node=options.degree,
        tp=str(options.degree),
        tp_chunks=num_chunks,
    )
    return statistics.median(found.step_ms)


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all medians here as well")
    options = parser.parse_args()
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    num_cores = len(os.sched_getaffinity(0))
    if options.degree > num_cores:
        raise SystemExit(f"{options.degree} workers need as many cores, got {num_cores}")
    settings = [(microbatch, chunks) for microbatch in MICROBATCHES for chunks in (1, *options.chunks)]
    found: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    for number in range(options.repeats):
        for setting in settings if number % 2 == 0 else settings[::-1]:
            with console.status(f"turn {number + 1}: microbatches of {setting[0]}, {setting[1]} chunks"):
                found[setting].append(step_ms(options, *setting))
    title = f"step of {options.degree} tensor-parallel workers, medians of {options.repeats} runs of {options.steps}"
    table = plain_table("microbatch", "chunks", "step, ms", "ratio", "of runs", left=("of runs",), title=title)
    for (microbatch, chunks), times in found.items():
        ratios = [each / whole for each, whole in zip(times, found[microbatch, 1], strict=True)]
        row = (f"{statistics.median(times):.1f}", f"{statistics.median(ratios):.3f}")
        table.add_row(str(microbatch), str(chunks), *row, " ".join(f"{ratio:.3f}" for ratio in ratios))
    console.print(table)
    if options.json is not None:
        rows = [{"microbatch": size, "chunks": chunks, "step_ms": each} for (size, chunks), each in found.items()]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
