"""Failure-free step time against plain PyTorch on the same model, world and batch.

    python benchmarks/overhead.py [--repeats 5] [--steps 25] [--only tensor] [--model llama] [--json FILE]

Plain PyTorch is torch.distributed.pipelining's 1F1B with DistributedDataParallel, its stages cut at the same layers;
FSDP2 against the workers of one node that divide the states (``--shard on``); or torch's tensor parallelism, with
sequence parallelism, against theirs (``--tp 2``). All are started by torchrun, on an MLP and on a model of Llama's
shape; an MLP of the user's own has no rules for tensor parallelism. Both ways run in turns, each in turn first; a run
counts with its median step, a row is the median over runs. The ratio is ours over theirs: at most 1 means that
surviving failures costs nothing while there are none. Worlds of more workers than this machine has cores are left
out, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parts.steps import WARM_UP_STEPS, run_steps
from rich.console import Console

from resilient.cli.shared.printing import plain_table

PEERS = Path(__file__).parent / "peers"
PIPELINE, FSDP2, TENSOR = "pipelining + DDP", "FSDP2", "tensor parallelism"
MODELS = ("mlp", "llama")
SCRIPTS = {PIPELINE: "pipeline_ddp.py", FSDP2: "fsdp2.py", TENSOR: "tensor_parallel.py"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A world, and what it is compared with.

    Args:
        model: Of ``jobs/``.
        peer: How plain PyTorch trains it.
        num_pipelines: Replicas.
        num_stages: Of each; 1 where workers divide it.
        num_devices: Workers that divide a stage.
        batch: Samples of a step.
        microbatch: Samples of a microbatch.
    """

    model: str
    peer: str
    num_pipelines: int = 1
    num_stages: int = 1
    num_devices: int = 1
    batch: int
    microbatch: int

    @property
    def world(self) -> int:
        """How many workers."""
        return self.num_pipelines * self.num_stages * self.num_devices

    @property
    def label(self) -> str:
        """What the table calls the world."""
        return f"{self.num_pipelines} x {self.num_stages}" + f" x {self.num_devices}" * (self.num_devices > 1)


def settings() -> list[Setting]:
    """Return all of them."""
    sizes = {"mlp": (512, 64), "llama": (64, 8)}
    found: list[Setting] = []
    for model, (batch, microbatch) in sizes.items():
        size: dict[str, Any] = {"model": model, "batch": batch}
        found += [
            Setting(**size, peer=PIPELINE, num_pipelines=2, microbatch=microbatch),
            Setting(**size, peer=PIPELINE, num_stages=2, microbatch=microbatch),
            Setting(**size, peer=PIPELINE, num_pipelines=2, num_stages=2, microbatch=microbatch // 2),
            # a round of two microbatches for each device: every one gathers and sums all layers
            Setting(**size, peer=FSDP2, num_devices=2, microbatch=batch // 4),
        ]
        if model == "llama":
            found.append(Setting(**size, peer=TENSOR, num_devices=2, microbatch=microbatch))
    return found


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of runs, in ms, in the order of the pairs."""

    setting: Setting
    ours_ms: list[float] = field(default_factory=list)
    theirs_ms: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, pair by pair."""
        return [own / peer for own, peer in zip(self.ours_ms, self.theirs_ms, strict=True)]


def ours(setting: Setting, num_steps: int) -> tuple[float, list[int]]:
    """Run the job under the launcher; return the median step in ms and the first layer of every stage."""
    arguments = {
        "--steps": num_steps,
        "--batch": setting.batch,
        "--microbatch": setting.microbatch,
        "--max-failures": setting.num_pipelines - 1,
        "--min-pipeline-nodes": setting.num_stages,
    }
    found = run_steps(
        "text.py" if setting.peer == TENSOR else f"{setting.model}.py",
        arguments,
        num_nodes=setting.num_pipelines * setting.num_stages,
        workers_per_node=setting.num_devices,
        shard="on" if setting.peer == FSDP2 else "off",
        tp=str(setting.num_devices) if setting.peer == TENSOR else "1",
    )
    cuts = [stage["first_layer"] for stage in found.generation["pipelines"][0]["stages"]]
    return statistics.median(found.step_ms), cuts


def theirs(setting: Setting, num_steps: int, cuts: list[int]) -> float:
    """Run the same under torchrun; return the median step in ms."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.world}"]
    command += [str(PEERS / SCRIPTS[setting.peer]), f"--model={setting.model}"]
    command += [f"--steps={num_steps}", f"--batch={setting.batch}", f"--microbatch={setting.microbatch}"]
    if setting.peer == PIPELINE:
        command.append("--cuts=" + ",".join(map(str, cuts)))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"plain PyTorch ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return 1000 * statistics.median(json.loads(done.stdout.strip().splitlines()[-1])[WARM_UP_STEPS:])


def compare(setting: Setting, repeats: int, num_steps: int) -> Measured:
    """Run both ways in turns; the one that goes first takes turns, too."""
    measured = Measured(setting=setting)
    cuts: list[int] = []
    for number in range(repeats):
        if number % 2 and cuts:
            measured.theirs_ms.append(theirs(setting, num_steps, cuts))
            own_ms, cuts = ours(setting, num_steps)
        else:
            own_ms, cuts = ours(setting, num_steps)
            measured.theirs_ms.append(theirs(setting, num_steps, cuts))
        measured.ours_ms.append(own_ms)
    return measured


def print_table(found: list[Measured], options: argparse.Namespace, console: Console) -> None:
    """Print medians, and the ratios of all pairs of runs."""
    title = f"step time, failure-free, medians of {options.repeats} runs of {options.steps} steps each"
    headers = ("model", "against", "pipelines x stages", "batch / microbatch", "theirs, ms", "ours, ms", "ratio")
    table = plain_table(*headers, "of runs", left=("model", "against", "of runs"), title=title)
    for each in found:
        table.add_row(
            each.setting.model,
            each.setting.peer,
            each.setting.label,
            f"{each.setting.batch} / {each.setting.microbatch}",
            f"{statistics.median(each.theirs_ms):.1f}",
            f"{statistics.median(each.ours_ms):.1f}",
            f"{statistics.median(each.ratios):.3f}",
            " ".join(f"{ratio:.3f}" for ratio in each.ratios),
        )
    console.print(table)


def main() -> None:
    """Run all settings and print the table."""
    peers = {"pipeline": PIPELINE, "fsdp2": FSDP2, "tensor": TENSOR}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", choices=tuple(peers), help="compare with this alone")
    parser.add_argument("--model", choices=MODELS, help="train this alone")
    parser.add_argument("--json", type=Path, help="write all medians here as well")
    options = parser.parse_args()
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 150
    num_cores = len(os.sched_getaffinity(0))
    found: list[Measured] = []
    for setting in settings():
        if (options.only and setting.peer != peers[options.only]) or options.model not in (None, setting.model):
            continue
        if setting.world > num_cores:
            what = f"{setting.model}, {setting.peer}, {setting.label}"
            console.print(f"left out: {what}: {setting.world} workers on {num_cores} cores", soft_wrap=True)
            continue
        with console.status(f"{setting.model}, {setting.peer}, {setting.label}"):
            found.append(compare(setting, options.repeats, options.steps))
    print_table(found, options, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
