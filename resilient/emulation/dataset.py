"""Samples for emulated models: how long their parts are, from seeded mixes with and without heavy tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from resilient.common.arguments import whole_number
from resilient.data.dataset import Sample
from resilient.emulation.unit import EmulatedUnit, check_units
from resilient.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """Lengths of segments are log-normal, cut at the longest; samples have up to ``most_segments`` for an encoder."""

    median: float
    sigma: float
    longest: int
    most_segments: int


_MIXES = {
    "short": _Mix(median=32, sigma=0.2, longest=64, most_segments=1),
    "mixed": _Mix(median=64, sigma=0.7, longest=512, most_segments=2),
    "heavy": _Mix(median=64, sigma=1.4, longest=2048, most_segments=4),
}


class EmulatedDataset:
    """Samples of several segments for each encoder, none of some, and one for the last unit.

    Args:
        units: The model's.
        mix: How long segments are: ``short`` (all alike), ``mixed``, or ``heavy`` (few hold most of the tokens).
        num_samples: Samples.
        seed: Of lengths and values.

    Raises:
        ArgumentError: There is no such mix, or a number cannot be.
    """

    def __init__(
        self, units: Sequence[EmulatedUnit], mix: str = "mixed", *, num_samples: int = 1024, seed: int = 0
    ) -> None:
        if mix not in _MIXES:
            raise ArgumentError("mix", f"be one of {', '.join(_MIXES)}", repr(mix), "choose one")
        whole_number("num_samples", num_samples, 1, "train on some")
        whole_number("seed", seed, 0, "give another")
        self._units = [unit.name for unit in check_units(units)]
        self._mix = _MIXES[mix]
        self._num_samples = num_samples
        self._seed = seed

    def __len__(self) -> int:
        return self._num_samples

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of each segment of a sample, by unit."""
        return self._draw(index)[0]

    def __getitem__(self, index: int) -> Sample:
        lengths, generator = self._draw(index)
        sample = {"target": torch.from_numpy(generator.normal(size=1))}
        for name, segments in lengths.items():
            sample[name] = torch.from_numpy(generator.normal(size=sum(segments)))
            sample[f"{name}_lengths"] = torch.tensor(segments, dtype=torch.int64)
        return sample

    def _draw(self, index: int) -> tuple[dict[str, list[int]], np.random.Generator]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        generator = np.random.default_rng((self._seed, index))
        mix, lengths = self._mix, dict[str, list[int]]()
        for name in self._units:
            count = 1 if name == self._units[-1] else int(generator.integers(mix.most_segments + 1))
            drawn = generator.lognormal(np.log(mix.median), mix.sigma, count)
            lengths[name] = np.clip(np.rint(drawn), 1, mix.longest).astype(int).tolist()
        return lengths, generator
