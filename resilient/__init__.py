"""Fault-tolerant elastic training of large (multimodal) models on machines that come and go.

Names are imported when first used: planning and the node agents must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient.errors import ArgumentError, CheckpointError, NonFiniteError, ResilientError, SampleError
    from resilient.models.chain import Chain
    from resilient.models.multimodal.encoder import EncoderModule
    from resilient.models.multimodal.generator import GeneratorModule
    from resilient.models.multimodal.module import MultimodalModule
    from resilient.optim import SGD, AdamW, ParameterGroup, WarmupCosine
    from resilient.trainer import FitResult, Trainer

    __version__: str

_HOMES = {
    "AdamW": "resilient.optim",
    "ArgumentError": "resilient.errors",
    "Chain": "resilient.models.chain",
    "CheckpointError": "resilient.errors",
    "EncoderModule": "resilient.models.multimodal.encoder",
    "GeneratorModule": "resilient.models.multimodal.generator",
    "FitResult": "resilient.trainer",
    "MultimodalModule": "resilient.models.multimodal.module",
    "NonFiniteError": "resilient.errors",
    "ParameterGroup": "resilient.optim",
    "ResilientError": "resilient.errors",
    "SGD": "resilient.optim",
    "SampleError": "resilient.errors",
    "Trainer": "resilient.trainer",
    "WarmupCosine": "resilient.optim",
}

__all__ = [
    "SGD",
    "AdamW",
    "ArgumentError",
    "Chain",
    "CheckpointError",
    "EncoderModule",
    "FitResult",
    "GeneratorModule",
    "MultimodalModule",
    "NonFiniteError",
    "ParameterGroup",
    "ResilientError",
    "SampleError",
    "Trainer",
    "WarmupCosine",
    "__version__",
]


def __dir__() -> list[str]:
    """Return the public names, also those that were not used yet."""
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # as long to import as all else here together

        return version("resilient-train")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'resilient' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
