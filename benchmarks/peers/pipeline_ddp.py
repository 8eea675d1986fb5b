"""The same training in plain PyTorch: torch.distributed.pipelining's 1F1B in every replica, DDP across replicas.

Started by torchrun. Rank 0 prints the seconds of every step as a JSON list.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from model import MODELS, batch_of, model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--cuts", required=True, help="first layer of every stage, comma-separated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    starts = [int(text) for text in args.cuts.split(",")]
    num_stages = len(starts)
    num_replicas = dist.get_world_size() // num_stages
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("dp", "pp"))
    replica, stage_index = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    given = model_of(args.model)
    layers = [build() for build in given.factories()]
    stage_module: nn.Module = nn.Sequential(*layers[starts[stage_index] : [*starts, len(layers)][stage_index + 1]])
    if num_replicas > 1:
        stage_module = DistributedDataParallel(stage_module, process_group=mesh.get_group("dp"))
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-4, fused=True)
    share = args.batch // num_replicas
    num_microbatches = share // args.microbatch

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return given.summed_loss(output, target) / (share * given.TARGETS_PER_SAMPLE)

    step = make_step(stage_module, stage_index, num_stages, num_microbatches, loss_fn, mesh.get_group("pp"))
    data = given.dataset()
    seconds: list[float] = []
    for number in range(args.steps):
        started = time.perf_counter()
        inputs, targets = batch_of(data, number * args.batch + replica * share, share)
        optimizer.zero_grad(set_to_none=False)
        step(inputs, targets)
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)  # noqa: T201
    dist.destroy_process_group()


def make_step(
    module: nn.Module,
    stage_index: int,
    num_stages: int,
    num_microbatches: int,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return what runs forward and backward of one step."""
    if num_stages == 1:

        def accumulate(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            pairs = list(zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))
            for number, (part, target) in enumerate(pairs):
                if isinstance(module, DistributedDataParallel):
                    module.require_backward_grad_sync = number == len(pairs) - 1
                loss_fn(module(part), target).backward()

        return accumulate
    stage = PipelineStage(module, stage_index, num_stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn, scale_grads=False)

    def pipeline(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if stage_index == 0:
            schedule.step(inputs)
        elif stage_index == num_stages - 1:
            schedule.step(target=targets)
        else:
            schedule.step()

    return pipeline


if __name__ == "__main__":
    main()
