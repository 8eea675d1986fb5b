"""What the data-parallel peers share: the whole model in every process, its part of a batch, a line for every step."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from mlp_model import Points, factories, summed_loss

NUM_REPLICAS = 3


def parser() -> argparse.ArgumentParser:
    """Return a parser of the options that all peers have."""
    made = argparse.ArgumentParser()
    made.add_argument("--batch", type=int, required=True)
    made.add_argument("--microbatch", type=int, required=True)
    made.add_argument("--folder", type=Path, required=True, help="for what a run keeps")
    return made


def make_model() -> nn.Module:
    """Return the same model in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(*(build() for build in factories()))


def microbatches(data: Points, step: int, replica: int, batch: int, microbatch: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of the replica's part of the step's batch."""
    share = batch // NUM_REPLICAS
    first = (step * batch + replica * share) % (len(data) - share)
    samples = [data[index] for index in range(first, first + share)]
    inputs = torch.stack([sample["input"] for sample in samples])
    targets = torch.stack([sample["target"] for sample in samples])
    num_parts = share // microbatch
    return list(zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True))


def accumulate(model: DistributedDataParallel, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Run forward and backward of all microbatches; DDP reduces with the last."""
    share = sum(len(target) for _, target in parts)
    for number, (part, target) in enumerate(parts):
        model.require_backward_grad_sync = number == len(parts) - 1
        (summed_loss(model(part), target) / share).backward()


def tell(replica: int, step: int) -> None:
    """Print that the step is committed; a line is one write, so lines of several processes do not mix."""
    line = json.dumps({"worker": replica, "pid": os.getpid(), "step": step, "time": time.time()})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")
