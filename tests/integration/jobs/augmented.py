"""A small chain on augmented samples, whose data set writes down which process reads what."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import resilient as rs
from resilient.data import Lazy, Sample, stack

WIDTH, NUM_SAMPLES = 12, 40


class Augmented:
    """Points to which something is added, and what their sum was; the points are loaded on demand.

    Args:
        added: Returns what is added.
        record: Folder with a file for each process, ``NODE-worker-PID`` or ``NODE-data-PID``: a line for each entry it
            loads, and in the first one how many sockets a data process has.
    """

    def __init__(self, added: Callable[[], float], record: Path) -> None:
        self._added = added
        self._record = record
        self._worker = os.getpid()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        point = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)

        def load() -> Tensor:
            self._write("input")
            return point + self._added()

        self._write("target")
        return {"input": Lazy(load, (WIDTH,), torch.float64), "target": point.sum()[None] + self._added()}

    def _write(self, line: str) -> None:
        pid, node = os.getpid(), os.environ.get("RESILIENT_NODE", "alone")
        path = self._record / f"{node}-{'worker' if pid == self._worker else 'data'}-{pid}"
        with path.open("a") as file:
            if not file.tell():
                links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
                sockets = [link for link in links if link.startswith("socket:")]
                file.write(f"{len(sockets)} sockets\n")
            file.write(f"{line}\n")


class Jittered(Augmented):
    """Collates at random."""

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        batch = stack(samples)
        return {**batch, "target": batch["target"] + random.random()}


def augmentation() -> float:
    """Draw from all generators that people use."""
    return random.gauss(0.0, 0.1) + float(np.random.normal(0.0, 0.1)) + float(torch.randn(())) / 10


def node() -> float:
    """Return what differs from node to node."""
    return float(os.environ.get("RESILIENT_NODE", "0"))


OWN = np.random.default_rng(0)
ADDED: dict[str, Callable[[], float]] = {"global": augmentation, "own": lambda: float(OWN.normal()), "node": node}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--added", choices=[*ADDED, "jitter"], default="global")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.record.mkdir(parents=True, exist_ok=True)
    dataset = Jittered(node, args.record) if args.added == "jitter" else Augmented(ADDED[args.added], args.record)
    hidden = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    model = rs.Chain(
        [*hidden, lambda: nn.Linear(WIDTH, 1)], lambda output, batch: ((output - batch["target"]) ** 2).sum()
    )
    if args.added != "node":  # there both ends read the points, to be compared
        model.layers = (*model.layers[:-1], replace(model.layers[-1], reads=frozenset({"target"})))
    trainer = rs.Trainer(
        model,
        dataset,
        optimizer=rs.AdamW(lr=1e-2),
        global_batch=16,  # epochs end within steps
        microbatch=2,
        max_failures=args.max_failures,
        min_pipeline_nodes=2,
        precision="fp64",
        num_workers=args.workers,
        comm_timeout_s=60.0,
    )
    trainer.fit(num_steps=8)


if __name__ == "__main__":
    main()
