"""What of a model is emulated: its units, and what their layers take, by the lengths that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient.common.arguments import check_number, whole_number
from resilient.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """How long a layer takes for segments of so many tokens; nothing where there are none.

    Args:
        fixed_ms: Of any forward.
        token_ms: Of each token.
        square_ms: Of each pair of tokens of a segment, for attention.
        backward_input: Of the backward for what the layer received, in forwards.
        backward_weight: Of the backward for its parameters, in forwards.

    Raises:
        ArgumentError: One of them is no number, negative or not finite.
    """

    fixed_ms: float = 0.0
    token_ms: float = 0.0
    square_ms: float = 0.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, "give a time, or a multiple of one", or_zero=True)

    def forward_ms(self, lengths: Sequence[int]) -> float:
        """Return how long a layer's forward of these segments takes.

        Args:
            lengths: Tokens of each segment.
        """
        if not any(lengths):
            return 0.0
        squares = sum(length * length for length in lengths)
        return self.fixed_ms + self.token_ms * sum(lengths) + self.square_ms * squares


@dataclass(frozen=True, kw_only=True)
class EmulatedUnit:
    """A part of an emulated model: equal layers, and a kind of length of its own.

    Args:
        name: ``vision``, ``llm``.
        num_layers: Layers.
        cost: What each of them takes.
        width: Numbers of each token in the message from layer to layer.
        num_parameters: Of each layer, a multiple of ``width``; they are really trained.
        frozen: Whether they are not: then there is no backward for them, and none for what the unit receives if
            nothing before it is trained.

    Raises:
        ArgumentError: A number cannot be.
    """

    name: str
    num_layers: int
    cost: CostCurve
    width: int = 8
    num_parameters: int = 64
    frozen: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_parameters"):
            whole_number(name, getattr(self, name), 1, "a layer has parameters, and tokens have numbers")
        if self.num_parameters % self.width:
            fix = "round it up"
            raise ArgumentError("num_parameters", f"be a multiple of width ({self.width})", self.num_parameters, fix)


def check_units(units: Sequence[EmulatedUnit]) -> tuple[EmulatedUnit, ...]:
    """Return the units of one model.

    Raises:
        ArgumentError: There are none, or two of one name.
    """
    names = [unit.name for unit in units]
    if not names or len(set(names)) < len(names):
        raise ArgumentError("units", "be at least one, each with a name of its own", names, "name them apart")
    return tuple(units)
