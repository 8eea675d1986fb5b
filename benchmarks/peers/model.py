"""The model of a job of ``jobs/`` for plain PyTorch: whole in every process, its data, its loss."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

MODELS = ("mlp", "llama")


def model_of(name: str) -> ModuleType:
    """Return the module of ``jobs/`` with ``factories()``, ``dataset()`` and ``summed_loss(output, target)``."""
    return importlib.import_module(f"{name}_model")


def batch_of(data: torch.utils.data.Dataset[dict[str, Tensor]], first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of some samples, one after the other, from the start again behind the last."""
    samples = [data[(first + index) % len(data)] for index in range(count)]  # pyright: ignore[reportArgumentType]
    return torch.stack([each["input"] for each in samples]), torch.stack([each["target"] for each in samples])
