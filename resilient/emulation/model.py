"""A model whose layers wait as long as real ones would compute, and train a few real parameters.

What layers compute is little, but real: the loss depends on every sample and every parameter, and each sample's on
that sample alone. So a run with failures can be compared with a single process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from resilient.emulation.device import DEVICE
from resilient.emulation.unit import EmulatedUnit, check_units
from resilient.errors import SampleError
from resilient.models.layer import Activations, Batch, Layer, LayerSpec


class EmulatedModel:
    """Units one after the other, on emulated devices; each reads the mean of what the one before made of a sample.

    It trains on an :class:`resilient.emulation.dataset.EmulatedDataset` of the same units, on CPUs. Forwards and both
    parts of backwards sleep: as many workers as have memory run side by side on a core. What the profiler measures is
    what the layers cost by their curves.

    Args:
        units: In execution order, encoders first.

    Raises:
        ArgumentError: There are none, or two of one name.
    """

    def __init__(self, units: Sequence[EmulatedUnit]) -> None:
        self.units = check_units(units)
        before = [None, *self.units[:-1]]
        self.layers = tuple(
            _spec(unit, index, previous, is_last=unit is self.units[-1] and index == unit.num_layers - 1)
            for unit, previous in zip(self.units, before, strict=True)
            for index in range(unit.num_layers)
        )

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the sum over samples of the squared distance of the last unit's mean from the sample's target."""
        means = _sample_means(activations["hidden"], batch[f"{self.units[-1].name}_sizes"])
        return (means - batch["target"].to(means.dtype)).square().sum()

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`resilient.errors.SampleError` if the sample has not what the units read."""
        for entry in ("target", *(f"{unit.name}{suffix}" for unit in self.units for suffix in _SUFFIXES)):
            if entry not in sample:
                fix = "train on an EmulatedDataset of the model's units"
                raise SampleError(f"{name}: must hold {entry!r}, got {sorted(sample)}; {fix}")

    def digest(self) -> str:
        """Return a content hash of the units."""
        return hashlib.sha256(repr(self.units).encode()).hexdigest()


_SUFFIXES = ("", "_lengths", "_sizes")
"""Of a unit's entries: a number for each token, tokens of each segment, tokens of each sample."""


class _EmulatedLayer(Layer):
    def __init__(self, unit: EmulatedUnit, previous: EmulatedUnit | None, *, is_first: bool) -> None:
        super().__init__()
        self.unit = unit
        self.previous = previous
        self.is_first = is_first
        shape = (unit.num_parameters // unit.width, unit.width)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=not unit.frozen)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        since = DEVICE.now()
        cost, backward = self.unit.cost, _Backward()
        forward_s = cost.forward_ms(batch[f"{self.unit.name}_lengths"].tolist()) / 1e3
        hidden = self._enter(activations, batch) if self.is_first else activations["hidden"]
        # the two lie on separate branches of the graph: each part of a split backward passes its own alone
        hidden = backward.waits_at(hidden, forward_s * cost.backward_input)
        scale = backward.waits_at(self.weight.mean(0), forward_s * cost.backward_weight)
        hidden = backward.begins_at(hidden + torch.tanh(hidden * scale) / 8)
        DEVICE.wait(forward_s, since)
        return {"hidden": hidden}

    def _enter(self, activations: Activations, batch: Batch) -> Tensor:
        tokens = batch[self.unit.name].to(self.weight.dtype)
        if self.previous is not None:
            means = _sample_means(activations["hidden"], batch[f"{self.previous.name}_sizes"])
            tokens = tokens + means.repeat_interleave(batch[f"{self.unit.name}_sizes"])
        return tokens[:, None].repeat(1, self.unit.width)

    def extra_repr(self) -> str:
        """Return what tells this layer's kind from others': the profiler measures equal ones together."""
        return f"{self.unit}, is_first={self.is_first}"


def _spec(unit: EmulatedUnit, index: int, previous: EmulatedUnit | None, *, is_last: bool) -> LayerSpec:
    reads = {f"{unit.name}_lengths"}
    if index == 0:
        reads |= {unit.name, f"{unit.name}_sizes"} | ({f"{previous.name}_sizes"} if previous else set())
    if is_last:
        reads |= {"target", f"{unit.name}_sizes"}
    return LayerSpec(
        name=f"{unit.name}.{index}",
        unit=unit.name,
        build=partial(_EmulatedLayer, unit, previous, is_first=index == 0),
        initialize=_initialize,
        reads=frozenset(reads),
    )


def _initialize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def _sample_means(hidden: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of each sample's tokens, 0 for none, shape ``[samples]``."""
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    sums = hidden.new_zeros(len(sizes)).index_add(0, owners, hidden.mean(1))
    return sums / sizes.clamp(min=1)


class _Backward:
    """When the backward of one forward of a layer began; the wait that comes first lasts from there."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def begins_at(self, tensor: Tensor) -> Tensor:
        """Return the layer's result, at whose gradient the backward begins."""
        return _Begin.apply(tensor, self)  # pyright: ignore[reportReturnType]

    def waits_at(self, tensor: Tensor, duration_s: float) -> Tensor:
        """Return a tensor whose gradient, if there is one, comes that much later."""
        return _Wait.apply(tensor, self, duration_s)  # pyright: ignore[reportReturnType]

    def begin(self) -> None:
        """Note the time."""
        self._began_s = DEVICE.now()

    def wait(self, duration_s: float) -> None:
        """Wait, since the beginning if nothing has waited since then."""
        since = DEVICE.now() if self._began_s is None else self._began_s
        self._began_s = None
        DEVICE.wait(duration_s, since)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backward: _Backward) -> Tensor:  # pyright: ignore
        ctx.of = backward
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        ctx.of.begin()
        return gradient, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backward: _Backward, duration_s: float) -> Tensor:  # pyright: ignore
        ctx.of, ctx.duration_s = backward, duration_s
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        ctx.of.wait(ctx.duration_s)
        return gradient, None, None
