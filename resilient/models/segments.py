"""Attention within the segments of a packed row: sequences that follow one another in it do not see each other.

Registers itself with transformers as the attention of all families here; given a plain mask it is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

ATTENTION = "resilient_segments"
"""The name under which transformers knows it."""


@dataclass(frozen=True)
class Segments:
    """What blocks are given in place of an attention mask where sequences are packed into one row.

    Args:
        runs: How many segments of equal length follow one another, and their length.
        window: How many tokens back each token sees, its own included; None for all.
    """

    runs: tuple[tuple[int, int], ...]
    window: int | None = None

    @classmethod
    def of(cls, lengths: Tensor, window: int | None = None) -> Segments:
        """Return the segments of these lengths, best kept in host memory: each of one token or more.

        Of no lengths it is one of one token: see :func:`through_block`.
        """
        found: Iterable[tuple[int, Iterable[int]]] = groupby(lengths.tolist() or [1])
        return cls(tuple((len(list(group)), length) for length, group in found), window)


@cache
def register_attention() -> None:
    """Make transformers know the attention; imports its modeling code, which is slow."""
    from transformers import AttentionInterface

    plain = AttentionInterface()["sdpa"]

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Segments | Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        if not isinstance(attention_mask, Segments):
            return plain(module, query, key, value, attention_mask, **rest)
        runs = attention_mask.runs
        sizes = [count * length for count, length in runs]
        # one split has one backward; a slice for each run would fill the whole row with zeros as often
        parts = zip(runs, *(tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)), strict=True)
        attended: list[Tensor] = []
        for (count, length), *tensors in parts:
            stacked = [tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in tensors]
            mask = window_mask(length, attention_mask.window, query.device)
            attended.append(plain(module, *stacked, mask, **rest)[0].flatten(0, 1))
        return torch.cat(attended)[None], None

    AttentionInterface.register(ATTENTION, attend)


def through_block(run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run a transformers block on ``hidden [microbatch, seq, width]``.

    An empty row, which it does not take, goes through with one token more: all parameters get a gradient, of zero.
    """
    return run(hidden) if hidden.shape[1] else run(torch.nn.functional.pad(hidden, (0, 0, 0, 1)))[:, :0]


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens each one sees in a causal window, ``[1, 1, length, length]``; None if it sees all before."""
    if window is None or length <= window:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal.triu(1 - window)[None, None]
