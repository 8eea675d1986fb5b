"""Kills nodes at random, over and over, and checks every run: ``python -m tests.integration.stress --repeats 50``.

Each run is a ``resilient run`` of its own, with a time limit: one that hangs is killed and reported. It is a function
of its seed (which node dies in which phase of which step), so a failure is run again with ``--repeats 1 --seed S``.
Exit code 0 if all runs ended with the parameters of the failure-free one, else 1.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resilient.cli.demo import example_script
from resilient.errors import ResilientError
from resilient.observability.event_log import read_events
from resilient.observability.run_comparison import compare_runs
from resilient.observability.run_report import build_run_report
from tests.integration.degrees.mixed_drills import draw
from tests.integration.harness import run_limited, spare_nodes

IN_STEP = ("forward", "send", "backward", "return", "reduce", "prepare", "commit")
OF_MIXED = ("gather", "scatter", "exchange")
"""Where only nodes of some methods come to."""
IN_RECOVERY = ("regroup", "connect", "copy", "verify", "assign")
KILLED = "killed, as it took too long"
TOLERANCE = 1e-9
STEPS = 12
CHAIN = Path(__file__).parent / "jobs" / "chain.py"
TEXT = CHAIN.with_name("text.py")
MIXED_OPTIONS = ("--workers-per-node", "2", "--tp", "auto", "--shard", "auto", "--network-gbit-s", "0.008")
MIXED_ARGUMENTS = ("--steps", str(STEPS), "--tied", "--known-costs")
VLM_ARGUMENTS = ("--steps", str(STEPS), "--batch", "24", "--microbatch", "4", "--precision", "fp64")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one run went; ``wrong`` says what was not as it should be, "" when all was."""

    seed: int
    injections: tuple[str, ...]
    directory: Path
    wrong: str
    recoveries_ms: tuple[float, ...] = ()


def choose_injections(seed: int, reference: Path, in_step: tuple[str, ...] = IN_STEP) -> tuple[str, ...]:
    """Draw one failure, or two; the second may hit the recovery of the first, where redundancy can spare its node."""
    rng = random.Random(seed)
    formed = next(event for event in read_events(reference / "events.jsonl") if event["kind"] == "generation")
    first = rng.choice(formed["nodes"])
    step = rng.randint(1, STEPS - 1)
    worker = rng.choice(("", "", ",worker"))
    phase = rng.choice(in_step)
    injections = [f"node={first},step={step},phase={phase}{worker}"]
    if rng.random() < 0.5:
        phase = rng.choice((*in_step, *IN_RECOVERY))
        later = step if phase in IN_RECOVERY else rng.randint(step, STEPS)
        others = [node for node in formed["nodes"] if node != first]
        second = rng.choice(spare_nodes(formed, first) if later == step else others)
        injections.append(f"node={second},step={later},phase={phase}")
    return tuple(injections)


def run_once(seed: int, options: argparse.Namespace, reference: Path | None, directory: Path) -> Result:
    """Run the job once, with the seed's failures when there is a reference to compare with."""
    in_step = (*IN_STEP, *OF_MIXED) if options.mixed else IN_STEP
    injections = choose_injections(seed, reference, in_step) if reference else ()
    script, arguments = (example_script(), VLM_ARGUMENTS) if options.vlm else (CHAIN, ("--steps", str(STEPS)))
    if options.mixed:
        script, arguments = TEXT, MIXED_ARGUMENTS
    line = [str(Path(sys.executable).with_name("resilient")), "run", "--plain", "--nodes", str(options.nodes)]
    line += ["--run-dir", str(directory), *(MIXED_OPTIONS if options.mixed else ())]
    line += [word for text in injections for word in ("--inject", text)]
    directory.mkdir(parents=True)
    exit_code = run_limited([*line, str(script), *arguments], directory / "output.log", options.limit_s)
    recoveries, wrong = check(exit_code, directory, reference) if exit_code != -signal.SIGKILL else ((), KILLED)
    return Result(seed=seed, injections=injections, directory=directory, wrong=wrong, recoveries_ms=recoveries)


