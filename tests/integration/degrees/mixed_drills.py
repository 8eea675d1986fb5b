"""Drills jobs whose pipelines are of several methods; ``python -m tests.integration.stress --drills`` runs one by one.

Sharded, tensor-parallel and single-device pipelines stand side by side, as is fastest for the nodes that are left. The
failures of a job are drawn from its seed: nodes or single workers, in every phase of a step and of what follows a loss,
a join or a leave, one at a time or two; or a node leaves while states are copied.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient.protocol.phases import AT_BEGINNING
from tests.integration.drills import JOINER, LEAVES, PARALLEL, SHARDED, Drill, drill_job
from tests.integration.jobs import planned

NUM_DRILLS = 8
FEWEST = 2
TEXT = Path(planned.__file__).with_name("text.py")
ANYBODY = ("any", "any", "rank 0")
WHOSE = {"gather": SHARDED, "scatter": SHARDED, "exchange": PARALLEL, "send": "first", "return": "last"}
"""Who comes to a phase, where not everybody does."""
OF_LOSS = ("forward", "backward", "reduce", "prepare", "commit", "save")
IN_STEP = (*OF_LOSS, *WHOSE)
AT_START = (*(phase for phase in AT_BEGINNING if phase != "assign"), LEAVES)


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """What is drawn from a seed.

    Args:
        arguments: Of its script.
        options: Of its run.
        drills: What is done to it.
    """

    arguments: tuple[str, ...]
    options: dict[str, Any]
    drills: tuple[Drill, ...]

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{' '.join(self.arguments)}, {options}: {', '.join(map(str, self.drills))}"


def draw(seed: int) -> tuple[DrawnJob, random.Random]:
    """Return a seed's job, and what chooses among nodes."""
    rng = random.Random(seed)
    every = rng.choice(("0", "2"))
    arguments = ["--optimizer", "sgd", "--checkpoint-every", every, "--known-costs"]
    arguments += ["--batch", rng.choice(("14", "10", "6")), "--tp-chunks", rng.choice(("1", "2"))]
    arguments += ["--blocks", rng.choice(("4", "5")), *rng.choice(([], ["--tied"]))]
    arguments += rng.choice(([], ["--schedule", "zb-h1"]))
    options: dict[str, Any] = {
        "nodes": rng.choice((4, 5)),
        "workers_per_node": rng.choice((2, 2, 3)),
        "network_gbit_s": rng.choice((0.008, 0.016)),
    }
    which = random.Random(f"workers of {seed}")  # apart: all else of a seed stays as it is
    workers = [which.randrange(options["workers_per_node"]) for _ in range(NUM_DRILLS)]
    return DrawnJob(
        arguments=tuple(arguments),
        options=options,
        drills=tuple(_drill(rng, worker, saves=every != "0") for worker in workers),
    ), rng


def _drill(rng: random.Random, worker: int, *, saves: bool) -> Drill:
    of_loss, in_step = ([each for each in phases if saves or each != "save"] for phases in (OF_LOSS, IN_STEP))
    during = rng.choice(("", "", "loss", "loss", "join", "leave"))
    phase = rng.choice(AT_START if during else in_step)
    return Drill(
        kind=WHOSE.get(phase) or rng.choice((*ANYBODY, JOINER) if during == "join" and phase != LEAVES else ANYBODY),
        phase=phase,
        during=during,
        also="" if during else rng.choice(("", "", "any")),
        of_loss=rng.choice(of_loss) if during == "loss" else "backward",
        worker=worker if phase != LEAVES and rng.choice((True, False)) else None,
    )


def main() -> int:
    """Run a seed's job in this process, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the runs go")
    options = parser.parse_args()
    job, rng = draw(options.seed)
    sys.stdout.write(f"{job}\n")
    found = drill_job(
        options.run_dir,
        job.drills,
        *job.arguments,
        script=TEXT,
        fewest=FEWEST,
        choose=rng.choice,
        tp="auto",
        shard="auto",
        **job.options,
    )
    missed = f" ({'; '.join(found.missed)})" if found.missed else ""
    sys.stdout.write(f"{'; '.join(found.wrong) or 'right'}{missed}\n")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main())
