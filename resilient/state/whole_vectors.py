"""Has the optimizer update each element the same, wherever it lies in what a worker holds.

On CPUs torch's fused optimizers compute what is left behind a tensor's last whole vector by other instructions than
the rest, which round otherwise in the last bit. Workers that hold unequal parts of a state have other ends, and so
their copies of it would differ. Here ends of windows are put together in memory that is filled up to whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from resilient.state.layer_state import UpdatedWindow
from resilient.state.layout import Rates

VECTOR_BYTES = 64
"""Of the widest vectors there are (AVX-512): those of others fill them as well."""


class WholeVectors:
    """What of layer states' windows is to be updated, none of it ending within a vector.

    Whoever updates it calls :meth:`gather` before, and :meth:`scatter` after.

    Args:
        windows: The states'.

    Attributes:
        windows: Parts of these windows, and for each pair of rates at most one that their ends are copied to.
    """

    def __init__(self, windows: Iterable[UpdatedWindow]) -> None:
        self.windows: list[UpdatedWindow] = []
        ends: dict[Rates, list[UpdatedWindow]] = {}
        for window in windows:
            size = window.parameter.numel()
            left = size % _vector_numel(window.parameter) if window.parameter.device.type == "cpu" else 0
            if size > left:
                self.windows.append(_part(window, slice(0, size - left)) if left else window)
            if left:
                ends.setdefault(window.rates, []).append(_part(window, slice(size - left, size)))
        self._ends = [(_room(of_rates), of_rates) for of_rates in ends.values()]
        self.windows += [room for room, _ in self._ends]

    @torch.no_grad()
    def gather(self, *_: object) -> None:
        """Copy the ends together."""
        for room, ends in self._ends:
            for together, *apart in zip(_tensors(room), *map(_tensors, ends), strict=True):
                joined = torch.cat(apart)
                together[: len(joined)] = joined

    @torch.no_grad()
    def scatter(self, *_: object) -> None:
        """Copy them back to where they belong."""
        for room, ends in self._ends:
            for together, *apart in zip(_updated(room), *map(_updated, ends), strict=True):
                start = 0
                for each in apart:
                    each.copy_(together[start : start + len(each)])
                    start += len(each)


def _vector_numel(tensor: Tensor) -> int:
    return VECTOR_BYTES // tensor.element_size()


def _part(window: UpdatedWindow, elements: slice) -> UpdatedWindow:
    """Return some elements of a window, in the same memory."""
    gradient, values, *slots = (tensor[elements] for tensor in _tensors(window))
    return _window(window.rates, values, gradient, dict(zip(window.slots, slots, strict=True)))


def _room(ends: Sequence[UpdatedWindow]) -> UpdatedWindow:
    """Return a window of its own memory with room for the ends of others, of whole vectors."""
    first = ends[0]
    size, vector = sum(end.parameter.numel() for end in ends), _vector_numel(first.parameter)
    gradient, values, *slots = (tensor.new_zeros(-(-size // vector) * vector) for tensor in _tensors(first))
    return _window(first.rates, values, gradient, dict(zip(first.slots, slots, strict=True)))


def _window(rates: Rates, values: Tensor, gradient: Tensor, slots: dict[str, Tensor]) -> UpdatedWindow:
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return UpdatedWindow(rates=rates, parameter=parameter, slots=slots)


def _tensors(window: UpdatedWindow) -> list[Tensor]:
    """Return gradient, parameter and slots."""
    assert window.parameter.grad is not None, "windows are made with their gradients"
    return [window.parameter.grad, *_updated(window)]


def _updated(window: UpdatedWindow) -> list[Tensor]:
    """Return parameter and slots."""
    return [window.parameter.detach(), *window.slots.values()]
