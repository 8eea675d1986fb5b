"""The model and data that the benchmarks train, here and in plain PyTorch: a chain MLP of 9.7 M parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

INPUT, WIDTH, NUM_HIDDEN, CLASSES = 256, 1024, 9, 10
TARGETS_PER_SAMPLE = 1


def factories() -> list[Callable[[], nn.Module]]:
    """Return one factory per layer."""
    widths = [INPUT] + [WIDTH] * (NUM_HIDDEN + 1)
    hidden = [_hidden(a, b) for a, b in pairwise(widths)]
    return [*hidden, lambda: nn.Linear(WIDTH, CLASSES)]


def _hidden(num_in: int, num_out: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(num_in, num_out), nn.GELU())


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, summed over the samples."""
    return nn.functional.cross_entropy(output, target, reduction="sum")


class Points:
    """Random points with random classes, all in memory."""

    def __init__(self, num_samples: int = 8192) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, INPUT, generator=generator)
        self.targets = torch.randint(CLASSES, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.inputs[index], "target": self.targets[index]}


def dataset() -> Points:
    """Return the samples."""
    return Points()
