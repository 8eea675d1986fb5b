"""Buffers that training changes are refused, as a job starts and again in each generation's steps 1, 2, 4, 8, ...."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resilient as rs
from resilient.models.chain import Chain
from resilient.pipeline import stage
from resilient.profiling import profiler
from resilient.testing import train_here

pytestmark = pytest.mark.usefixtures("empty_cache")

FIX = (
    "must stay as it is in training, got another value after a step; take it out, for its changes are lost, or "
    "register it with persistent=False if it is a cache"
)


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.full((3,), float(index))}


class Ema(nn.Module):
    """Keeps a mean of what it has seen in training."""

    mean: Tensor | None

    def __init__(self, *, persistent: bool = True, lazy: bool = False, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("mean", None if lazy else torch.full((3,), start), persistent=persistent)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            mean = hidden.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return hidden


class Counter(nn.Module):
    """Counts what went back through it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(self._count)
        return hidden

    def _count(self, gradient: Tensor) -> None:
        self.count += 1


def train(part: nn.Module, folder: Path, num_steps: int = 2) -> dict[int, float]:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Sequential(nn.Tanh(), part)]
    model = Chain(layers, lambda output, batch: output.square().sum())
    trainer = rs.Trainer(model, Points(), optimizer=rs.SGD(lr=0.01), global_batch=8, microbatch=4, device="cpu")
    return train_here(trainer, num_steps, directory=folder / "run")[1]


class Unchecked:
    """In place of what checks buffers."""

    def __init__(self, name: str, module: nn.Module) -> None: ...

    def check(self) -> None: ...


CHANGING: dict[str, tuple[Any, str]] = {
    "ema": (Ema, "'module.1.mean' of layer 'layer.1' (Ema)"),
    "lazy": (lambda: Ema(lazy=True), "'module.1.mean' of layer 'layer.1' (Ema)"),
    "in the backward": (Counter, "'module.1.count' of layer 'layer.1' (Counter)"),
    "of a parametrization": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
        "'module.1.parametrizations.weight.0._u' of layer 'layer.1' (_SpectralNorm)",
    ),
}


@pytest.mark.parametrize("name", ["ema", "lazy", "in the backward"])
def test_buffer_that_changes_is_refused_before_the_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "ConstantBuffers", Unchecked)
    make, buffer = CHANGING[name]
    with pytest.raises(ValueError, match=f"^{re.escape(f'buffer {buffer} {FIX}')}$"):
        train(make(), tmp_path)
    assert not (tmp_path / "run").exists()


class Constant(nn.Module):
    """Has a number that is none, which equals itself as far as its bits go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.tensor(float("nan")))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("part", [Ema(persistent=False), Constant()])
def test_caches_may_change_and_constants_do_not(part: nn.Module, tmp_path: Path) -> None:
    assert len(train(part, tmp_path)) == 2


@pytest.mark.parametrize("name", CHANGING)
def test_buffer_that_changes_is_refused_in_the_first_steps_where_the_profile_is_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, buffer = CHANGING[name]
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "ConstantBuffers", Unchecked)
        patch.setattr(stage, "ConstantBuffers", Unchecked)
        train(make(), tmp_path / "before")
    torch.manual_seed(0)  # the part's own values
    with pytest.raises(ValueError, match=f"^{re.escape(f'buffer {buffer} {FIX}')}$"):
        train(make(), tmp_path)
    saved = [path.name for path in tmp_path.glob("run/checkpoints/*")]
    is_settled = name == "of a parametrization"  # for the first values, so that the first step may be kept
    assert saved == (["step-00000001"] if is_settled else [])


class Late(nn.Module):
    """Begins to change a buffer in the third step, of two microbatches each."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += self.training
        if self.num_calls > 4:
            self.count += 1
        return hidden


def test_buffer_that_changes_later_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "ConstantBuffers", Unchecked)
    train(Late(), tmp_path / "before", 2)
    message = f"buffer 'module.1.count' of layer 'layer.1' (Late) {FIX}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(Late(), tmp_path, 4)
