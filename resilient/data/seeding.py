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
    _seed_python_and_numpy(digest)
    _seed_torch(digest)


def seed_torch(*key: int | str) -> None:
    """Seed torch's generator alone, as :func:`seed_generators` does: the other two take five times as long."""
    _seed_torch(_digest(key))


def _digest(key: tuple[int | str, ...]) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=20).digest()


def _seed_python_and_numpy(digest: bytes) -> None:
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))


def _seed_torch(digest: bytes) -> None:
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "big") >> 1)


def draw() -> tuple[float, float, int]:
    """Draw a number from each of the three generators; shows whether anybody has drawn since they were seeded."""
    return *_draw_python_and_numpy(), int(torch.empty((), dtype=torch.int64).random_())


def _draw_python_and_numpy() -> tuple[float, float]:
    return random.random(), float(np.random.random())


class DrawWatch:
    """Seeds the three generators, and finds out whether anybody has drawn from Python's or numpy's afterwards."""

    def __init__(self) -> None:
        self._undrawn: tuple[float, float] | None = None
        self._has_drawn = False

    def seed(self, *key: int | str) -> None:
        """Seed them, as :func:`seed_generators` does."""
        self._look()
        seed_generators(*key)
        self._undrawn = _draw_python_and_numpy()
        seed_generators(*key)

    def has_drawn(self) -> bool:
        """Return whether anybody has, after any seeding; they are to be seeded again then."""
        self._look()
        return self._has_drawn

    def _look(self) -> None:
        if self._undrawn is not None and _draw_python_and_numpy() != self._undrawn:
            self._has_drawn = True
        self._undrawn = None


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
