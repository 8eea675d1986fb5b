"""Refuses layers whose buffers change in training: they are constants, and no part of the state that survives.

What is outside the state dict (``register_buffer(..., persistent=False)``) is a cache, and may change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from resilient.data.checksums import tensor_bytes
from resilient.errors import ArgumentError


class ConstantBuffers:
    """The persistent buffers of a layer as they were before it was trained.

    Args:
        name: The layer's.
        module: The layer.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._before = {path: buffer.clone() for path, buffer in _persistent(module).items()}

    def check(self) -> None:
        """Compare them with what they are now.

        Raises:
            ArgumentError: One has changed; it is named.
        """
        now = _persistent(self._module)
        for path in self._before | now:
            if not _equal(self._before.get(path), now.get(path)):
                owner = type(self._module.get_submodule(path.rpartition(".")[0])).__name__
                raise ArgumentError(
                    f"buffer {path!r} of layer {self._name!r} ({owner})",
                    "stay as it is in training",
                    "another value after a step",
                    "take it out, for its changes are lost, or register it with persistent=False if it is a cache",
                )


def _persistent(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict().keys()
    return {path: buffer for path, buffer in module.named_buffers() if path in kept}


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether all bits are equal: what is not a number equals itself."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return torch.equal(tensor_bytes(one), tensor_bytes(other))
