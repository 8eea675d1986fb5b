"""When to profile again: only when the model or the data changed.

A profile of the model and one of the data (what is expected of its samples) stay valid as long as what they were made
of does; they are kept under its content hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from resilient.planners.correction import buckets
from resilient.planners.costs import CostModel
from resilient.planners.samples import SampleTable


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a profile was made of.

    Args:
        costs: Content hash of the cost model.
        data: Content hash of the data's histogram.
    """

    costs: str
    data: str

    @classmethod
    def of(cls, costs: CostModel, samples: SampleTable) -> Fingerprint:
        """Return the fingerprint of a job's cost model and data."""
        encoded = msgspec.json.encode(histogram(samples))
        return cls(costs=costs.digest, data=hashlib.sha256(encoded).hexdigest())

    @property
    def key(self) -> str:
        """What to keep under this name: whatever was found for these costs and data."""
        return hashlib.sha256(f"{self.costs} {self.data}".encode()).hexdigest()

    def changed(self, before: Fingerprint | None) -> tuple[str, ...]:
        """Return what changed (``costs``, ``data``) and is to be profiled again; both where there is nothing before."""
        if before is None:
            return ("costs", "data")
        return tuple(part for part in ("costs", "data") if getattr(self, part) != getattr(before, part))


def histogram(samples: SampleTable) -> dict[str, list[tuple[int, int]]]:
    """Return, by unit, how many samples are in each bucket of tokens (two for a doubling); -1 where there are none.

    The order of the samples does not change it.
    """
    counts: dict[str, list[tuple[int, int]]] = {}
    for unit, lengths in samples.units.items():
        found, number = np.unique(np.where(lengths.tokens > 0, buckets(lengths.tokens), -1), return_counts=True)
        counts[unit] = list(zip(found.tolist(), number.tolist(), strict=True))
    return counts
