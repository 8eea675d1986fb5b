"""What can be known only on a GPU, in one command of at most eight minutes that needs no network.

    python benchmarks/gpu.py [--minutes 8] [--only PART ...] [--json gpu.json] [--rehearse]

Runs the tests that need CUDA, the demo and jobs that lose nodes, a leak check over 20 recoveries; measures layers
against derived profiles, state copies, training speed against plain PyTorch and, where there are two GPUs, NCCL. Each
part runs in a process of its own, in the time that later ones do not need; what is skipped says why. Exit code 0 if all
that ran is as it should be, 1 if not, 3 without a GPU. ``--rehearse`` runs all parts on the CPU, in sizes that say
nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.parts.gpu import copies, cuda_tests, groups, leaks, profiles, runs, speed
from benchmarks.parts.gpu.part import Part, run_all
from benchmarks.parts.gpu.report import machine, report_of, table_of

PARTS = (
    Part(name="tests", measure=cuda_tests.measure, needs_s=105),
    Part(name="profile", measure=profiles.measure, needs_s=32),
    Part(name="copies", measure=copies.measure, needs_s=15),
    Part(name="speed", measure=speed.measure, needs_s=48),
    Part(name="kills", measure=runs.kills, needs_s=22),
    Part(name="demo", measure=runs.demo, needs_s=75),
    Part(name="nccl", measure=groups.measure, needs_s=40, num_devices=2),
    Part(name="leaks", measure=leaks.measure, needs_s=95),
    Part(name="compiled", measure=speed.measure_compiled, needs_s=85),
)
"""In the order of what would be missed most when time is short; what one device needs is there in eight minutes."""
MINUTES = 8.0
NO_GPU = 3
_REHEARSED_DEVICES = 2
_TABLE_WIDTH = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="leave out all other parts")
    parser.add_argument("--json", type=Path, help="write everything here as well")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in sizes that say nothing of speed")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    num_devices = _REHEARSED_DEVICES if options.rehearse else torch.cuda.device_count()
    if not num_devices:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs alone"
        console.print(f"no GPU: torch {torch.__version__}, {built}, finds no CUDA device; --rehearse needs none")
        return NO_GPU
    device = "cpu" if options.rehearse else "cuda"
    folder = Path(tempfile.mkdtemp(prefix="resilient-gpu-"))
    began = time.monotonic()
    outcomes = run_all(
        [part for part in PARTS if not options.only or part.name in options.only],
        device=device,
        num_devices=num_devices,
        folder=folder,
        budget_s=60 * options.minutes,
        is_rehearsal=options.rehearse,
        tell=lambda text: console.print(text, style="dim"),
    )
    took_s = time.monotonic() - began
    on = machine(device)
    where = "rehearsal on the CPU" if options.rehearse else ", ".join(on["devices"])
    console.print(table_of(outcomes, f"{where}, torch {torch.__version__}, {took_s:.0f} s"))
    console.print(f"what the parts printed is in {folder}", style="dim", soft_wrap=True)
    if options.json is not None:
        report = report_of(outcomes, machine=on, is_rehearsal=options.rehearse, took_s=took_s)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(outcome.is_wrong for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running part ends as well
    sys.exit(main())
