"""Modules that users made, as layers that start from the values these have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from resilient.errors import ArgumentError


class GivenModule:
    """Makes copies of a module; called as a factory is.

    The values stay the user's own tensors, so that a model is not in memory twice.

    Args:
        module: The user's. It is not touched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._skeleton = _copy(module, lambda tensor: torch.empty_like(tensor, device="meta"))

    def __call__(self) -> nn.Module:
        """Return a copy on torch's default device: buffers have their values, parameters any."""
        device = torch.get_default_device()
        built = _copy(self._skeleton, lambda tensor: torch.empty_like(tensor, device=device))
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                built.get_buffer(name).copy_(buffer)
        return built

    def fill(self, built: nn.Module) -> None:
        """Give a copy's parameters the values of the user's."""
        for name, parameter in self._module.named_parameters():
            built.get_parameter(name).copy_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}


def _copy(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with other tensors; what its parts share, the copy's parts share."""
    memo: dict[int, Tensor] = {
        id(parameter): nn.Parameter(convert(parameter.detach()), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): convert(buffer.detach()) for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def check_given(modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules that have no values, or share some with another layer.

    Args:
        modules: By the name of their layer.

    Raises:
        ArgumentError: There is one; it is named.
    """
    owners: dict[int, str] = {}
    for layer, module in modules.items():
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            name = f"{path!r} of layer {layer!r}"
            if is_lazy(tensor) or tensor.is_meta:
                got = "an uninitialised one" if is_lazy(tensor) else "one on the meta device"
                fix = "load them first, or pass a function that makes the module"
                raise ArgumentError(name, "have values", got, fix)
            if (owner := owners.setdefault(id(tensor), name)) != name:
                raise ArgumentError(
                    name,
                    "be the layer's own",
                    f"that of {owner}",
                    "pass copy.deepcopy of the module, or tie them by LayerSpec.tied in a model of your own",
                )
