"""A plain chain of modules, tensor in and tensor out: unimodal models, benchmarks, tests."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from resilient.errors import SampleError
from resilient.models.layer import Activations, Batch, Layer, LayerSpec

Factory = Callable[[], nn.Module]


class ChainLayer(Layer):
    """Apply a module to ``batch["input"]`` (first layer) or to the hidden state of the layer before."""

    def __init__(self, module: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.module = module
        self.first = first

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        hidden = batch["input"] if self.first else activations["hidden"]
        own = next(self.module.parameters(), None)
        if own is not None and hidden.is_floating_point() and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(own.dtype)
        return {"hidden": self.module(hidden)}


class Chain:
    """A model that is a chain of modules, one layer each.

    Args:
        layers: Zero-argument factories of modules (tensor -> tensor), or an ``nn.Sequential`` or list of modules.
            Of a module only the structure is taken: its values are drawn anew with ``reset_parameters()``.
        loss: (output of the last module, batch) -> loss SUMMED over the targets.
        names: One per layer; ``layer.0``, ``layer.1``, ... when None.

    Raises:
        ValueError: For an empty chain, names that do not fit, or a module that cannot be initialised again.
    """

    def __init__(
        self,
        layers: Iterable[Factory | nn.Module],
        loss: Callable[[Tensor, Batch], Tensor],
        names: Sequence[str] | None = None,
    ) -> None:
        items = tuple(layers)
        if not items:
            raise ValueError(
                "layers must hold at least one layer, got none; pass factories such as lambda: nn.Linear(8, 8)"
            )
        if names is None:
            names = [f"layer.{i}" for i in range(len(items))]
        if len(names) != len(items) or len(set(names)) != len(names):
            raise ValueError(f"names must be unique, one per layer ({len(items)}), got {list(names)}; rename them")
        self._loss = loss
        self.layers = tuple(
            _spec(item, name, first=i == 0) for i, (item, name) in enumerate(zip(items, names, strict=True))
        )

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the summed loss of the chain's output."""
        return self._loss(activations["hidden"], batch)

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`SampleError` if the sample has no ``input``."""
        if "input" not in sample:
            raise SampleError(f"{name}: a chain reads 'input', but the sample holds {sorted(sample)}; rename its entry")

    def digest(self) -> str:
        """Return a content hash of structure, parameter shapes and the loss's name."""
        text = [getattr(self._loss, "__qualname__", type(self._loss).__qualname__)]
        for spec in self.layers:
            with torch.device("meta"):
                module = spec.build()
            shapes = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
            text.append(f"{spec.name} {module} {shapes}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _spec(item: Factory | nn.Module, name: str, *, first: bool) -> LayerSpec:
    if isinstance(item, nn.Module):
        structure, initialize = _from_module(item, name)
    else:
        structure, initialize = item, None

    def build() -> nn.Module:
        return ChainLayer(structure(), first=first)

    def construct_again(module: nn.Module) -> None:
        _copy_tensors(build(), module)

    return LayerSpec(name=name, unit="chain", build=build, initialize=initialize or construct_again)


def _from_module(module: nn.Module, name: str) -> tuple[Factory, Callable[[nn.Module], None]]:
    for path, part in module.named_modules():
        owns = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if owns and not callable(getattr(part, "reset_parameters", None)):
            where = f"{path!r} ({type(part).__name__})" if path else type(part).__name__
            raise ValueError(
                f"layer {name!r} must be a factory, got a module whose part {where} has no reset_parameters(); "
                f"pass a function that builds it, e.g. lambda: {type(module).__name__}(...)"
            )
    skeleton = copy.deepcopy(module).to("meta")
    constants = {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}

    def structure() -> nn.Module:
        built = copy.deepcopy(skeleton).to_empty(device=torch.get_default_device())
        for name, value in constants.items():
            built.get_buffer(name).copy_(value)
        return built

    def initialize(built: nn.Module) -> None:
        for part in built.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()

    return structure, initialize


def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters and buffers, those outside the state dict too."""
    for mine, theirs in (
        (target.named_parameters(), source.named_parameters()),
        (target.named_buffers(), source.named_buffers()),
    ):
        found = dict(theirs)
        for name, tensor in mine:
            tensor.copy_(found[name])
