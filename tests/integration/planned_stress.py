"""Drills planned jobs at random: ``python -m tests.integration.planned_stress --minutes 60``.

Each run has a planner, a schedule, one or two workers on each node and failures drawn from its seed, one after the
other with joins between (:mod:`tests.integration.drills`), and a time limit: one that hangs is killed and reported. A
seed is run again with ``--minutes 0 --seed S``, and with another planner by ``--planner NAME``. Exit code 0 if nothing
was wrong with any run, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from resilient.planners.registry import AUTO, PLANNERS
from resilient.protocol.phases import AT_BEGINNING, IN_STEP
from tests.integration.drills import FEWEST, Drill, run_drills
from tests.integration.harness import run_limited

NUM_DRILLS = 5
KINDS = ("encoder", "language", "rank 0", "any")
OF_SHARDED, OF_SHARED = ("gather", "scatter"), ("exchange",)
"""Phases to which only workers come that divide what they do, or share it."""

OF_ALL = tuple(phase for phase in IN_STEP if phase not in (*OF_SHARDED, *OF_SHARED))
SHARDING = ("resilient", AUTO)
"""Planners that may have the workers of a node divide all units."""


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """What is drawn from a seed.

    Args:
        planner: Its planner.
        arguments: Of its script, beside the usual ones.
        fewest: Nodes of the smallest pipelines asked for.
        workers_per_node: Of each node.
        tp: How many of them share each microbatch.
        drills: What is done to it.
    """

    planner: str
    arguments: tuple[str, ...]
    fewest: int
    workers_per_node: int
    tp: str
    drills: tuple[Drill, ...]

    def __str__(self) -> str:
        nodes = f"pipelines of {self.fewest} or more nodes of {self.workers_per_node}, tp {self.tp}"
        return f"{' '.join((self.planner, *self.arguments))}, {nodes}: {', '.join(map(str, self.drills))}"


def draw(seed: int, planner: str | None) -> tuple[DrawnJob, random.Random]:
    """Return a seed's job, and what chooses among nodes.

    With two workers a node, pipelines have half as many nodes. All that does not follow from the planner is the same
    whether one is given or not.
    """
    rng = random.Random(seed)
    drawn = rng.choice([*PLANNERS, AUTO])
    planner = planner or drawn
    arguments = ["--schedule", rng.choice(("1f1b", "zb-h1")), *rng.choice([[], [], ["--frozen"]])]
    arguments += ["--checkpoint-every", "3"]
    workers = rng.choice((1, 2, 2))
    tp = rng.choice(("1", "2", "auto"))
    always = rng.choice((True, False))
    if planner in SHARDING and workers > 1 and always:  # whatever is faster
        arguments, tp = [*arguments, "--always", "sharded"], "1"
    elif workers == 1:
        tp = "1"
    elif tp == "auto":
        arguments.append("--divided")
    special = OF_SHARDED if "sharded" in arguments else OF_SHARED if tp != "1" else ()
    which = random.Random(f"workers of {seed}")  # apart: all else of a seed stays as it is
    drills: list[Drill] = []
    for _ in range(NUM_DRILLS):
        during = rng.choice(("", "", "", "loss", "join", "leave"))
        phase, instead = rng.choice(AT_BEGINNING if during else OF_ALL), rng.choice((0, 0, 1, 2))
        if instead and special and not during:
            phase = special[-instead % len(special)]
        also = "" if during else rng.choice(("", "", "encoder", "language", "any"))
        kind, worker = rng.choice(KINDS), which.randrange(workers) if rng.choice((True, False)) else None
        drills.append(Drill(kind=kind, phase=phase, during=during, also=also, worker=worker))
    fewest = -(-FEWEST.get(planner, 2) // workers)
    job = DrawnJob(
        planner=planner,
        arguments=tuple(arguments),
        fewest=fewest,
        workers_per_node=workers,
        tp=tp,
        drills=tuple(drills),
    )
    return job, rng


def drilled(seed: int, planner: str | None, root: Path) -> tuple[bool, str]:
    """Run a seed's job in this process; return whether it was right, and what is to be said of it."""
    job, rng = draw(seed, planner)
    folder = root / f"seed-{seed}"
    if "--always" in job.arguments:  # others ask the same planner
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found = run_drills(
        folder,
        job.drills,
        job.planner,
        *job.arguments,
        fewest=job.fewest,
        workers_per_node=job.workers_per_node,
        tp=job.tp,
        choose=rng.choice,
    )
    missed = f" ({'; '.join(found.missed)})" if found.missed else ""
    return not found.wrong, f"{'; '.join(found.wrong) or 'right'}{missed}"


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
    root.mkdir(parents=True, exist_ok=True)
    if options.here:
        is_right, told = drilled(options.seed, options.planner, root)
        console.print(told, markup=False, soft_wrap=True)
        return int(not is_right)
    until, seed, num_wrong = time.monotonic() + 60 * options.minutes, options.seed, 0
    while seed == options.seed or time.monotonic() < until:
        job, _ = draw(seed, options.planner)
        line = [sys.executable, "-m", "tests.integration.planned_stress", "--here", "--seed", str(seed)]
        line += ["--planner", options.planner] if options.planner else []
        log = root / f"seed-{seed}.log"
        exit_code = run_limited([*line, "--run-dir", str(root)], log, options.limit_s)
        said = f"killed after {options.limit_s:.0f} s" if exit_code < 0 else log.read_text().strip()
        num_wrong += exit_code != 0
        console.print(f"seed {seed}: {job}: {said}", markup=False, soft_wrap=True)
        seed += 1
    console.print(f"{seed - options.seed} runs, {num_wrong} wrong; see {root}", markup=False, soft_wrap=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
