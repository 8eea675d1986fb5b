"""Finds the first value that is not finite in a step that is repeated for it.

Owns what counts as not finite, and the words for it. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from resilient.models.layer import Activations, Batch, Model


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where a value is not finite though all before it are.

    Args:
        position: Index of the microbatch within the step.
        layer_index: Of the layer, or of the one behind which the loss is taken.
        what: In words.
    """

    position: int
    layer_index: int
    what: str


class FiniteWatch:
    """Looks at what the layers of one worker make of the microbatches of a step.

    Args:
        model: Names the layers.

    Attributes:
        found: The first, by layer and microbatch; None if all was finite. What units make of samples is packed anew for
            those that they feed, so an earlier microbatch of a later layer may be broken by what this one gave it.
    """

    def __init__(self, model: Model) -> None:
        self._names = [spec.name for spec in model.layers]
        self.found: NonFinite | None = None

    def see_layer(self, index: int, module: nn.Module, position: int, batch: Batch, activations: Activations) -> None:
        """Take in a layer's output."""
        broken = _first_broken(activations.items())
        if broken is not None:
            name = repr(self._names[index])
            parameter, entry = _first_broken(module.named_parameters()), _first_broken(batch.items())
            if parameter is not None:
                what = f"parameter {parameter[0]!r} of layer {name} is not finite ({parameter[1]})"
            elif entry is not None:
                what = f"entry {entry[0]!r}, which layer {name} may read, is not finite ({entry[1]})"
            else:
                what = f"the output of layer {name} is not finite ({broken[0]!r} is {broken[1]}), though its input is"
            self._note(position, index, what)

    def see_loss(self, index: int, position: int, batch: Batch, loss: Tensor) -> None:
        """Take in a microbatch's loss of what a layer made."""
        broken = _value(loss)
        if broken:
            entry = _first_broken(batch.items())
            cause = f"; entry {entry[0]!r} is not, either ({entry[1]})" if entry else ""
            what = f"the loss is not finite ({broken}), though the output of layer {self._names[index]!r} is{cause}"
            self._note(position, index, what)

    def _note(self, position: int, layer_index: int, what: str) -> None:
        found = NonFinite(position=position, layer_index=layer_index, what=what)
        if self.found is None or (layer_index, position) < (self.found.layer_index, self.found.position):
            self.found = found


def _first_broken(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the name of the first tensor that is not finite, and what it holds."""
    return next(((name, value) for name, tensor in named if (value := _value(tensor))), None)


def _value(tensor: Tensor) -> str:
    """Return what a tensor holds that is no finite number; "" if nothing, or if its values are not here."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return ""
    if torch.isnan(tensor).any():
        return "nan"
    if torch.isposinf(tensor).any():
        return "inf"
    # where no gradient is wanted it is how masks are written
    return "-inf" if tensor.requires_grad and torch.isneginf(tensor).any() else ""
