"""Layer states: a layer's parameters and optimizer slots in one flat buffer.

Owns the layout of that buffer and the binding of modules to it. A copy is then one large send, a gradient sum one
all-reduce, a fingerprint one pass. Knows nothing of ranks or plans.

    buffer:  [ trainable parameters | frozen parameters | slot 0 | slot 1 | ... ]     slots as long as the first part
    grad:    [ trainable parameters ]

Parameters that are updated at the same rates lie together: a window, which torch's optimizer sees as one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from resilient.models.layer import LayerSpec, initialize_layer, tie
from resilient.state.witnesses import SEVERAL


@dataclass(frozen=True, kw_only=True)
class Rates:
    """At which rates a parameter is updated.

    Args:
        lr: Learning rate, where the schedule's factor is 1.
        weight_decay: As the optimizer understands it.
    """

    lr: float
    weight_decay: float


RatesOf = Callable[[str, int], Rates]
"""A parameter's full name, ``<layer>.<parameter>``, and its number of dimensions -> its rates."""


def _not_updated(name: str, num_dims: int) -> Rates:
    return Rates(lr=0.0, weight_decay=0.0)


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
class Window:
    """Trainable parameters that lie together and are updated at the same rates: elements ``start .. stop - 1``."""

    rates: Rates
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """What a layer's buffer holds."""

    entries: tuple[ParameterEntry, ...]
    windows: tuple[Window, ...]
    num_trainable: int
    num_frozen: int

    def numel(self, num_slots: int) -> int:
        """Return the length of the buffer in elements."""
        return self.num_trainable * (1 + num_slots) + self.num_frozen

    @classmethod
    def of(cls, spec: LayerSpec, rates_of: RatesOf = _not_updated) -> BufferLayout:
        """Size a layer without allocating it.

        Args:
            spec: The layer.
            rates_of: The optimizer's; left out where nothing is to be updated.

        Raises:
            ValueError: The layer keeps running statistics: they are no function of the samples' order alone.
        """
        with torch.device("meta"):
            module = spec.build()
        for part in module.modules():
            if isinstance(part, _BatchNorm) and part.track_running_stats and part.training:
                raise ValueError(
                    f"layer {spec.name!r} must not keep running statistics, got {type(part).__name__}; "
                    "use LayerNorm or GroupNorm, or keep those it has with eval()"
                )
        named = [(name, parameter) for name, parameter in module.named_parameters() if name not in spec.tied]
        trainable: dict[Rates, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                rates = rates_of(f"{spec.name}.{name}", parameter.dim())
                trainable.setdefault(rates, []).append((name, parameter))
        entries: list[ParameterEntry] = []
        windows: list[Window] = []
        offset = 0
        for rates, together in trainable.items():
            entries += _entries(together, offset)
            stop = offset + sum(parameter.numel() for _, parameter in together)
            windows.append(Window(rates=rates, start=offset, stop=stop))
            offset = stop
        frozen = _entries([(name, parameter) for name, parameter in named if not parameter.requires_grad], offset)
        return cls(
            entries=(*entries, *frozen),
            windows=tuple(windows),
            num_trainable=offset,
            num_frozen=sum(entry.numel for entry in frozen),
        )


def _entries(named: Iterable[tuple[str, nn.Parameter]], offset: int) -> list[ParameterEntry]:
    """Lay parameters out one after the other, from ``offset`` on."""
    entries: list[ParameterEntry] = []
    for name, parameter in named:
        shape, trainable = tuple(parameter.shape), parameter.requires_grad
        entries.append(ParameterEntry(name=name, shape=shape, offset=offset, trainable=trainable))
        offset += parameter.numel()
    return entries


@dataclass(frozen=True, kw_only=True)
class UpdatedWindow:
    """A window of a layer state, as the optimizer sees it: one parameter, with its gradient, and its slots."""

    rates: Rates
    parameter: nn.Parameter
    slots: dict[str, Tensor]


class LayerState:
    """The state of one layer on this worker, at one version at a time.

    ``origin`` tells whose it was when its copies were last found equal, or when it was made (see
    :mod:`resilient.state.witnesses`); whoever fills it says so.

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
        self.origin = SEVERAL
        self.buffer = torch.zeros(layout.numel(len(slots)), dtype=dtype, device=device)
        self.grad = torch.zeros(layout.num_trainable, dtype=dtype, device=device)
        first_slot = layout.num_trainable + layout.num_frozen
        self.slots = {
            name: self.buffer[first_slot + i * layout.num_trainable :][: layout.num_trainable]
            for i, name in enumerate(slots)
        }
        self.parameters = {entry.name: self._parameter(entry) for entry in layout.entries}
        self.windows = tuple(self._updated(window) for window in layout.windows if window.stop > window.start)

    def _updated(self, window: Window) -> UpdatedWindow:
        elements = slice(window.start, window.stop)
        parameter = nn.Parameter(self.buffer[elements])
        parameter.grad = self.grad[elements]
        slots = {name: slot[elements] for name, slot in self.slots.items()}
        return UpdatedWindow(rates=window.rates, parameter=parameter, slots=slots)

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
        """Return views of everything in the buffer by name, slots as ``optimizer/<slot>/<parameter>``."""
        named = {name: parameter.detach() for name, parameter in self.parameters.items()}
        trainable = [entry for entry in self.layout.entries if entry.trainable]
        return named | {
            f"optimizer/{name}/{entry.name}": slot[entry.offset : entry.offset + entry.numel].view(entry.shape)
            for name, slot in self.slots.items()
            for entry in trainable
        }

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
