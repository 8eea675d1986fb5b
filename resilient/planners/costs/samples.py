"""The sample table: what planners know of samples, and all they know.

Per unit of the model (an encoder, the language model) a sample is a few sequences that attend within themselves: its
images, its audio clips, its text with the tokens of all of them. Attention goes by the sum of their squared lengths,
everything else by the sum of their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints

LLM = "llm"
"""The unit that consumes what all encoders make."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """Tokens of each sample that one unit processes; all arrays ``[num_samples]``.

    Args:
        tokens: Sum of the lengths of the sample's sequences; 0 where the unit has nothing to do.
        squares: Sum of their squares.
        longest: The longest of them.
    """

    tokens: Ints
    squares: Ints
    longest: Ints

    def __post_init__(self) -> None:
        if not self.tokens.shape == self.squares.shape == self.longest.shape or self.tokens.ndim != 1:
            shapes = (self.tokens.shape, self.squares.shape, self.longest.shape)
            raise ValueError(
                f"tokens, squares and longest must have one shape [num_samples], got {shapes}; give a number for each "
                f"sample in each"
            )

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]] | npt.NDArray[np.integer]) -> Lengths:
        """Return the lengths of samples given as their sequences' lengths (or as an array, one sequence each)."""
        if isinstance(lengths, np.ndarray):
            tokens = lengths.astype(np.int64)
            return cls(tokens=tokens, squares=tokens * tokens, longest=tokens)
        return cls(
            tokens=np.array([sum(sample) for sample in lengths], dtype=np.int64),
            squares=np.array([sum(length * length for length in sample) for sample in lengths], dtype=np.int64),
            longest=np.array([max(sample, default=0) for sample in lengths], dtype=np.int64),
        )

    def __getitem__(self, chosen: npt.NDArray[np.integer] | slice) -> Lengths:
        return Lengths(tokens=self.tokens[chosen], squares=self.squares[chosen], longest=self.longest[chosen])

    def num_sequences(self) -> Ints:
        """Return how many sequences samples have if all of a sample's are as long as its longest. [num_samples]"""
        return -(-self.tokens // np.maximum(self.longest, 1))

    def padded(self) -> Lengths:
        """Return the lengths in a call that computes each sequence as long as the longest of all samples."""
        longest = self.longest.max(initial=0)
        tokens = self.num_sequences() * longest
        return Lengths(tokens=tokens, squares=tokens * longest, longest=np.full_like(tokens, longest))


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTable:
    """Samples, in order.

    Args:
        units: By unit name, in order of execution (encoders, then the language model).
        names: Of the samples, for messages; their positions where left out.
    """

    units: Mapping[str, Lengths]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.units:
            raise ArgumentError("units", "name at least one unit", "none", "give its lengths")
        counts = {name: len(lengths.tokens) for name, lengths in self.units.items()}
        if len(set(counts.values())) != 1 or len(self.names) not in (0, len(self)):
            raise ValueError(
                f"units and names must describe the same samples, got {counts} and {len(self.names)} names; give each "
                f"sample its lengths in every unit, and a name or none to all"
            )
        for unit, lengths in self.units.items():
            if lengths.tokens.min(initial=0) < 0:
                sample = int(lengths.tokens.argmin())
                raise ArgumentError(
                    "tokens",
                    "be >= 0",
                    f"{lengths.tokens[sample]} for {unit} of {self.name(sample)}",
                    "0 means that it has nothing to do",
                )

    def __len__(self) -> int:
        return len(next(iter(self.units.values())).tokens)

    def __getitem__(self, chosen: npt.NDArray[np.integer] | slice) -> SampleTable:
        units = {name: lengths[chosen] for name, lengths in self.units.items()}
        return SampleTable(units=units, names=tuple(self._named[chosen]) if self.names else ())

    @cached_property
    def _named(self) -> npt.NDArray[np.object_]:
        """The names, of which each replica's are taken in every step. [num_samples]"""
        return np.array(self.names, dtype=np.object_)

    def name(self, index: int) -> str:
        """Return a sample's name for messages."""
        return repr(self.names[index]) if self.names else f"sample {index}"
