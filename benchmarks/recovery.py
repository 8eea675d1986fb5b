"""What a lost node costs: SIGKILL in mid-step, from the last step before to the first step after, against peers.

    python benchmarks/recovery.py [--repeats 10] [--peer-repeats 3] [--seed 0] [--json FILE]

Three nodes train the chain MLP of 9.7 M parameters data-parallel and survive one failure; every run kills another node
at another moment of a step. The same model and batch run under torchrun, which restarts everything from a checkpoint,
and under torchft where it is installed.

- gap: time of the first committed step after the kill minus that of the last before it.
- net: gap minus a normal step minus the redone step. Takes the interrupted step for a whole one, so it can be below
  zero when the kill comes early in a step.
- stall: gap minus the time from the last step to the kill minus the redone step; everything from the kill to the
  beginning of the redone step, without that allowance.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import shutil
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers.killing import Kill, PeerRun, measure
from rich.console import Console
from rich.table import Table

from resilient.agent.launch import Launcher
from resilient.agent.launch_options import LaunchOptions
from resilient.cli.shared.printing import plain_table
from resilient.observability.event_log import Event, read_events
from resilient.observability.run_report import build_run_report
from resilient.observability.wording import RECOVERY_PARTS
from resilient.protocol.messages import Injection

HERE = Path(__file__).parent
NUM_NODES = 3
BATCH, MICROBATCH = 768, 64
NUM_STEPS = 12
KILL_STEPS = (6, 9)
WARM_UP_STEPS = 2
MOMENTS = ("forward", "backward", "reduce", "prepare", "at once")
TARGET_NET_MS = 150.0
RUN_LIMIT_S = 90.0
PEER_KILL_STEPS = (10, 14)
TABLE_WIDTH = 160
RECOVERED = "recovered"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Which node to kill when; "at once" is ``fraction`` of a step after the step before ``step``."""

    node: int
    step: int
    moment: str
    fraction: float


def choose_failures(rng: random.Random, count: int) -> list[Failure]:
    """Draw failures; every moment has its turn."""
    return [
        Failure(
            node=rng.randrange(NUM_NODES),
            step=rng.randint(*KILL_STEPS),
            moment=MOMENTS[number % len(MOMENTS)],
            fraction=rng.uniform(0.1, 0.9),
        )
        for number in range(count)
    ]


# ---------------------------------------------------------------- ours


def ours(failure: Failure, script: str = "mlp.py") -> dict[str, Any]:
    """Run a job of ``jobs/`` with the failure; return the run's measurements in ms.

    Of a run that did not recover, only what happened is returned, and its folder stays.
    """
    folder = tempfile.mkdtemp(prefix="recovery-")
    exit_code = run_job(failure, folder, script)
    events = read_events(Path(folder) / "events.jsonl")
    if exit_code:
        told = [event for event in events if event["kind"] in ("detected", "node_lost", "failed", "stopped")]
        return {**asdict(failure), "outcome": f"exit code {exit_code}", "folder": folder, "events": told}
    shutil.rmtree(folder)
    return measure_run(failure, events)


def run_job(failure: Failure, folder: str, script: str) -> int:
    """Run the job with the failure; return the exit code."""
    arguments = {"--steps": NUM_STEPS, "--batch": BATCH, "--microbatch": MICROBATCH, "--max-failures": 1}
    at_once = failure.moment == "at once"
    injection = Injection(node=failure.node, at_step=failure.step, at_phase=failure.moment)
    launcher = Launcher(
        LaunchOptions(
            script=str(HERE / "jobs" / script),
            arguments=tuple(str(part) for pair in arguments.items() for part in pair),
            num_nodes=NUM_NODES,
            run_directory=folder,
            injections=() if at_once else (injection,),
        )
    )
    if at_once:
        launcher.subscribe(lambda event: strike_within_step(event, failure, launcher))
    watchdog = threading.Timer(RUN_LIMIT_S, launcher.stop, kwargs={"reason": "the benchmark's time limit"})
    watchdog.start()
    try:
        return launcher.run()
    finally:
        watchdog.cancel()


def strike_within_step(event: Event, failure: Failure, launcher: Launcher) -> None:
    """Once the step before is committed, kill the node while it is somewhere in the next."""
    if event["kind"] == "step" and event["step"] == failure.step - 1:
        injection = Injection(node=failure.node)
        threading.Timer(failure.fraction * event["step_ms"] / 1000, launcher.inject, (injection,)).start()


