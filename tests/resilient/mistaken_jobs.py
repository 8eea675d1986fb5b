"""Small jobs of users, with what a mistaken one puts in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, ViTConfig

import resilient as rs

ONES, ONE = torch.ones(2), torch.ones(1)
LANGUAGE = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)  # fmt: skip
VISION = ViTConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
)  # fmt: skip
LLAVA = LlavaConfig(vision_config=CLIPVisionConfig().to_dict(), text_config=LANGUAGE.to_dict())
TOKENS = {"input_ids": torch.tensor([1, 2, 2, 2, 2]), "labels": torch.tensor([2, 2, 2, 2, 3])}


class Points:
    """Samples of whatever a mistaken user returns, and collates them as he does."""

    def __init__(self, sample: Any = None, collate: Any = None) -> None:
        self._sample = {"input": ONES, "target": ONE} if sample is None else sample
        if collate is not None:
            self.collate = collate

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._sample(index) if callable(self._sample) else self._sample


class Counted(Points):
    def num_targets(self, index: int) -> Any:
        return None


class Stream(IterableDataset[Mapping[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter([{"input": ONES, "target": ONE}])


class Image:
    """Stands for those of PIL."""


class Adapted(nn.Module):
    """Stands for a live model of transformers or peft."""


def squared(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (output - batch["target"]).square().sum()


def linear() -> nn.Module:
    return nn.Linear(2, 1)


def trainer(model: Any = None, dataset: Any = None, **changes: Any) -> rs.Trainer:
    arguments: dict[str, Any] = {"optimizer": rs.SGD(lr=0.1), "global_batch": 4, "microbatch": 2, "device": "cpu"}
    chosen = rs.Chain([linear], squared) if model is None else model
    return rs.Trainer(chosen, Points() if dataset is None else dataset, **{**arguments, **changes})


def train(model: Any = None, dataset: Any = None, num_steps: Any = 1, **changes: Any) -> None:
    trainer(model, dataset, **changes).fit(num_steps)


def of_sample(sample: Any) -> Callable[[], object]:
    return lambda: train(dataset=Points(sample))


def of_collate(collate: Any) -> Callable[[], object]:
    return lambda: train(dataset=Points(collate=collate))


def of_vision(**changes: Any) -> Callable[[], object]:
    def made() -> None:
        encoders = {"vision": rs.EncoderModule(VISION, placeholder_id=2)}
        dataset = Points({**TOKENS, **changes}, lambda samples: samples)
        train(rs.MultimodalModule(encoders=encoders, language_model=LANGUAGE), dataset)

    return made


def of_language(language_model: Any) -> Callable[[], object]:
    return lambda: rs.MultimodalModule(encoders={}, language_model=language_model)


def of_encoders(encoders: Any) -> Callable[[], object]:
    return lambda: rs.MultimodalModule(encoders=encoders, language_model=LANGUAGE)


def of_layers(*layers: Any) -> Callable[[], object]:
    return lambda: rs.Chain(layers, squared)


def of_loss(loss: Any) -> Callable[[], object]:
    return lambda: train(rs.Chain([linear], loss))


def adamw(**arguments: Any) -> Callable[[], object]:
    return lambda: rs.AdamW(**{"lr": 1e-3, **arguments})


def scheduler() -> StepLR:
    return StepLR(torch.optim.SGD(linear().parameters(), lr=1.0), 3)
