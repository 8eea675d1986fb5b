"""Dropout that is a function of (seed, step, sample, layer) in packed rows, whatever lies beside the sample."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from resilient.data.seeding import GOLDEN, mixed

_BITS = 53
"""Of the numbers compared with the probability."""


class SampleDropout(nn.Module):
    """Takes the place of ``nn.Dropout`` in a block, and is one until :meth:`begin` gives it keys.

    Args:
        p: The probability that an element becomes zero.
        name: Full name of the module it replaces: others draw other numbers.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p = p
        self._salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        self._keys: Tensor | None = None
        self._num_calls = 0

    def begin(self, keys: Tensor | None) -> None:
        """Draw from these keys, one for each token of a row, from the next call on; None: from torch's generator."""
        self._keys = keys
        self._num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, in a row ``[1, tokens, width]`` with keys, without what is dropped."""
        if self._keys is None or not self.training:
            return nn.functional.dropout(hidden, self.p, self.training)
        self._num_calls += 1
        channels = torch.arange(hidden.shape[-1], device=hidden.device) * GOLDEN + self._salt + self._num_calls
        numbers = mixed(self._keys[:, None] + mixed(channels)) & ((1 << _BITS) - 1)
        kept = numbers >= int(self.p * (1 << _BITS))
        return hidden * kept / (1 - self.p) if self.p < 1 else hidden * 0


def seed_by_sample(block: nn.Module, layer: str) -> list[SampleDropout]:
    """Replace the dropouts of a block by those that can draw for each sample, and return them."""
    found = [(name, part) for name, part in block.named_modules() if type(part) is nn.Dropout and part.p > 0]
    replaced: list[SampleDropout] = []
    for name, part in found:
        replaced.append(SampleDropout(part.p, f"{layer}.{name}"))
        block.set_submodule(name, replaced[-1])
    return replaced