def measure_run(failure: Failure, events: Sequence[Event]) -> dict[str, Any]:
    """Measure a run from its events."""
    (recovery,) = build_run_report(events)["recoveries"]
    (killed_at,) = [event["time"] for event in events if event["kind"] == "injected"]
    steps = [event for event in events if event["kind"] == "step"]
    after = next(step for step in steps if step["generation"] >= recovery["generation"])
    before = [step["time"] for step in steps if step["generation"] < recovery["generation"]]
    normal_ms = 1000 * statistics.median(b - a for a, b in pairwise(before[WARM_UP_STEPS:]))
    gap_ms = 1000 * (after["time"] - before[-1])
    keys = ("total_ms", *(f"{part}_ms" for part in RECOVERY_PARTS), "lost_steps", "restarted_workers", "bytes_copied")
    return {
        **asdict(failure),
        "outcome": RECOVERED,
        "normal_ms": normal_ms,
        "gap_ms": gap_ms,
        "net_ms": gap_ms - normal_ms - after["step_ms"],
        "stall_ms": gap_ms - 1000 * (killed_at - before[-1]) - after["step_ms"],
        "redone_step_ms": after["step_ms"],
        **{key: recovery[key] for key in keys},
    }


# ---------------------------------------------------------------- peers


def elastic_commands(folder: Path) -> list[list[str]]:
    """Return torchrun's command."""
    options = ["--standalone", f"--nproc-per-node={NUM_NODES}", "--max-restarts=3"]
    return [[sys.executable, "-m", "torch.distributed.run", *options, *script("elastic_ddp.py", folder)]]


def torchft_commands(folder: Path, heartbeat_timeout_s: float) -> list[list[str]]:
    """Return the lighthouse's command, otherwise as it is by default, and one for each replica group."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas=1"]
    lighthouse += [f"--bind=[::]:{port}", f"--heartbeat_timeout_ms={round(1000 * heartbeat_timeout_s)}"]
    replica = [sys.executable, *script("torchft_ddp.py", folder), f"--lighthouse=http://localhost:{port}"]
    return [lighthouse, *([*replica, f"--replica={number}"] for number in range(NUM_NODES))]


def script(name: str, folder: Path) -> list[str]:
    """Return a peer's script and the options that all have."""
    return [str(HERE / "peers" / name), f"--batch={BATCH}", f"--microbatch={MICROBATCH}", f"--folder={folder}"]


def torchft_version() -> str | None:
    """Return which torchft can be imported, or None."""
    try:
        import torchft  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return next(importlib.metadata.version(name) for name in importlib.metadata.packages_distributions()["torchft"])


