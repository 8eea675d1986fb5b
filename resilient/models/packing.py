"""Which models can pack the samples of a cell into one row instead of padding them, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from resilient.data.dataset import Dataset
from resilient.models.layer import Model

if TYPE_CHECKING:  # it takes 0.7 s, and a job of another model needs none of it
    from transformers import PretrainedConfig

_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob")
"""What configs call it."""

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest sequence computed together."""


@runtime_checkable
class Packable(Protocol):
    """A model whose units may each process lists of samples (cells) of their own, packed without padding.

    :class:`resilient.models.multimodal.module.MultimodalModule` says what each of these returns.
    """

    @property
    def units(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def unpackable(self) -> str | None: ...

    def lengths(self, sample: Mapping[str, Any]) -> dict[str, list[int]]: ...

    def collate_unit(
        self, unit: str, samples: Sequence[Mapping[str, Any]], keys: Sequence[int]
    ) -> dict[str, Tensor]: ...


def why_padded(model: Model, dataset: Dataset) -> str | None:
    """Return, in words, why samples must be padded or stacked together; None where they may be packed."""
    if hasattr(dataset, "collate"):
        return f"{type(dataset).__name__} has a collate of its own"
    if not isinstance(model, Packable):
        return f"{type(model).__name__} has no collate_unit"
    return model.unpackable


def why_unpackable(configs: Mapping[str, PretrainedConfig]) -> str | None:
    """Return what in the units' configs keeps their samples from being packed, in words; None for nothing."""
    for unit, config in configs.items():
        for name in _ATTENTION_DROPOUT:
            if getattr(config, name, 0):
                return f"{unit} has {name}={getattr(config, name)}, which attention cannot draw for each sample alone"
        rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = rotary.get("rope_type", rotary.get("type"))
        if kind in _BY_LENGTH:
            return (
                f"{unit} has rotary embeddings of type {kind!r}, which depend on the longest sequence beside a sample"
            )
    return None
