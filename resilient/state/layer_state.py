"""Layer states: a layer's parameters and optimizer slots in one flat buffer.

Owns the layout of that buffer. A copy is then one large send, a gradient sum one all-reduce, a fingerprint one pass.
Knows nothing of ranks or plans.

    buffer:  [ trainable parameters | frozen parameters | slot 0 | slot 1 | ... ]     slots as long as the first part
    grad:    [ trainable parameters ]

Parameters that are updated at the same rates lie together: a window, which torch's optimizer sees as one parameter.

This is the canonical buffer, that of a worker that holds the state alone. One that shares it holds intervals of it, one
after the other: what lies together there lies together here. A parameter that is cut is stored with the dimension first
in which it is cut, so that a part of it is one interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from resilient.models.layer import LayerSpec, initialize_layer
from resilient.state.witnesses import SEVERAL
from resilient.templates.common.byte_intervals import ByteIntervals


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
        held: What of the canonical buffer is here: some elements of the parameters, and of each slot those that belong
            to them. None for all.

    Attributes:
        whole: All of the canonical buffer.
        held: What of it is here.
        buffer: What is held, ``[num_elements]``.
        grad: The gradients of the trainable parameters, which the buffer begins with.
        slots: The optimizer's, by name.
        parameters: By name; one that is not here whole is flat.
        windows: What the optimizer updates.
    """

    def __init__(
        self,
        spec: LayerSpec,
        layout: BufferLayout,
        slots: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        held: ByteIntervals | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.origin = SEVERAL
        self.whole = ByteIntervals.of(0, layout.numel(len(slots)) * dtype.itemsize)
        self.held = self.whole if held is None else held
        self._itemsize = dtype.itemsize
        self.buffer = torch.zeros(self.held.size // dtype.itemsize, dtype=dtype, device=device)
        self.grad = torch.zeros(self._here(0, layout.num_trainable).stop, dtype=dtype, device=device)
        first_slot = layout.num_trainable + layout.num_frozen
        self.slots = {
            name: self.buffer[self._here(first_slot + i * layout.num_trainable, layout.numel(i + 1))]
            for i, name in enumerate(slots)
        }
        self.parameters = {entry.name: self._parameter(entry) for entry in layout.entries}
        windows = (self._updated(window) for window in layout.windows)
        self.windows = tuple(window for window in windows if window.parameter.numel())

    def _here(self, start: int, stop: int) -> slice:
        """Return where the elements ``start .. stop - 1`` of the canonical buffer lie here, as far as they are held."""
        itemsize = self._itemsize
        return slice(self.held.before(start * itemsize) // itemsize, self.held.before(stop * itemsize) // itemsize)

    def _updated(self, window: Window) -> UpdatedWindow:
        elements = self._here(window.start, window.stop)
        parameter = nn.Parameter(self.buffer[elements])
        parameter.grad = self.grad[elements]
        slots = {name: slot[elements] for name, slot in self.slots.items()}
        return UpdatedWindow(rates=window.rates, parameter=parameter, slots=slots)

    def _parameter(self, entry: ParameterEntry) -> nn.Parameter:
        elements = self._here(entry.offset, entry.offset + entry.numel)
        parameter = nn.Parameter(_shaped(self.buffer[elements], entry), requires_grad=entry.trainable)
        if entry.trainable:
            parameter.grad = _shaped(self.grad[elements], entry)
        return parameter

    @property
    def bytes(self) -> Tensor:
        """The buffer as bytes, ``[num_bytes]``; what is copied between workers."""
        return self.buffer.view(torch.uint8)

    def window(self, start: int, end: int) -> Tensor:
        """Return the bytes ``start .. end - 1`` of the canonical buffer, all of which are held."""
        return self.bytes[self.held.before(start) : self.held.before(end)]

    def values(self, intervals: ByteIntervals) -> Tensor:
        """Return the elements of those of some bytes that are held, ``[num_elements]``: a view if they lie together."""
        views = [self.buffer[elements] for elements in self._elements(intervals)]
        return views[0] if len(views) == 1 else torch.cat([self.buffer[:0], *views])

    def gradients(self, intervals: ByteIntervals) -> list[Tensor]:
        """Return views of the gradients of what is held and trained among some bytes; what lies together is one."""
        trainable = ByteIntervals.of(0, self.layout.num_trainable * self._itemsize)
        return [self.grad[elements] for elements in self._elements(intervals & trainable)]

    def _elements(self, intervals: ByteIntervals) -> list[slice]:
        """Return where the elements of those of some bytes that are held lie here."""
        return [slice(start // self._itemsize, end // self._itemsize) for start, end in self.held.positions(intervals)]

    def initialize(self, seed: int) -> None:
        """Fill in the initial values, which depend on (seed, layer name) alone, and zero the slots."""
        module = initialize_layer(self.spec, seed, self.buffer.dtype)
        self.buffer.zero_()
        for entry in self.layout.entries:
            values = module.get_parameter(entry.name).detach().contiguous().view(-1).view(torch.uint8)
            first = entry.offset * self._itemsize
            for start, end in self.held & ByteIntervals.of(first, first + values.numel()):
                self.window(start, end).copy_(values[start - first : end - first])

    def take(self, other: LayerState, wanted: ByteIntervals) -> bool:
        """Copy in what another state of the same layer holds of some bytes; return whether there was any."""
        found = wanted & other.held
        for start, end in found:
            self.window(start, end).copy_(other.window(start, end))
        return bool(found)

    def tensors(self, part: ByteIntervals | None = None) -> dict[str, Tensor]:
        """Return views of everything in some held bytes by name, slots as ``optimizer/<slot>/<parameter>``.

        Of what is not among them whole, each interval is flat, by its elements: ``weight[24:48]``.

        Args:
            part: The bytes; None for all that are held.
        """
        return {
            name: self.window(start, end).view(self.buffer.dtype).view(shape)
            for name, shape, start, end in self._named(self.held if part is None else part)
        }

    def load(self, tensors: Mapping[str, Tensor], part: ByteIntervals | None = None) -> None:
        """Copy in what is held of what :meth:`tensors` gave, of this state or of another one of the layer.

        Args:
            tensors: By name.
            part: The bytes they are; None for all of the canonical buffer.

        Raises:
            ValueError: A tensor is missing or has another shape or type.
        """
        for name, shape, start, end in self._named(self.whole if part is None else part):
            found = tensors.get(name)
            if found is None or found.shape != shape or found.dtype != self.buffer.dtype:
                form = _form(torch.empty(shape, dtype=self.buffer.dtype, device="meta"))
                raise ValueError(
                    f"{name!r} of layer {self.spec.name!r} must be {form}, got {_form(found)}; "
                    "the checkpoint belongs to another model, optimizer or precision"
                )
            values = found.contiguous().view(-1).view(torch.uint8)
            for first, last in self.held & ByteIntervals.of(start, end):
                self.window(first, last).copy_(values[first - start : last - start])

    def _named(self, part: ByteIntervals) -> Iterator[tuple[str, torch.Size, int, int]]:
        """Yield the tensors of some bytes: name, shape, and where in the canonical buffer they start and end."""
        entries = self.layout.entries
        places = [(entry.name, entry.offset, entry) for entry in entries]
        for index, slot in enumerate(self.slots):
            start = self.layout.numel(index)
            places += [(f"optimizer/{slot}/{e.name}", start + e.offset, e) for e in entries if e.trainable]
        for name, first, entry in places:
            start, end = first * self._itemsize, (first + entry.numel) * self._itemsize
            found = part & ByteIntervals.of(start, end)
            if found.size == end - start:
                yield name, torch.Size(entry.shape), start, end
                continue
            for one, other in found:
                elements = (one - start) // self._itemsize, (other - start) // self._itemsize
                yield f"{name}[{elements[0]}:{elements[1]}]", torch.Size([elements[1] - elements[0]]), one, other


def _shaped(elements: Tensor, entry: ParameterEntry) -> Tensor:
    return elements.view(entry.shape) if elements.numel() == entry.numel else elements


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
