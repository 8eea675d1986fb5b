"""Jobs whose stages hold much of one kind or another: states, activations, samples, what they hand on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
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
LARGE = 32
"""Points of a sample with which a microbatch's activations are much more than its layers' states."""


class Points:
    """Samples of one point or several."""

    def __init__(self, *num_points: int) -> None:
        self._shape = num_points

    def __len__(self) -> int:
        return 8 * 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = torch.randn(*self._shape, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"input": values, "labels": torch.full(self._shape, index % WIDTH)}

    def num_targets(self, index: int) -> int:
        return math.prod(self._shape)


class Texts:
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([(7 * index + 3 * k * k) % (VOCABULARY - 1) + 1 for k in range(TOKENS + 1)])
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def num_targets(self, index: int) -> int:
        return TOKENS


def summed_loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), batch["labels"].flatten(), reduction="sum")


def chain() -> Job:
    """Eight layers of one size, whose rectifiers keep what they hand on, or the layer after does."""
    inner = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())] * 7
    model = Chain([*inner, lambda: nn.Linear(WIDTH, WIDTH)], summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


def llama(vocabulary: int = VOCABULARY, *, tied: bool = False, **options: Any) -> Job:
    """Embedding, four blocks, head; with another vocabulary, or with one matrix for it."""
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 344}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=4, tie_word_embeddings=tied)
    model = MultimodalModule(encoders={}, language_model=config, labels="shifted")
    given = {"precision": "fp32", "microbatch": 2, "global_batch": 16, **options}
    return make_job(model=model, dataset=Texts(), **given)


def shared(*users: int) -> Job:
    """Eight matrices that are much more than activations; those of some layers are the first of these's."""
    model = Chain([lambda: nn.Linear(WIDTH, WIDTH)] * 8, summed_loss)
    owner = model.layers[users[0]]
    tied = {name: (owner.name, name) for name, _ in owner.build().named_parameters()}
    model.layers = tuple(
        replace(layer, tied=tied) if index in users[1:] else layer for index, layer in enumerate(model.layers)
    )
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=8, global_batch=64)


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
    """A block of Llama's kind, for which a point is a sequence of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(64), nn.RMSNorm(64)
        self.mix, self.out, self.up, self.down = (nn.Linear(*of) for of in [(64, 192), (64, 64), (64, 344), (172, 64)])

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(-1, 4, 64)
        query, key, value = self.mix(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        gate, up = self.up(self.between(x)).chunk(2, dim=-1)
        return (x + self.down(nn.functional.silu(gate) * up)).view(shape)


def rectified() -> nn.Module:
    """What it hands on it keeps."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Shifted(nn.Module):
    """It keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Twice(nn.Module):
    """A block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def partly_frozen(layers: Sequence[Callable[[], nn.Module]], *frozen: int, num_points: int = 8) -> Job:
    """Layers some of which are frozen, with samples of some points."""
    made = [lambda index=index: layers[index]().requires_grad_(index not in frozen) for index in range(len(layers))]
    data = {"dataset": Points(num_points), "microbatch": 8, "global_batch": 64}
    return make_job(model=Chain(made, summed_loss), precision="fp32", **data)


def parts() -> Sequence[Callable[[], nn.Module]]:
    """Layers that hand on a part of what they make, and much or little of it."""

    class Part(nn.Module):
        def __init__(self, entering: int, made: int, handed: int) -> None:
            super().__init__()
            self.matrix, self.handed = nn.Linear(entering, made), handed

        def forward(self, x: Tensor) -> Tensor:
            return self.matrix(x)[..., : self.handed]

    sizes = [(WIDTH, 512, 512), (512, 256, 16), (16, 1024, 512), (512, 512, 32), (32, 1024, 1024), (1024, WIDTH, WIDTH)]
    return [lambda each=each: Part(*each) for each in sizes]


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
