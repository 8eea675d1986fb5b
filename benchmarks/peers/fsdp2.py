"""The same training in plain PyTorch with FSDP2: every layer's parameters are divided over all processes.

Started by torchrun. Each layer is gathered before it runs and freed after it (``reshard_after_forward``), and each
backward sums the gradients into the parts, as ours do. Rank 0 prints the seconds of every step as a JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from model import MODELS, batch_of, model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    given = model_of(args.model)
    model = nn.Sequential(*(build() for build in given.factories()))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data, share = given.dataset(), args.batch // world
    num_targets = share * given.TARGETS_PER_SAMPLE  # FSDP2 takes the mean over the processes
    seconds: list[float] = []
    for number in range(args.steps):
        started = time.perf_counter()
        inputs, targets = batch_of(data, number * args.batch + rank * share, share)
        optimizer.zero_grad()
        for part, target in zip(inputs.split(args.microbatch), targets.split(args.microbatch), strict=True):
            (given.summed_loss(model(part), target) / num_targets).backward()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps(seconds), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
