"""Jobs whose stages hold much of one kind or another: states, activations, samples, what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from resilient.models.chain import Chain
from resilient.models.layer import Batch
from resilient.models.multimodal.module import MultimodalModule
from resilient.runtime.job import Job
from tests.resilient.small import make_job

WIDTH, VOCABULARY, TOKENS = 256, 512, 64
LARGE = 256
"""Samples of a microbatch whose activations are much more than its layers' states."""


class Points:
    def __len__(self) -> int:
        return 8 * 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"input": values, "labels": torch.tensor(index % WIDTH)}

    def num_targets(self, index: int) -> int:
        return 1


class Texts:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([(7 * index + 3 * k * k) % (VOCABULARY - 1) + 1 for k in range(TOKENS + 1)])
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def num_targets(self, index: int) -> int:
        return TOKENS


def summed_loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")


def chain() -> Job:
    """Eight layers of one size, whose rectifiers keep what they hand on, or the layer after does."""
    inner = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())] * 7
    model = Chain([*inner, lambda: nn.Linear(WIDTH, WIDTH)], summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


def llama() -> Job:
    """Embedding, four blocks, head."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=4, tie_word_embeddings=False)
    model = MultimodalModule(encoders={}, language_model=config, labels="shifted")
    return make_job(model=model, dataset=Texts(), precision="fp32", microbatch=2, global_batch=16)


def convolutions(*frozen: int) -> Job:
    """Four layers with small states and large activations, in front of one with large states."""

    def convolution(index: int, *modules: nn.Module) -> nn.Module:
        return nn.Sequential(*modules, nn.ReLU()).requires_grad_(index not in frozen)

    layers = [
        lambda: nn.Unflatten(1, (1, 16, 16)),
        lambda: convolution(1, nn.Conv2d(1, 8, 3, padding=1)),
        *[lambda i=i: convolution(i, nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)) for i in (2, 3, 4)],
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * WIDTH, WIDTH)),
    ]
    model = Chain(layers, summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=64, global_batch=512)


def normed() -> nn.Module:
    """What it hands on it does not keep, nor does a matrix that is frozen."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


class GatedBlock(nn.Module):
    """A block of Llama's kind, for which a sample is a sequence of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(64), nn.RMSNorm(64)
        self.mix, self.out, self.up, self.down = (nn.Linear(*of) for of in [(64, 192), (64, 64), (64, 344), (172, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 64))
        query, key, value = self.mix(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        gate, up = self.up(self.between(x)).chunk(2, dim=-1)
        return (x + self.down(nn.functional.silu(gate) * up)).flatten(1)


def rectified() -> nn.Module:
    """What it hands on it keeps."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Twice(nn.Module):
    """A block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def partly_frozen(make: Callable[[], nn.Module], *frozen: int, num_layers: int = 6, microbatch: int = 64) -> Job:
    """Layers of one kind, some of which are frozen."""
    layers = [lambda index=index: make().requires_grad_(index not in frozen) for index in range(num_layers)]
    sizes = {"microbatch": microbatch, "global_batch": 8 * microbatch}
    return make_job(model=Chain(layers, summed_loss), dataset=Points(), precision="fp32", **sizes)


def apart(microbatch: int) -> Job:
    """Layers that hand on a part of what they make, and much or little of it."""

    class Part(nn.Module):
        def __init__(self, entering: int, made: int, handed: int) -> None:
            super().__init__()
            self.matrix, self.handed = nn.Linear(entering, made), handed

        def forward(self, x: Tensor) -> Tensor:
            return self.matrix(x)[:, : self.handed]

    sizes = [(WIDTH, 512, 512), (512, 256, 16), (16, 1024, 512), (512, 512, 32), (32, 1024, 1024), (1024, WIDTH, WIDTH)]
    layers = [lambda each=each: Part(*each) for each in sizes]
    model = Chain(layers, summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=microbatch, global_batch=8 * microbatch)


def widened() -> Job:
    """A layer without parameters that makes much of little, in front of one with parameters."""
    first = [nn.Unflatten(1, (1, WIDTH)), nn.Upsample(scale_factor=16), nn.Flatten()]
    model = Chain([lambda: nn.Sequential(*first), *[lambda: nn.Linear(16 * WIDTH, WIDTH)]], summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


def narrow() -> Job:
    """Layers that are small beside the samples, which the last one loads as well: a chain's loss may read them."""
    last = [nn.Linear(16, WIDTH), nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, 8)]
    model = Chain([lambda: nn.Linear(WIDTH, 16), lambda: nn.Sequential(*last)], lambda output, _: output.sum())
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)
