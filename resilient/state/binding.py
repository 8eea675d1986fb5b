"""Binds layers' modules to the states in memory: their parameters are views of the states' buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from resilient.models.layer import LayerSpec, own_types, tie
from resilient.models.tensor_parallel.devices import TensorDevices


class Parameters(Protocol):
    """Where the parameters of a layer are: in its state, or in what is gathered of it."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By name, each in its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The job's."""
        ...


def bind(
    spec: LayerSpec, states: Mapping[str, Parameters], device: torch.device, devices: TensorDevices | None = None
) -> nn.Module:
    """Build a layer's module on top of resident states: its own and those it shares by tied parameters.

    Args:
        spec: The layer.
        states: States by layer name; must hold the layer's own and the owners of its tied parameters.
        device: Where to build.
        devices: Tensor-parallel ones, of which this is to be one's part; the states are this one's.
    """
    state = states[spec.name]
    with _SkipInit(), device:
        if devices is None:
            module = spec.build()
        else:
            assert spec.tensor_parallel is not None, "only degrees that the profile offers are planned"
            module = spec.tensor_parallel.build(devices)
    kept = own_types(module)
    names: dict[int, str] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        own = names.setdefault(id(parameter), name)  # parts of a layer may share one, under several names
        if own in state.parameters:
            tie(module, name, state.parameters[own])
    for name, (owner, owned) in spec.tied.items():
        tie(module, name, states[owner].parameters[owned])
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in kept:
            buffer.data = buffer.data.to(state.dtype)
    return module


class _SkipInit(TorchFunctionMode):
    """Constructors leave their parameters unset: they are replaced at once, and drawing them would take longest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
