"""A Llama-shaped training in plain PyTorch on one device. Prints the seconds of every step as a JSON list."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from llama_model import Tokens, factories, shape_of, summed_loss


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=0)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    shape = shape_of(args.shape, args.blocks, args.vocabulary)
    model = nn.Sequential(*(build() for build in factories(shape, compiled=args.compile))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = Tokens(shape.vocabulary, args.seq)
    num_targets = args.batch * args.seq
    seconds: list[float] = []
    for number in range(args.steps):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        for first in range(number * args.batch, (number + 1) * args.batch, args.microbatch):
            samples = [data[index % len(data)] for index in range(first, first + args.microbatch)]
            inputs, targets = (torch.stack([each[key] for each in samples]).to(device) for key in ("input", "target"))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = summed_loss(model(inputs), targets) / num_targets
            loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
