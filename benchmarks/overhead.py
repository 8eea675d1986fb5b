"""Failure-free step time against plain PyTorch on the same model, world and batch.

    python benchmarks/overhead.py [--repeats 3] [--steps 25]

Plain PyTorch is torch.distributed.pipelining's 1F1B with DistributedDataParallel, started by torchrun; stages are cut
at the same layers. Both run in turns; a run counts with its median step, a row is the median over runs. The ratio is
ours over theirs: at most 1 means that surviving failures costs nothing while there are none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions

HERE = Path(__file__).parent
WARM_UP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A world: ``num_pipelines`` replicas of ``num_stages`` stages each."""

    num_pipelines: int
    num_stages: int
    batch: int
    microbatch: int


SETTINGS = (
    Setting(num_pipelines=2, num_stages=1, batch=512, microbatch=64),
    Setting(num_pipelines=1, num_stages=2, batch=512, microbatch=64),
    Setting(num_pipelines=2, num_stages=2, batch=512, microbatch=32),
)


def ours(setting: Setting, num_steps: int) -> tuple[float, list[int]]:
    """Run the job under the launcher; return the median step in ms and the first layer of every stage."""
    events: list[dict[str, Any]] = []
    arguments = {
        "--steps": num_steps,
        "--batch": setting.batch,
        "--microbatch": setting.microbatch,
        "--max-failures": setting.num_pipelines - 1,
        "--min-pipeline-nodes": setting.num_stages,
    }
    with tempfile.TemporaryDirectory() as folder:
        options = LaunchOptions(
            script=str(HERE / "jobs" / "mlp.py"),
            arguments=tuple(str(part) for pair in arguments.items() for part in pair),
            num_nodes=setting.num_pipelines * setting.num_stages,
            run_directory=folder,
        )
        exit_code = launch(options, events.append)
    if exit_code:
        raise SystemExit(f"the job ended with exit code {exit_code}: {events[-1]}")
    (generation,) = [event for event in events if event["kind"] == "generation"]
    cuts = [stage["first_layer"] for stage in generation["pipelines"][0]["stages"]]
    commits = [event["time"] for event in events if event["kind"] == "step"]
    steps = [1000 * (after - before) for before, after in pairwise(commits)]
    return statistics.median(steps[WARM_UP_STEPS:]), cuts


def theirs(setting: Setting, num_steps: int, cuts: list[int]) -> float:
    """Run the same under torchrun; return the median step in ms."""
    world = setting.num_pipelines * setting.num_stages
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [str(HERE / "peers" / "pipeline_ddp.py"), f"--steps={num_steps}", f"--batch={setting.batch}"]
    command += [f"--microbatch={setting.microbatch}", "--cuts=" + ",".join(map(str, cuts))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return 1000 * statistics.median(json.loads(output.strip().splitlines()[-1])[WARM_UP_STEPS:])


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    table = Table(title=f"step time, failure-free, median of {options.repeats} runs of {options.steps} steps")
    for column in (
        "pipelines x stages",
        "batch / microbatch",
        "plain PyTorch, ms",
        "resilient, ms",
        "ratio",
        "of runs",
    ):
        table.add_column(column, justify="right")
    for setting in SETTINGS:
        pairs: list[tuple[float, float]] = []
        for _ in range(options.repeats):
            own, cuts = ours(setting, options.steps)
            pairs.append((own, theirs(setting, options.steps, cuts)))
        ratios = [own / peer for own, peer in pairs]
        table.add_row(
            f"{setting.num_pipelines} x {setting.num_stages}",
            f"{setting.batch} / {setting.microbatch}",
            f"{statistics.median(peer for _, peer in pairs):.1f}",
            f"{statistics.median(own for own, _ in pairs):.1f}",
            f"{statistics.median(ratios):.3f}",
            " ".join(f"{ratio:.3f}" for ratio in ratios),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