def run_torchrun(kill: Kill) -> PeerRun:
    """Kill a worker of torchrun."""
    # Without this, torch 2.13's workers find the addresses of the processes before them in the store they share, and
    # most restarts fail.
    return measure(elastic_commands, NUM_NODES, kill, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def run_torchft(kill: Kill, heartbeat_timeout_s: float) -> PeerRun:
    """Kill a replica group of torchft."""
    return measure(lambda folder: torchft_commands(folder, heartbeat_timeout_s), NUM_NODES, kill)


def run_peers(rng: random.Random, repeats: int, console: Console) -> dict[str, list[PeerRun]]:
    """Run every peer that is there with the same failures."""
    kills = [
        Kill(worker=rng.randrange(NUM_NODES), step=rng.randint(*PEER_KILL_STEPS), fraction=rng.uniform(0.1, 0.9))
        for _ in range(repeats)
    ]
    peers: dict[str, Callable[[Kill], PeerRun]] = {"torchrun, checkpoint every 5 steps": run_torchrun}
    version = torchft_version()
    if version is not None:
        peers[f"torchft {version}, heartbeat timeout 5 s (default)"] = lambda kill: run_torchft(kill, 5.0)
        peers[f"torchft {version}, heartbeat timeout 1 s"] = lambda kill: run_torchft(kill, 1.0)
    runs: dict[str, list[PeerRun]] = {name: [] for name in peers}
    for kill in kills:
        for name, run in peers.items():
            with console.status(f"{name}: {kill}"):
                runs[name].append(run(kill))
    return runs


# ---------------------------------------------------------------- tables


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """Write median, least and most."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def runs_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Show every run of ours, and what is typical."""
    times = ("normal_ms", "gap_ms", "net_ms", "stall_ms", "total_ms", *(f"{part}_ms" for part in RECOVERY_PARTS))
    table = Table(title=f"resilient: {NUM_NODES} nodes, one killed with SIGKILL in mid-step; times in ms")
    for name in ("node", "step", "moment"):
        table.add_column(name, no_wrap=True)
    for name in times:
        table.add_column(name.removesuffix("_ms"), justify="right")
    table.add_column("lost", justify="right")
    table.add_column("restarted", justify="right")
    for run in runs:
        moment = f"at {run['fraction']:.2f} of it" if run["moment"] == "at once" else run["moment"]
        table.add_row(
            *(str(run["node"]), str(run["step"]), moment),
            *(f"{run[name]:.0f}" for name in times),
            str(run["lost_steps"]),
            str(run["restarted_workers"]),
        )
    table.add_section()
    for name, pick in (("median", statistics.median), ("least", min), ("most", max)):
        table.add_row(
            "", "", name, *(f"{pick([run[time] for run in runs]):.0f}" for time in times), "", "", style="bold"
        )
    return table


def comparison_table(runs: Sequence[dict[str, Any]], num_runs: int, peers: dict[str, list[PeerRun]]) -> Table:
    """Show ours next to the peers."""
    title = "one process killed in mid-step: median (least to most)"
    columns = ("", "runs", "recovered", "step, s", "gap, s", "to a new step, s", "steps lost", "survivors restarted")
    table = plain_table(*columns, left=("",), title=title)
    gaps = spread([run["gap_ms"] / 1000 for run in runs], ".2f")
    table.add_row(
        "resilient",
        *(str(num_runs), str(len(runs))),
        f"{statistics.median(run['normal_ms'] for run in runs) / 1000:.2f}" if runs else "-",
        *(gaps, gaps),
        spread([run["lost_steps"] for run in runs], ".3g"),
        spread([run["restarted_workers"] for run in runs], ".3g"),
    )
    for name, all_runs in peers.items():
        good = [run for run in all_runs if run.outcome == RECOVERED]
        table.add_row(
            name,
            *(str(len(all_runs)), str(len(good))),
            f"{statistics.median(run.step_s or 0.0 for run in good):.2f}" if good else "-",
            spread([run.gap_s or 0.0 for run in good], ".2f"),
            spread([run.progress_s or 0.0 for run in good], ".2f"),
            spread([run.lost_steps or 0 for run in good], ".3g"),
            spread([run.restarted or 0 for run in good], ".3g"),
        )
    return table


def show_verdict(runs: Sequence[dict[str, Any]], num_runs: int, console: Console) -> None:
    """Compare with the target; a run that did not recover misses it."""
    net_ms = statistics.median(run["net_ms"] for run in runs) if runs else float("inf")
    restarted = sum(run["restarted_workers"] for run in runs)
    met = net_ms <= TARGET_NET_MS and restarted == 0 and len(runs) == num_runs
    console.print(
        f"recovered from {len(runs)} of {num_runs} failures; net median {net_ms / 1000:.3f} s (target: at most "
        f"{TARGET_NET_MS / 1000:.2f} s), {restarted} restarted processes (target: 0): {'met' if met else 'NOT met'}",
        style="bold green" if met else "bold red",
        soft_wrap=True,
    )


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peer-repeats", type=int, default=3, help="0 leaves the peers out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all measurements here as well")
    options = parser.parse_args()
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    rng = random.Random(options.seed)
    runs: list[dict[str, Any]] = []
    for failure in choose_failures(rng, options.repeats):
        with console.status(f"resilient: {failure}"):
            runs.append(ours(failure))
    good = [run for run in runs if run["outcome"] == RECOVERED]
    if good:
        console.print(runs_table(good))
    peers = run_peers(rng, options.peer_repeats, console) if options.peer_repeats else {}
    if options.json is not None:
        found = {name: [asdict(run) for run in all_runs] for name, all_runs in peers.items()}
        options.json.write_text(json.dumps({"resilient": runs, "peers": found}, indent=2) + "\n")
    console.print(comparison_table(good, len(runs), peers))
    for run in runs:
        if run["outcome"] != RECOVERED:
            console.print(f"resilient: {run}", soft_wrap=True)
    for name, all_runs in peers.items():
        for run in all_runs:
            if run.outcome != RECOVERED:
                console.print(f"{name}: {run.kill}: {run.outcome}", soft_wrap=True)
    if torchft_version() is None:
        console.print("torchft: not installed")
    show_verdict(good, len(runs), console)


if __name__ == "__main__":
    main()
