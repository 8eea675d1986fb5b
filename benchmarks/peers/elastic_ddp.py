"""The same training as torchrun recovers it: DDP, a checkpoint every few steps, all processes restarted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replica import Points, accumulate, make_model, microbatches, parser, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_EVERY = 5


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; a crash leaves the one before."""
    unfinished = path.with_suffix(".part")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go back to the checkpoint, if there is one; return its step."""
    if not path.exists():
        return 0
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def main() -> None:
    """Train until stopped."""
    args = parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    path = args.folder / "checkpoint.pt"
    step = load(path, model, optimizer)
    replicated = DistributedDataParallel(model)
    data = Points()
    while True:
        parts = microbatches(data, step, rank, args.batch, args.microbatch)
        optimizer.zero_grad(set_to_none=False)
        accumulate(replicated, parts)
        optimizer.step()
        step += 1
        tell(rank, step)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(path, step, model, optimizer)


if __name__ == "__main__":
    main()
