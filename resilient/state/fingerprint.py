"""Fingerprints of tensors: 64 bits that differ when two tensors' bytes do, computed at the speed of memory.

On the CPU it is XXH3; elsewhere a sum, over all 64-bit words, of the word mixed with its position, so that nothing is
copied to the host. The two differ: only fingerprints made on devices of one type are compared, and the workers of a job
have devices of one type.

Source: Y. Collet, xxHash; the mixing function is the finalizer of G. Steele et al., "Fast splittable pseudorandom
number generators", OOPSLA 2014.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 22
"""Mixed at once: bounds the temporary memory to a few times 32 MiB."""

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def fingerprint(data: Tensor) -> int:
    """Return the fingerprint of a byte tensor, as a signed number of 64 bits, which fits a tensor.

    Args:
        data: Bytes ``[num_bytes]``, contiguous.
    """
    if data.device.type == "cpu":
        return _signed(xxhash.xxh3_64_intdigest(data.numpy().data))
    return mixing_sum(data)


def mixing_sum(data: Tensor) -> int:
    """Return the fingerprint of a byte tensor on any device.

    A word's term is a bijection of the word, so one changed word always shows, and it depends on the word's position,
    so moved words show unless two random numbers of 64 bits are equal.

    Args:
        data: As for :func:`fingerprint`.
    """
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # words are only read where they are aligned
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    words = data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, words.numel(), _CHUNK_WORDS):
        total += _mixed(words[first : first + _CHUNK_WORDS], first).sum()
    if whole < data.numel():
        rest = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        total += _mixed(rest.view(torch.int64), words.numel()).sum()
    return int(_mixed(total.view(1), data.numel()))


def _mixed(words: Tensor, first: int) -> Tensor:
    """Return each word mixed with its position; those of ``words`` are ``first``, ``first + 1``, ..."""
    mixed = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    mixed.mul_(_signed(_GOLDEN)).bitwise_xor_(words)
    for shift, factor in _STEPS:
        _fold(mixed, shift)
        mixed.mul_(_signed(factor))
    _fold(mixed, _LAST_SHIFT)
    return mixed


def _fold(words: Tensor, shift: int) -> None:
    """Add the upper bits to the lower ones; the mask is there because torch shifts copies of the sign in."""
    words.bitwise_xor_((words >> shift).bitwise_and_(_BITS >> shift))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
