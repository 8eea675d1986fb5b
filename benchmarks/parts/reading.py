"""How long a step waits for its samples: read in the worker when they are needed, or ahead of time in data processes.

A step reads 32 samples of 20 ms in microbatches of 4 and computes for 640 ms, too. Both only sleep, so that nothing
depends on the machine's cores: what is measured is how much of the reading is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from resilient import Chain
from resilient.data.read_ahead import data_processes
from resilient.data.reader import Cell
from resilient.optim import SGD
from resilient.runtime.batches import Batches, reader_of
from resilient.runtime.job import Job

SAMPLE_S, SAMPLES, MICROBATCH, STEPS = 0.02, 32, 4, 12


class Slow:
    """Pictures that take a while."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        time.sleep(SAMPLE_S)
        return {"input": torch.full((3, 64, 64), float(index)), "target": torch.tensor(index)}


def waiting_ms(num_workers: int) -> float:
    """Return how long a step waits for samples, the median of those after the first two."""
    job = Job(
        model=Chain([nn.Linear(64, 1)], lambda output, batch: output.sum()),
        dataset=Slow(),
        optimizer=SGD(lr=0.1),
        global_batch=SAMPLES,
        microbatch=MICROBATCH,
        max_failures=0,
        min_pipeline_nodes=1,
        seed=0,
        precision="fp32",
        clip_grad_norm=None,
        checkpoint_every=0,
        device=torch.device("cpu"),
        comm_timeout_s=60.0,
        num_steps=STEPS,
        num_workers=num_workers,
    )
    cells = [Cell.of_chain(position, MICROBATCH) for position in range(SAMPLES // MICROBATCH)]
    waited: list[float] = []
    with data_processes(reader_of(job).read, num_workers, cells[0]) as processes:
        batches = Batches(job, processes)
        batches.enter(lambda step: cells, None)
        for step in range(1, STEPS + 1):
            waited.append(0.0)
            for cell in cells:
                started = time.perf_counter()
                batches.batch(step, cell)
                waited[-1] += 1000 * (time.perf_counter() - started)
                time.sleep(SAMPLE_S * MICROBATCH)
    return median(waited[2:])


def main() -> None:
    """Print the table."""
    table = Table("num_workers", "a step waits, ms", box=None)
    for number in (0, 1, 2, 4):
        table.add_row(str(number), f"{waiting_ms(number):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
