"""Layer states: a layer's parameters and optimizer slots in one flat buffer.

Owns the layout of that buffer and the binding of modules to it. A copy is then one large send, a gradient sum one
all-reduce, a fingerprint one pass. Knows nothing of ranks or plans.

    buffer:  [ trainable parameters | frozen parameters | slot 0 | slot 1 | ... ]     slots as long as the first part
    grad:    [ trainable parameters ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from resilient.models.layer import LayerSpec, initialize_layer, tie


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """Where a parameter lies in its layer's buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """What a layer's buffer holds."""

    entries: tuple[ParameterEntry, ...]
    num_trainable: int
    num_frozen: int

    def numel(self, num_slots: int) -> int:
        """Return the length of the buffer in elements."""
        return self.num_trainable * (1 + num_slots) + self.num_frozen

    @classmethod
    def of(cls, spec: LayerSpec) -> BufferLayout:
        """Size a layer without allocating it.

        Raises:
            ValueError: The layer keeps running statistics: they are no function of the samples' order alone.
        """
        with torch.device("meta"):
            module = spec.build()
        for part in module.modules():
            if isinstance(part, _BatchNorm) and part.track_running_stats:
                raise ValueError(
                    f"layer {spec.name!r} must not keep running statistics, got {type(part).__name__}; "
                    "use LayerNorm or GroupNorm"
                )
        named = [(name, parameter) for name, parameter in module.named_parameters() if name not in spec.tied]
        entries: list[ParameterEntry] = []
        offset = 0
        totals: dict[bool, int] = {}
        for trainable in (True, False):
            start = offset
            for name, parameter in named:
                if parameter.requires_grad is trainable:
                    shape = tuple(parameter.shape)
                    entries.append(ParameterEntry(name=name, shape=shape, offset=offset, trainable=trainable))
                    offset += parameter.numel()
            totals[trainable] = offset - start
        return cls(entries=tuple(entries), num_trainable=totals[True], num_frozen=totals[False])


class LayerState:
    """The state of one layer on this worker, at one version at a time.

    Args:
        spec: The layer.
        layout: Its :class:`BufferLayout`.
        slots: Names of the optimizer's slots.
        dtype: Of parameters, gradients and slots.
        device: Where they live.
    """

    def __init__(
        self, spec: LayerSpec, layout: BufferLayout, slots: tuple[str, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.buffer = torch.zeros(layout.numel(len(slots)), dtype=dtype, device=device)
        self.grad = torch.zeros(layout.num_trainable, dtype=dtype, device=device)
        self.flat = nn.Parameter(self.buffer[: layout.num_trainable])
        self.flat.grad = self.grad
        first_slot = layout.num_trainable + layout.num_frozen
        self.slots = {
            name: self.buffer[first_slot + i * layout.num_trainable :][: layout.num_trainable]
            for i, name in enumerate(slots)
        }
        self.parameters = {entry.name: self._parameter(entry) for entry in layout.entries}

    def _parameter(self, entry: ParameterEntry) -> nn.Parameter:
        window = slice(entry.offset, entry.offset + entry.numel)
        parameter = nn.Parameter(self.buffer[window].view(entry.shape), requires_grad=entry.trainable)
        if entry.trainable:
            parameter.grad = self.grad[window].view(entry.shape)
        return parameter

    @property
    def bytes(self) -> Tensor:
        """The buffer as bytes, ``[num_bytes]``; what is copied between workers."""
        return self.buffer.view(torch.uint8)

    def initialize(self, seed: int) -> None:
        """Fill in the initial values, which depend on (seed, layer name) alone, and zero the slots."""
        module = initialize_layer(self.spec, seed, self.buffer.dtype)
        self.buffer.zero_()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(module.get_parameter(name))

    def tensors(self) -> dict[str, Tensor]:
        """Return views of everything in the buffer by name, slots as ``optimizer/<slot>``."""
        named = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return named | {f"optimizer/{name}": slot for name, slot in self.slots.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in what :meth:`tensors` gave.

        Raises:
            ValueError: A tensor is missing or has another shape or type.
        """
        for name, own in self.tensors().items():
            found = tensors.get(name)
            if found is None or found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(
                    f"{name!r} of layer {self.spec.name!r} must be {_form(own)}, got {_form(found)}; "
                    "the checkpoint belongs to another model, optimizer or precision"
                )
            own.copy_(found)


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def bind(spec: LayerSpec, states: Mapping[str, LayerState], device: torch.device) -> nn.Module:
    """Build a layer's module on top of resident states: its own and those it shares by tied parameters.

    Args:
        spec: The layer.
        states: States by layer name; must hold the layer's own and the owners of its tied parameters.
        device: Where to build.
    """
    state = states[spec.name]
    with _SkipInit(), device:
        module = spec.build()
    names: dict[int, str] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        own = names.setdefault(id(parameter), name)  # parts of a layer may share one, under several names
        if own in state.parameters:
            tie(module, name, state.parameters[own])
    for name, (owner, owned) in spec.tied.items():
        tie(module, name, states[owner].parameters[owned])
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(state.buffer.dtype)
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
