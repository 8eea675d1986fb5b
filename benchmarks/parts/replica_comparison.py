"""What a state's fingerprint takes, which comparisons of copies need, against the optimizer's step over the state.

    python benchmarks/parts/replica_comparison.py [--megabytes 256] [--repeats 9]

On one core, in processor time. A step of training takes longer than its optimizer, so the share bounds from above what
comparisons in every 100th step cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from state_copy import large_state

from resilient.cli.shared.printing import plain_table
from resilient.optim import AdamW
from resilient.protocol.job_config import JobConfig
from resilient.state.fingerprint import fingerprint


def processor_s(call: Callable[[], object], repeats: int) -> float:
    """Return the median of several calls."""
    times: list[float] = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return median(times)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = large_state(options.megabytes << 20, 1.0)
    optimizer = AdamW(lr=1e-3).build([state], 0)
    num_bytes = state.bytes.numel()
    seconds = {
        "fingerprint": processor_s(lambda: fingerprint(state.bytes), options.repeats),
        "optimizer's step": processor_s(optimizer.step, options.repeats),
    }
    every = JobConfig(global_batch=1, microbatch=1).compare_replicas_every
    table = plain_table("what", "ms", "GB/s", left=("what",), title=f"{num_bytes / 1e6:.0f} MB of state")
    for name, took in seconds.items():
        table.add_row(name, f"{1e3 * took:.1f}", f"{num_bytes / took / 1e9:.1f}")
    share = seconds["fingerprint"] / every / seconds["optimizer's step"]
    Console().print(table, f"in every {every}th step: {share:.2%} of the optimizer's time")


if __name__ == "__main__":
    main()
