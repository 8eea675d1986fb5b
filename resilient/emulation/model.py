"""A model whose layers wait as long as real ones would compute, and train a few real parameters.

What layers compute is little, but real: the loss depends on every sample and every parameter, and each sample's on
that sample alone. So a run with failures can be compared with a single process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from resilient.emulation.device import DEVICE
from resilient.emulation.unit import EmulatedUnit, check_units
from resilient.errors import SampleError
from resilient.models.layer import Activations, Batch, Layer, LayerSpec


class EmulatedModel:
    """Encoders and a language model on emulated devices; the last unit reads the mean of what each encoder makes.

    It trains on an :class:`resilient.emulation.dataset.EmulatedDataset` of the same units, on CPUs. Forwards and both
    parts of backwards sleep: as many workers as have memory run side by side on a core. What the profiler measures is
    what the layers cost by their curves. Units run one after the other, as one chain of layers, or each in lanes of its
    own: samples are packed in either case, and the loss is the same.

    Args:
        units: In execution order: encoders, then the language model, which reads them all.
        padded: Whether the microbatches of a chain take as long as if each segment were as long as the longest of them,
            which is what real models compute there. Cells of units are packed in either case.

    Raises:
        ArgumentError: There are none, or two of one name.
    """

    unpackable = None
    """Samples lie one after the other in any case."""

    def __init__(self, units: Sequence[EmulatedUnit], *, padded: bool = False) -> None:
        self._padded = padded
        *self._encoders, self._last = self._parts = check_units(units)
        read = tuple(unit.name for unit in self._encoders)
        self.units = {**dict.fromkeys(read, ()), self._last.name: read}
        self.layers = tuple(
            _spec(unit, index, self.units[unit.name], is_last=unit is self._last and index == unit.num_layers - 1)
            for unit in self._parts
            for index in range(unit.num_layers)
        )

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the sum over samples of the squared distance of the last unit's mean from the sample's target."""
        name = self._last.name
        means = _sample_means(activations[_made(name)], batch[f"{name}_sizes"])
        return (means - batch["target"].to(means.dtype)).square().sum()

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return what all units read of the samples."""
        batch: dict[str, Tensor] = {}
        for name in self.units:
            batch |= self.collate_unit(name, samples, [0] * len(samples))
            if self._padded:
                lengths = batch[f"{name}_lengths"]
                batch[f"{name}_lengths"] = torch.full_like(lengths, max(lengths.tolist(), default=0))
        return batch

    def lengths(self, sample: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the tokens of each segment of a sample, by unit."""
        return {name: sample[f"{name}_lengths"].tolist() for name in self.units}

    def collate_unit(self, unit: str, samples: Sequence[Mapping[str, Any]], keys: Sequence[int]) -> dict[str, Tensor]:
        """Pack what one unit reads of samples: one after the other; nothing here draws random numbers from the keys.

        Returns:
            ``{unit} [tokens]``; ``{unit}_lengths``, the tokens of each segment; and of the last unit ``target
            [samples]`` and the ``{unit}_sizes`` of all units, the tokens of each sample.
        """
        batch = {
            unit: torch.cat([torch.empty(0, dtype=torch.float64), *(sample[unit] for sample in samples)]),
            f"{unit}_lengths": _whole(length for sample in samples for length in sample[f"{unit}_lengths"].tolist()),
        }
        if unit != self._last.name:
            return batch
        sizes = {f"{name}_sizes": _whole(len(sample[name]) for sample in samples) for name in self.units}
        targets = torch.cat([torch.empty(0, dtype=torch.float64), *(sample["target"] for sample in samples)])
        return {**batch, **sizes, "target": targets}

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`resilient.errors.SampleError` if the sample has not what the units read."""
        for entry in ("target", *(f"{unit}{suffix}" for unit in self.units for suffix in ("", "_lengths"))):
            if entry not in sample:
                fix = "train on an EmulatedDataset of the model's units"
                raise SampleError(f"{name}: must hold {entry!r}, got {sorted(sample)}; {fix}")

    def digest(self) -> str:
        """Return a content hash of the units."""
        return hashlib.sha256(repr((self._parts, self._padded)).encode()).hexdigest()


class _EmulatedLayer(Layer):
    def __init__(self, unit: EmulatedUnit, read: tuple[str, ...], *, is_first: bool) -> None:
        super().__init__()
        self.unit = unit
        self.read = read
        self.is_first = is_first
        shape = (unit.num_parameters // unit.width, unit.width)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=not unit.frozen)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        since = DEVICE.now()
        cost, backward, made = self.unit.cost, _Backward(), _made(self.unit.name)
        forward_s = cost.forward_ms(batch[f"{self.unit.name}_lengths"].tolist()) / 1e3
        hidden = self._enter(activations, batch) if self.is_first else activations[made]
        # the two lie on separate branches of the graph: each part of a split backward passes its own alone
        hidden = backward.waits_at(hidden, forward_s * cost.backward_input)
        scale = backward.waits_at(self.weight.mean(0), forward_s * cost.backward_weight)
        hidden = backward.begins_at(hidden + torch.tanh(hidden * scale) / 8)
        DEVICE.wait(forward_s, since)
        return {**({} if self.read else activations), made: hidden}

    def _enter(self, activations: Activations, batch: Batch) -> Tensor:
        tokens = batch[self.unit.name].to(self.weight.dtype)
        for name in self.read:
            if _made(name) in activations:  # nothing comes for a cell whose samples have nothing for the encoder
                means = _sample_means(activations[_made(name)], batch[f"{name}_sizes"])
                tokens = tokens + means.repeat_interleave(batch[f"{self.unit.name}_sizes"])
        return tokens[:, None].repeat(1, self.unit.width)

    def extra_repr(self) -> str:
        """Return what tells this layer's kind from others': the profiler measures equal ones together."""
        return f"{self.unit}, is_first={self.is_first}"


def _made(unit: str) -> str:
    """Return what is called in activations what a unit makes of its tokens, ``[tokens, width]``."""
    return f"{unit}.features"


def _spec(unit: EmulatedUnit, index: int, read: tuple[str, ...], *, is_last: bool) -> LayerSpec:
    reads = {f"{unit.name}_lengths"}
    if index == 0:
        reads |= {unit.name, *(f"{name}_sizes" for name in (*read, *([unit.name] if read else [])))}
    if is_last:
        reads |= {"target", f"{unit.name}_sizes"}
    return LayerSpec(
        name=f"{unit.name}.{index}",
        unit=unit.name,
        build=partial(_EmulatedLayer, unit, read if index == 0 else (), is_first=index == 0),
        initialize=_initialize,
        reads=frozenset(reads),
    )


def _initialize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def _whole(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)


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
