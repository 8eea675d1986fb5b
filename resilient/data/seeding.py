"""Makes what is drawn from the process's own generators (Python's, numpy's and torch's) a function of a key."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(*key: int | str) -> None:
    """Seed the three generators from a key, each with bits of its own: two of them are the same algorithm."""
    digest = _digest(key)
    _seed_slow(digest)
    _seed_torch(digest)


def seed_torch(*key: int | str) -> None:
    """Seed torch's generator alone, as :func:`seed_generators` does: the other two take five times as long."""
    _seed_torch(_digest(key))


def _digest(key: tuple[int | str, ...]) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=20).digest()


def _seed_slow(digest: bytes) -> None:
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))


def _seed_torch(digest: bytes) -> None:
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "big") >> 1)


def draw() -> tuple[float, float, int]:
    """Draw a number from each of the three generators; shows whether anybody has drawn since they were seeded."""
    return *_draw_slow(), int(torch.empty((), dtype=torch.int64).random_())


def _draw_slow() -> tuple[float, float]:
    return random.random(), float(np.random.random())


class DrawWatch:
    """Finds out whether anybody has drawn from Python's or numpy's generator since it was made."""

    def __init__(self) -> None:
        digest = _digest(("watched",))
        _seed_slow(digest)
        self._undrawn = _draw_slow()
        _seed_slow(digest)

    def has_drawn(self) -> bool:
        """Return whether somebody has, or has seeded one of them; only once."""
        return _draw_slow() != self._undrawn


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the three generators as they were before, for whoever else draws from them."""
    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)


GOLDEN = 0x1E3779B97F4A7C15
"""An odd number whose multiples differ in all their bits."""


def sample_key(seed: int, step: int, index: int) -> int:
    """Return what the random numbers of a sample in a step are drawn from, 63 bits."""
    digest = hashlib.blake2b(repr((seed, step, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def mixed(values: torch.Tensor) -> torch.Tensor:
    """Return integers that look random, each a function of one of ``values`` alone, the same on every device.

    Args:
        values: int64.

    Source: the finalizer of splitmix64 (Steele, Lea and Flood, 2014), whose shifts are of unsigned integers.
    """
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return values ^ ((values >> 31) & ((1 << 33) - 1))
