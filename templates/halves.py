"""Which halves the backward of a stage has where schedules run them apart (zero bubble): what workers do, in one rule.

The first half (``BACKWARD_INPUT``) is what the stage before waits for, the second (``BACKWARD_WEIGHT``) what parameters
need. Where nothing that came in wants a gradient, nothing leads to what came in: all is left for the second half, with
the gradients that pass between the stage's own layers. Layers that run again would have to do so twice, and those of a
sharded stage to be gathered twice: all is in the first half, also of a stage of which only some layers run again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

_Self = TypeVar("_Self")


class _Time(Protocol):
    """What can be added up and scaled: milliseconds, or curves of them."""

    def __add__(self: _Self, other: _Self, /) -> _Self: ...
    def __mul__(self: _Self, factor: float, /) -> _Self: ...


_T = TypeVar("_T", bound=_Time)


class Halves(NamedTuple):
    """The halves that have something to do.

    Args:
        inputs: The first one.
        weights: The second one.
    """

    inputs: bool
    weights: bool

    @classmethod
    def of(cls, *, trains: bool, wanted: bool, again: bool = False, sharded: bool = False) -> Halves:
        """Return those of a stage.

        Args:
            trains: Whether any of its layers is trained.
            wanted: Whether something that comes in wants a gradient.
            again: Whether any of its layers runs again in the backward.
            sharded: Whether its devices divide its state.
        """
        at_once = sharded or (again and wanted)
        return cls(inputs=wanted or (sharded and trains), weights=trains and not at_once)

    @property
    def both(self) -> bool:
        """Return whether there are two: else there is nothing to put off that anybody waited for."""
        return self.inputs and self.weights

    def divide(self, of_inputs: _T, of_weights: _T) -> tuple[_T, _T]:
        """Return what the halves take.

        Args:
            of_inputs: What gradients of inputs take, of all layers, with forwards that are run again.
            of_weights: What those of parameters do.
        """
        if self.both:
            return of_inputs, of_weights
        whole = of_inputs + of_weights
        return (whole * 0.0, whole) if self.weights else (whole, whole * 0.0)
