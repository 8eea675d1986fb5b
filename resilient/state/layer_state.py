"""Layer states: a layer's parameters and optimizer slots in one flat buffer (:mod:`resilient.state.layout`).

A copy is then one large send, a gradient sum one all-reduce, a fingerprint one pass. Knows nothing of ranks or plans.

The canonical buffer is that of a worker that holds the state alone. One that shares it holds intervals of it, one after
the other: what lies together there lies together here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resilient.models.layer import LayerSpec, initialize_layer
from resilient.state.layout import BufferLayout, ParameterEntry, Rates, Window
from resilient.state.witnesses import SEVERAL, joint_origin
from resilient.templates.common.byte_intervals import ByteIntervals


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
        dtype: Of parameters, gradients and slots, but of parameters that have a type of their own.
        device: Where they live.
        held: What of the canonical buffer is here: some elements of the parameters, and of each slot those that belong
            to them. None for all.

    Attributes:
        whole: All of the canonical buffer.
        held: What of it is here.
        bytes: What is held, ``[num_bytes]``; what is copied between workers.
        buffer: The elements of the job's type, with which that begins, ``[num_elements]``.
        grad: The gradients of the trainable parameters, which the buffer begins with.
        slots: The optimizer's, by name.
        parameters: By name; one that is not here whole has the rows that are, or is flat where these are not whole.
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
        self.whole = ByteIntervals.of(0, layout.num_bytes(len(slots), dtype.itemsize))
        self.held = self.whole if held is None else held
        self._itemsize = dtype.itemsize
        self._own_start = layout.numel(len(slots)) * dtype.itemsize
        self.bytes = torch.zeros(self.held.size, dtype=torch.uint8, device=device)
        self.buffer = self.bytes[: self.held.before(self._own_start)].view(dtype)
        self.grad = torch.zeros(self._here(0, layout.num_trainable).stop, dtype=dtype, device=device)
        first_slot = layout.num_trainable + layout.num_frozen
        self.slots = {
            name: self.buffer[self._here(first_slot + i * layout.num_trainable, layout.numel(i + 1))]
            for i, name in enumerate(slots)
        }
        self.parameters = {entry.name: self._parameter(entry) for entry in layout.entries}
        windows = (self._updated(window) for window in layout.windows)
        self.windows = tuple(window for window in windows if window.parameter.numel())

    @property
    def dtype(self) -> torch.dtype:
        """The job's type."""
        return self.buffer.dtype

    @property
    def segments(self) -> tuple[ByteIntervals, ...]:
        """The bytes of the trained parameters, of the frozen ones, and of those with types of their own."""
        trained, frozen = (count * self._itemsize for count in (self.layout.num_trainable, self.layout.num_frozen))
        return (
            ByteIntervals.of(0, trained),
            ByteIntervals.of(trained, trained + frozen),
            self.whole - ByteIntervals.of(0, self._own_start),
        )

    def joined(self, other: LayerState) -> LayerState:
        """Return a state with what either holds, at the same version: one of the two, where that holds it all."""
        held = self.held | other.held
        if held in (self.held, other.held):
            return self if held == self.held else other
        both = LayerState(self.spec, self.layout, tuple(self.slots), self.dtype, self.bytes.device, held)
        for each in (self, other):
            both.take(each, each.held)
        both.origin = joint_origin((self.origin, other.origin))
        return both

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
        start, end = self._place(entry)
        elements = self.window(start, end).view(entry.dtype or self.buffer.dtype)
        has_rows = self._has_rows(entry, start, end)
        parameter = nn.Parameter(entry.shaped(elements) if has_rows else elements, requires_grad=entry.trainable)
        if entry.trainable:
            gradient = self.grad[self._here(entry.offset, entry.offset + entry.numel)]
            parameter.grad = entry.shaped(gradient) if has_rows else gradient
        return parameter

    def _has_rows(self, entry: ParameterEntry, start: int, end: int) -> bool:
        """Return whether what is here of a parameter, bytes ``start .. end - 1``, is all of it or some whole rows."""
        here = self.held & ByteIntervals.of(start, end)
        row = entry.row_numel * (entry.dtype or self.buffer.dtype).itemsize
        if here.size == end - start:
            return True
        return bool(entry.shape) and all(not (bound - start) % row for bound in here.bounds)

    def _place(self, entry: ParameterEntry, slot: int | None = None) -> tuple[int, int]:
        """Return where a parameter, or what a slot has for it, starts and ends in the canonical buffer."""
        if entry.dtype is not None:
            start = self._own_start + entry.offset
            return start, start + entry.numel * entry.dtype.itemsize
        start = entry.offset + (0 if slot is None else self.layout.numel(slot))
        return start * self._itemsize, (start + entry.numel) * self._itemsize

    def window(self, start: int, end: int) -> Tensor:
        """Return what is held of the bytes ``start .. end - 1`` of the canonical buffer."""
        return self.bytes[self.held.before(start) : self.held.before(end)]

    def held_bytes(self, intervals: ByteIntervals) -> Tensor:
        """Return those of some bytes that are held, ``[num_bytes]``: a view if they lie together."""
        views = [self.bytes[start:end] for start, end in self.held.positions(intervals)]
        return views[0] if len(views) == 1 else torch.cat([self.bytes[:0], *views])

    def values(self, intervals: ByteIntervals) -> Tensor:
        """Return the elements of those of some bytes that are held, all as the job's type, ``[num_elements]``."""
        own = intervals & self.held - ByteIntervals.of(0, self._own_start)
        values = [self.held_bytes(intervals - own).view(self.buffer.dtype)]
        values += [self.window(each.start, each.end).view(each.dtype) for each in self._named(own)]
        return torch.cat([part.to(self.buffer.dtype) for part in values]) if own else values[0]

    def gradients(self, intervals: ByteIntervals) -> list[Tensor]:
        """Return views of the gradients of what is held and trained among some bytes; what lies together is one."""
        trainable = ByteIntervals.of(0, self.layout.num_trainable * self._itemsize)
        found = self.held.positions(intervals & trainable)
        return [self.grad[start // self._itemsize : end // self._itemsize] for start, end in found]

    def initialize(self, seed: int) -> None:
        """Fill in the initial values, which depend on (seed, layer name) alone, and zero the slots."""
        module = initialize_layer(self.spec, seed, self.buffer.dtype)
        self.bytes.zero_()
        for entry in self.layout.entries:
            values = entry.stored(module.get_parameter(entry.name).detach()).view(torch.uint8)
            first, last = self._place(entry)
            for start, end in self.held & ByteIntervals.of(first, last):
                self.window(start, end).copy_(values[start - first : end - first])

    def take(self, other: LayerState, wanted: ByteIntervals) -> bool:
        """Copy in what another state of the same layer holds of some bytes; return whether there was any."""
        found = wanted & other.held
        for start, end in found:
            self.window(start, end).copy_(other.window(start, end))
        return bool(found)

    def tensors(self, part: ByteIntervals | None = None) -> dict[str, Tensor]:
        """Return views of everything in some held bytes by name, slots as ``optimizer/<slot>/<parameter>``.

        Of what is not among them whole, each interval is flat, by its elements: ``weight[24:48]``, or
        ``weight@1[24:48]`` where dimension 1 is stored first.

        Args:
            part: The bytes; None for all that are held.
        """
        named = self._named(self.held if part is None else part)
        return {each.name: each.shaped(self.window(each.start, each.end).view(each.dtype)) for each in named}

    def load(self, tensors: Mapping[str, Tensor], part: ByteIntervals | None = None) -> None:
        """Copy in what is held of what :meth:`tensors` gave, of this state or of another one of the layer.

        Args:
            tensors: By name.
            part: The bytes they are; None for all of the canonical buffer.

        Raises:
            ValueError: A tensor is missing or has another shape or type.
        """
        for each in self._named(self.whole if part is None else part):
            found = tensors.get(each.name)
            expected = torch.empty(each.shape, dtype=each.dtype, device="meta")
            if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
                raise ValueError(
                    f"{each.name!r} of layer {self.spec.name!r} must be {_form(expected)}, got {_form(found)}; "
                    "the checkpoint belongs to another model, optimizer or precision"
                )
            values = each.stored(found).view(torch.uint8)
            for first, last in self.held & ByteIntervals.of(each.start, each.end):
                self.window(first, last).copy_(values[first - each.start : last - each.start])

    def _named(self, part: ByteIntervals) -> Iterator[_Named]:
        """Yield the tensors of some bytes."""
        places = [(entry.name, entry, self._place(entry)) for entry in self.layout.entries]
        for index, slot in enumerate(self.slots):
            trained = (entry for entry in self.layout.entries if entry.trainable)
            places += [(f"optimizer/{slot}/{entry.name}", entry, self._place(entry, index)) for entry in trained]
        for name, entry, (start, end) in places:
            dtype = entry.dtype or self.buffer.dtype
            found = part & ByteIntervals.of(start, end)
            if found.size == end - start:
                yield _Named(name, dtype, start, end, entry)
                continue
            order = f"@{entry.cut}" if entry.cut else ""
            for one, other in found:
                first, last = (one - start) // dtype.itemsize, (other - start) // dtype.itemsize
                yield _Named(f"{name}{order}[{first}:{last}]", dtype, one, other)


class _Named(NamedTuple):
    """A tensor of a state.

    Args:
        name: Its name.
        dtype: Its type.
        start: Its first byte in the canonical buffer.
        end: One past its last one.
        entry: Of the parameter that it is, or that a slot has it for; None for an interval of that.
    """

    name: str
    dtype: torch.dtype
    start: int
    end: int
    entry: ParameterEntry | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return ((self.end - self.start) // self.dtype.itemsize,) if self.entry is None else self.entry.shape

    def stored(self, values: Tensor) -> Tensor:
        return values.contiguous() if self.entry is None else self.entry.stored(values)

    def shaped(self, elements: Tensor) -> Tensor:
        return elements if self.entry is None else self.entry.shaped(elements)


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
