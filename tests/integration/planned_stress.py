"""Drills planned jobs at random: ``python -m tests.integration.planned_stress --minutes 60``.

Each run has a planner, a schedule and failures drawn from its seed, one after the other with joins between
(:mod:`tests.integration.drills`), and a time limit: one that hangs is killed and reported. A seed is run again with
``--minutes 0 --seed S``, and with another planner by ``--planner NAME``. Exit code 0 if nothing was wrong with any run,
else 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from resilient.planners.registry import AUTO, PLANNERS
from tests.integration.drills import Drill, run_drills
from tests.integration.harness import Processes

NUM_DRILLS = 5
KINDS = ("encoder", "language", "rank 0", "any")
IN_STEP = ("forward", "send", "backward", "part", "weight", "return", "reduce", "prepare", "commit")
AT_BEGINNING = ("regroup", "copy", "assign")


def draw(seed: int, planner: str | None) -> tuple[list[str], list[Drill], random.Random]:
    """Return planner and options of a seed's job, its drills, and what chooses among nodes.

    All but the planner is the same whether one is given or not.
    """
    rng = random.Random(seed)
    drawn = rng.choice([*PLANNERS, AUTO])
    options = [
        planner or drawn,
        "--schedule",
        rng.choice(("1f1b", "zb-h1")),
        *rng.choice([[], [], ["--frozen"]]),
    ]
    drills: list[Drill] = []
    for _ in range(NUM_DRILLS):
        during = rng.choice(("", "", "", "loss", "join", "leave"))
        phase = rng.choice(AT_BEGINNING if during else IN_STEP)
        also = "" if during else rng.choice(("", "", "encoder", "language", "any"))
        drills.append(Drill(kind=rng.choice(KINDS), phase=phase, during=during, also=also))
    return options, drills, rng


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after them; the first always does")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next seed")
    parser.add_argument("--planner", choices=[*PLANNERS, AUTO], help="of all runs; one of each seed's by default")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of a run")
    parser.add_argument("--run-dir", type=Path, help="where the runs go; a new temporary folder by default")
    parser.add_argument("--here", action="store_true", help="run the one seed in this process")
    options = parser.parse_args()
    console = Console(highlight=False)
    root = options.run_dir or Path(tempfile.mkdtemp(prefix="resilient-planned-stress-"))
    if options.here:
        what, drills, rng = draw(options.seed, options.planner)
        drilled = run_drills(root / f"seed-{options.seed}", drills, *what, choose=rng.choice)
        missed = f" ({'; '.join(drilled.missed)})" if drilled.missed else ""
        console.print(f"{'; '.join(drilled.wrong) or 'right'}{missed}", markup=False, soft_wrap=True)
        return int(bool(drilled.wrong))
    until, seed, num_wrong = time.monotonic() + 60 * options.minutes, options.seed, 0
    while seed == options.seed or time.monotonic() < until:
        what, drills, _ = draw(seed, options.planner)
        line = [sys.executable, "-m", "tests.integration.planned_stress", "--here", "--seed", str(seed)]
        line += ["--planner", options.planner] if options.planner else []
        log = root / f"seed-{seed}.log"
        with log.open("w") as file:
            job = subprocess.Popen(
                [*line, "--run-dir", str(root)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                job.wait(options.limit_s)
            except subprocess.TimeoutExpired:
                family = Processes()  # the nodes do not die with their launcher
                family.take_in_children(job.pid)
                family.kill()
                job.wait()
        said = f"killed after {options.limit_s:.0f} s" if job.returncode < 0 else log.read_text().strip()
        num_wrong += job.returncode != 0
        told = f"seed {seed}: {' '.join(what)}: {', '.join(map(str, drills))}: {said}"
        console.print(told, markup=False, soft_wrap=True)
        seed += 1
    console.print(f"{seed - options.seed} runs, {num_wrong} wrong; see {root}", markup=False, soft_wrap=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
