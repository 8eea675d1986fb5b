"""A small job on any device, whose workers can write down in every step what they have of it, and of groups.

Then they run without the collector of cycles, so that whatever it would have to find stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import resilient as rs
from resilient.comm.gloo import GlooCommunicator
from resilient.comm.nccl import NcclCommunicator

WIDTH, NUM_LAYERS = 128, 8


class Usage:
    """A constant learning rate, which each worker asks for in every step; it writes a line whenever it is asked.

    Args:
        folder: Where, in a file for each node.
        device: Whose memory is told.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._on_gpu = device.startswith("cuda")

    def __call__(self, step: int) -> float:
        communicators = sum(type(each) in (GlooCommunicator, NcclCommunicator) for each in gc.get_objects())
        line = {
            "step": step,
            "communicators": communicators,
            "allocated_bytes": torch.cuda.memory_allocated() if self._on_gpu else 0,
            "reserved_bytes": torch.cuda.memory_reserved() if self._on_gpu else 0,
        }
        node = os.environ.get("RESILIENT_NODE", "0")
        with (self._folder / f"usage-{node}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return 1.0


class Points:
    """Random points, all in memory."""

    def __init__(self) -> None:
        self._points = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self._points[index]}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    parser.add_argument("--usage", type=Path, help="folder for what workers write down")
    parser.add_argument("--comm-timeout-s", type=float, default=30.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.usage is not None:
        gc.disable()
    layers = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * NUM_LAYERS
    trainer = rs.Trainer(
        rs.Chain(layers, lambda output, batch: functional.mse_loss(output, batch["input"], reduction="sum")),
        Points(),
        optimizer=rs.AdamW(lr=1e-4, lr_schedule=None if args.usage is None else Usage(args.usage, args.device)),
        global_batch=28,
        microbatch=4,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        precision=args.precision,
        device=args.device,
        comm_timeout_s=args.comm_timeout_s,
        num_workers=0,
    )
    trainer.fit(args.steps)


if __name__ == "__main__":
    main()
