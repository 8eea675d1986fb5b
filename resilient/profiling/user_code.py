"""Content hashes of the user's own code and settings: what was verified of them holds for no others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from resilient.common.sources import user_sources
from resilient.models.layer import LayerSpec


def sources_digest() -> str:
    """Return a hash of the source of every module loaded that is neither installed nor a part of resilient."""
    return hashlib.sha256(repr(user_sources()).encode()).hexdigest()


def settings_digest(layers: Iterable[LayerSpec]) -> str:
    """Return a hash of the classes of all modules in the layers, and of their attributes that are numbers or text."""
    digest = hashlib.sha256()
    for spec in layers:
        with torch.device("meta"):
            built = spec.build()
        for path, module in built.named_modules():
            simple = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
            digest.update(repr((spec.name, path, type(module).__qualname__, simple)).encode())
    return digest.hexdigest()
