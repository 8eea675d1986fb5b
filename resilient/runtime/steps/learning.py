"""What all ranks learn of how long cells take, for the planner to place later samples by.

Workers measure what their stages compute anyway. What a rank has measured of a step travels in the barrier of the next
one, by unit and length, and all ranks learn the same from the sum: whoever makes assignments goes on from what all
have. It costs no message, so every step is learnt from. A correction moves samples, and never changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from resilient.comm import Communicator
from resilient.planners.costs.correction import NUM_BUCKETS, UNCORRECTED, Correction, CorrectionKey, Factor, buckets

_EXPECTED, _TAKEN = 0, 1
_VALUE, _STEPS, _KNOWN = 0, 1, 2


class Learning:
    """The correction of a job's expected times, on one rank; it outlives generations.

    Args:
        units: The model's, in order.
        degrees: Tensor-parallel degrees that stages may have.

    Attributes:
        correction: What was learnt so far.
    """

    def __init__(self, units: Sequence[str], degrees: Sequence[int] = (1,)) -> None:
        self._keys = tuple((unit, degree) for unit in units for degree in degrees)
        self._seen = torch.zeros(len(self._keys), NUM_BUCKETS, 2, dtype=torch.float64)
        self._of_keys = torch.zeros(len(self._keys), 2, dtype=torch.float64)
        self.correction = UNCORRECTED

    @property
    def size(self) -> int:
        """How many numbers travel in each barrier."""
        return self._seen.numel()

    def meet(self, comm: Communicator) -> None:
        """Begin a generation with what ranks know that were in earlier ones; all ranks call this.

        One of them may have learnt from a step more than others: means are taken.

        Raises:
            CommunicationError: A peer is gone.
        """
        self._seen.zero_()
        self._of_keys.zero_()
        told = torch.zeros(len(self._keys), NUM_BUCKETS, 3, dtype=torch.float64)
        for (unit, degree, bucket), factor in self.correction.factors.items():
            told[self._keys.index((unit, degree)), bucket] = torch.tensor([factor.value, factor.num_steps, 1.0])
        comm.all_reduce(told, tuple(range(comm.size))).wait()
        factors: dict[CorrectionKey, Factor] = {}
        for key, bucket in told[..., _KNOWN].nonzero().tolist():
            of_all = told[key, bucket] / told[key, bucket, _KNOWN]
            factors[(*self._keys[key], bucket)] = Factor(
                value=float(of_all[_VALUE]), num_steps=round(float(of_all[_STEPS]))
            )
        self.correction = Correction(factors=factors)

    def see(self, unit: str, longest: int, *, expected_ms: float, taken_ms: float, degree: int = 1) -> None:
        """Take down what this rank's stages of a unit took for a cell.

        Args:
            unit: The unit.
            longest: The longest of the cell's sequences.
            expected_ms: By the costs, uncorrected.
            taken_ms: Measured.
            degree: How many devices share the cell.
        """
        if expected_ms > 0 and taken_ms > 0:
            at = self._seen[self._keys.index((unit, degree)), int(buckets(longest))]
            at += torch.tensor([expected_ms, taken_ms], dtype=torch.float64)

    def bring(self) -> Tensor:
        """Return what this rank has seen since the last barrier; float64, ``[size]``."""
        seen = self._seen.flatten().clone()
        self._seen.zero_()
        return seen

    def take(self, total: Tensor) -> None:
        """Learn from what all ranks have seen."""
        seen = total.reshape(self._seen.shape)
        self._of_keys += seen.sum(dim=1)
        times = {
            (*self._keys[key], bucket): (float(seen[key, bucket, _TAKEN]), float(seen[key, bucket, _EXPECTED]))
            for key, bucket in seen[..., _EXPECTED].nonzero().tolist()
        }
        self.correction = self.correction.after(times)

    def unit_factor(self, unit: str, degree: int = 1) -> float:
        """Return how many times as long as expected cells of a unit took in this generation, where so many devices
        share each; 1 at first."""
        expected_ms, taken_ms = self._of_keys[self._keys.index((unit, degree))].tolist()
        return taken_ms / expected_ms if expected_ms > 0 else 1.0