def drill_once(seed: int, options: argparse.Namespace, directory: Path) -> Result:
    """Run the drills of a seed (:mod:`tests.integration.degrees.mixed_drills`)."""
    directory.mkdir(parents=True)
    log = directory / "output.log"
    line = [
        sys.executable,
        "-m",
        "tests.integration.degrees.mixed_drills",
        "--seed",
        str(seed),
        "--run-dir",
        str(directory),
    ]
    exit_code = run_limited(line, log, options.limit_s)
    wrong, recoveries = KILLED if exit_code == -signal.SIGKILL else "", ()
    if exit_code == 0:
        report = build_run_report(read_events(directory / "run" / "events.jsonl"))
        recoveries = tuple(recovery["total_ms"] for recovery in report["recoveries"])
    elif not wrong:
        wrong = (log.read_text().splitlines() or [f"exit code {exit_code}"])[-1]
    drills = tuple(map(str, draw(seed)[0].drills))
    return Result(seed=seed, injections=drills, directory=directory, wrong=wrong, recoveries_ms=recoveries)


def check(exit_code: int, directory: Path, reference: Path | None) -> tuple[tuple[float, ...], str]:
    """Return what the recoveries took in ms, and what is wrong with the run."""
    try:
        report = build_run_report(read_events(directory / "events.jsonl"))
        compared = compare_runs(directory, reference or directory)
    except (OSError, ResilientError) as error:
        return (), f"exit code {exit_code}, {error}"
    recoveries = report["recoveries"]
    reasons = [
        (exit_code != 0, f"exit code {exit_code}: {report['exit']['reason']}"),
        (not compared["same_steps_and_samples"], "other steps or samples"),
        (not compared["max_param_rel_diff"] <= TOLERANCE, f"parameters differ by {compared['max_param_rel_diff']}"),
        (any(recovery["lost_steps"] > 1 for recovery in recoveries), "a failure cost more than a step"),
        (any(recovery["restarted_workers"] for recovery in recoveries), "a surviving worker was restarted"),
    ]
    times = tuple(recovery["total_ms"] for recovery in recoveries)
    return times, "; ".join(reason for holds, reason in reasons if holds)


def table_of(results: list[Result]) -> Table:
    """Return the summary."""
    times = [recovery for result in results for recovery in result.recoveries_ms]
    table = Table("runs", "hangs", "mismatches", "recoveries", "median ms", "slowest ms")
    hangs = sum(result.wrong.startswith("killed") for result in results)
    mismatches = sum(bool(result.wrong) for result in results) - hangs
    row = [len(results), hangs, mismatches, len(times)]
    row += [f"{statistics.median(times):.0f}", f"{max(times):.0f}"] if times else ["-", "-"]
    table.add_row(*map(str, row))
    return table


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="runs, each with its own failures")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next seed")
    parser.add_argument("--nodes", type=int, help="4 with --mixed, whose plan for 6 is all tensor parallel; else 6")
    job = parser.add_mutually_exclusive_group()
    job.add_argument("--vlm", action="store_true", help="train the example instead of the small chain")
    job.add_argument(
        "--mixed", action="store_true", help="train with sharded beside tensor-parallel nodes of 2 workers"
    )
    job.add_argument(
        "--drills",
        action="store_true",
        help="failures one after the other, with joins between, where methods are mixed",
    )
    parser.add_argument("--limit-s", type=float, help="time limit of a run, 60 by default; 300 with --drills")
    parser.add_argument("--run-dir", type=Path, help="where the runs go; a new temporary folder by default")
    options = parser.parse_args()
    options.nodes = options.nodes or (4 if options.mixed else 6)
    options.limit_s = options.limit_s or (300.0 if options.drills else 60.0)
    console = Console(highlight=False)
    root = options.run_dir or Path(tempfile.mkdtemp(prefix="resilient-stress-"))
    reference = None if options.drills else run_once(-1, options, None, root / "reference")
    if reference is not None and reference.wrong:
        console.print(f"the failure-free run: {reference.wrong}; see {reference.directory}", markup=False)
        return 1
    results: list[Result] = []
    for seed in range(options.seed, options.seed + options.repeats):
        folder = root / f"seed-{seed}"
        result = (
            drill_once(seed, options, folder)
            if reference is None
            else run_once(seed, options, reference.directory, folder)
        )
        results.append(result)
        times = ", ".join(f"{recovery:.0f} ms" for recovery in result.recoveries_ms) or "no failure came to pass"
        failures = "; ".join(result.injections)
        console.print(f"seed {seed}: {failures}: {result.wrong or times}", markup=False, soft_wrap=True)
        if result.wrong:
            console.print(f"  again: --repeats 1 --seed {seed}; see {result.directory}", markup=False, soft_wrap=True)
    console.print(table_of(results))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
