"""A plain chain of modules, tensor in and tensor out: unimodal models, benchmarks, tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from resilient.common.arguments import kind_of
from resilient.data.multimodal import IGNORED_LABEL, LARGEST_PIXEL
from resilient.errors import ArgumentError, SampleError
from resilient.models.chain_arguments import built, check_layers, check_loss, check_names
from resilient.models.digests import code_text, values_digest
from resilient.models.given_module import GivenModule, check_given
from resilient.models.layer import Activations, Batch, Layer, LayerSpec

Factory = Callable[[], nn.Module]

_TARGETS = ("labels", "label", "targets", "target")
"""Entries of samples whose integers are taken for the loss's targets."""


class ChainLayer(Layer):
    """Apply a module to ``batch["input"]`` (first layer) or to the hidden state of the layer before."""

    def __init__(self, module: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.module = module
        self.first = first

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        hidden = batch["input"] if self.first else activations["hidden"]
        # parameters of fewer bits are scaled, which the module does itself
        own = next((each for each in self.module.parameters() if each.is_floating_point() and each.itemsize > 1), None)
        if own is not None and hidden.is_floating_point() and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(own.dtype)
        output = self.module(hidden)
        if not isinstance(output, Tensor):
            fix = "wrap it in a module that returns one of them"
            raise ArgumentError(f"{type(self.module).__name__} in a chain", "return a tensor", kind_of(output), fix)
        return {"hidden": output}


class Chain:
    """A model that is a chain of modules, one layer each.

    Args:
        layers: Zero-argument factories of modules (tensor -> tensor), whose values are drawn from the job's seed and
            the layer's name; or an ``nn.Sequential`` or list of modules, which keep the values that they have.
        loss: (output of the last module, batch) -> loss SUMMED over the targets.
        names: One per layer; ``layer.0``, ``layer.1``, ... when None.

    Raises:
        ValueError: For an empty chain, names that do not fit, or modules without values or with each other's.
    """

    def __init__(
        self,
        layers: Iterable[Factory | nn.Module],
        loss: Callable[[Tensor, Batch], Tensor],
        names: Sequence[str] | None = None,
    ) -> None:
        items = check_layers(layers)
        names = check_names(names, len(items)) if names is not None else [f"layer.{i}" for i in range(len(items))]
        check_loss(loss)
        given = {name: item for name, item in zip(names, items, strict=True) if isinstance(item, nn.Module)}
        check_given(given)
        self._given = {name: GivenModule(module) for name, module in given.items()}
        self.loss_function = loss
        self.layers = tuple(
            _spec(
                name,
                self._given.get(name, item),  # pyright: ignore[reportArgumentType]
                first=i == 0,
                last=i == len(items) - 1,
            )
            for i, (name, item) in enumerate(zip(names, items, strict=True))
        )

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the summed loss of the chain's output."""
        return self.loss_function(activations["hidden"], batch)

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`SampleError` if the sample has no ``input``."""
        if "input" not in sample:
            raise SampleError(f"{name}: must hold 'input', which a chain reads, got {sorted(sample)}; rename an entry")

    def check_first(self, samples: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise :class:`SampleError` if the inputs are plainly images that are not normalised.

        Args:
            samples: Those of the first microbatches, by what to call them in the message.
        """
        for name, sample in samples.items():
            if _is_raw_image(sample["input"]):
                raise SampleError(
                    f"{name}: 'input' must be normalised, got an image of whole numbers up to "
                    f"{sample['input'].max():g}; divide by 255, then subtract the mean and divide by the deviation; or "
                    "leave it uint8 if the first layer does so"
                )

    def num_targets(self, sample: Mapping[str, Any]) -> int | None:
        """Return how many integers a sample's labels or targets are, :data:`IGNORED_LABEL` aside; None without."""
        for key in _TARGETS:
            value = sample.get(key)
            if value is None:
                continue
            if isinstance(value, int | np.integer | np.ndarray):
                value = torch.as_tensor(value)
            if isinstance(value, Tensor) and _is_whole(value.dtype):
                if value.numel() == 1:  # of most samples; the sum takes five times as long
                    return int(value.item() != IGNORED_LABEL)
                return int((value != IGNORED_LABEL).sum())
        return None

    def digest(self) -> str:
        """Return a content hash of structure, parameter shapes and the loss's code."""
        return hashlib.sha256(f"{code_text(self.loss_function)}\n{self._structure()}".encode()).hexdigest()

    def structure_digest(self) -> str:
        """Return a content hash of structure and parameter shapes."""
        return hashlib.sha256(self._structure().encode()).hexdigest()

    def _structure(self) -> str:
        text: list[str] = []
        for spec in self.layers:
            with torch.device("meta"):
                module = spec.build()
            shapes = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
            text.append(f"{spec.name} {module} {shapes}")
        return "\n".join(text)

    def values_digest(self) -> str:
        """Return a content hash of the values that modules came with."""
        return values_digest(
            {
                f"{name}/{path}": tensor
                for name, module in self._given.items()
                for path, tensor in module.tensors().items()
            }
        )


def _spec(name: str, item: Factory, *, first: bool, last: bool) -> LayerSpec:
    def build() -> nn.Module:
        return ChainLayer(built(item(), name), first=first)

    def initialize(module: nn.Module) -> None:
        if isinstance(item, GivenModule):
            item.fill(module.get_submodule("module"))
        else:
            _copy_tensors(build(), module)  # what the factory draws now

    reads = None if last else frozenset(("input",) if first else ())  # the loss may read whatever there is
    return LayerSpec(name=name, unit="chain", build=build, initialize=initialize, reads=reads)


def _copy_tensors(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters and buffers, those outside the state dict too."""
    for mine, theirs in (
        (target.named_parameters(), source.named_parameters()),
        (target.named_buffers(), source.named_buffers()),
    ):
        found = dict(theirs)
        for name, tensor in mine:
            tensor.copy_(found[name])


@cache
def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _is_raw_image(value: Any) -> bool:
    """Whether these are plainly the numbers 0 .. 255 of an image, as floats ``[channels, height, width]``."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 3:
        return False
    if len(value) not in (1, 3, 4) or not value.numel():
        return False
    low, high = float(value.min()), float(value.max())
    return low >= 0 and LARGEST_PIXEL < high <= 255 and torch.equal(value, value.round())
