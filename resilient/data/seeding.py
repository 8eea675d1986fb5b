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
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "big") >> 1)


def draw() -> tuple[float, float, int]:
    """Draw a number from each of the three generators; shows whether anybody has drawn since they were seeded."""
    return random.random(), float(np.random.random()), int(torch.empty((), dtype=torch.int64).random_())


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
