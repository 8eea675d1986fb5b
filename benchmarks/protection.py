"""What keeping strangers out costs a job: recovery and step time with TLS and authenticated meetings, and without.

    python benchmarks/protection.py [--repeats 10] [--seed 0] [--json FILE]

The job of ``recovery.py`` loses a node, ten times in ten ways, each once with and once without TLS between nodes and
coordinator and proofs between workers. Times in ms; "more" is the median of the pairs' differences.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from recovery import RECOVERED, TABLE_WIDTH, Failure, choose_failures, ours, spread
from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.observability.wording import RECOVERY_PARTS

WAYS = ("protected", "unprotected")
TARGET_MS = 20.0
ROWS = {
    "step": "normal_ms",
    "redone step": "redone_step_ms",
    **{part: f"{part}_ms" for part in RECOVERY_PARTS},
    "recovery but the redone step": "recovery_ms",
}


def measure(way: str, failure: Failure) -> dict[str, Any]:
    """Run the job in this process, which is the coordinator's."""
    if way == "unprotected":
        importlib.import_module("jobs.unprotected")
    run = ours(failure, "mlp.py" if way == "protected" else "unprotected_mlp.py")
    if run["outcome"] == RECOVERED:
        run["recovery_ms"] = sum(run[f"{part}_ms"] for part in RECOVERY_PARTS if part != "redo")
    return run


def main() -> None:
    """Run all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all measurements here as well")
    options = parser.parse_args()
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    pairs: list[dict[str, dict[str, Any]]] = []
    fresh = multiprocessing.get_context("spawn")
    for number, failure in enumerate(choose_failures(random.Random(options.seed), options.repeats)):
        pair: dict[str, dict[str, Any]] = {}
        for way in WAYS[:: 1 if number % 2 else -1]:
            with console.status(f"{way}: {failure}"), ProcessPoolExecutor(1, mp_context=fresh) as pool:
                pair[way] = pool.submit(measure, way, failure).result()
        pairs.append(pair)
    if options.json is not None:
        options.json.write_text(json.dumps(pairs, indent=2) + "\n")
    for pair, failure in zip(pairs, choose_failures(random.Random(options.seed), options.repeats), strict=True):
        for way, run in pair.items():
            if run["outcome"] != RECOVERED:
                console.print(f"{way}: {asdict(failure)}: {run['outcome']}", soft_wrap=True)
    good = [pair for pair in pairs if all(run["outcome"] == RECOVERED for run in pair.values())]
    if not good:
        raise SystemExit("no pair of jobs has recovered")
    table = plain_table("", *WAYS, "more", left=("",), title=f"{len(good)} pairs: median (least to most), ms")
    for label, key in ROWS.items():
        columns = [[pair[way][key] for pair in good] for way in WAYS]
        more = [first - second for first, second in zip(*columns, strict=True)]
        table.add_row(label, *(spread(column, ".1f") for column in columns), spread(more, "+.1f"))
    console.print(table)
    more_ms = median(pair["protected"]["recovery_ms"] - pair["unprotected"]["recovery_ms"] for pair in good)
    met = more_ms <= TARGET_MS and len(good) == len(pairs)
    console.print(
        f"recovery takes {more_ms:.1f} ms more with protection (target: at most {TARGET_MS:.0f} ms): "
        f"{'met' if met else 'NOT met'}",
        style="bold green" if met else "bold red",
    )


if __name__ == "__main__":
    main()
