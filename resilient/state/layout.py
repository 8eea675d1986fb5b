"""Where everything of a layer's state lies in its flat buffer.

    buffer:  [ trainable parameters | frozen parameters | slot 0 | slot 1 | ... | frozen of types of their own ]
    grad:    [ trainable parameters ]                                 slots are as long as the trainable parameters

Parameters that are updated at the same rates lie together: a window, which torch's optimizer sees as one parameter.
What is kept in another type than the job's comes last, from the largest elements to the smallest: whatever part of the
buffer a worker has, one after the other, every element lies where its type may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from resilient.errors import ArgumentError
from resilient.models.layer import LayerSpec, own_types

_LARGEST_OWN_BYTES = 4
"""Of an element: those of the job's types, which come before, have as many or twice as many."""


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
    """Where a parameter lies in its layer's buffer, and how.

    Args:
        name: Its name in the layer.
        shape: As the layer has it.
        offset: Of its first element, in elements; of one with a type of its own, in bytes behind all others.
        trainable: Whether it has a gradient and slots.
        cut: The dimension that is stored first, so that a part of it is one interval.
        is_cut: Whether tensor-parallel devices each have a part of it; otherwise all have it whole.
        dtype: The type of its own; None for the job's.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool
    cut: int = 0
    is_cut: bool = False
    dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def row_numel(self) -> int:
        """Number of elements at one place of the dimension that is stored first."""
        return torch.Size((*self.shape[: self.cut], *self.shape[self.cut + 1 :])).numel()

    def stored(self, values: Tensor) -> Tensor:
        """Return all elements of such a tensor in the order in which they are stored, ``[num_elements]``."""
        return values.movedim(self.cut, 0).reshape(-1)

    def shaped(self, elements: Tensor) -> Tensor:
        """Return a view of all elements, as they are stored, or of some rows, in the parameter's shape."""
        if not self.shape:
            return elements.view(())
        num_rows = elements.numel() // self.row_numel if self.row_numel else self.shape[self.cut]
        return elements.view((num_rows, *self.shape[: self.cut], *self.shape[self.cut + 1 :])).movedim(0, self.cut)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Trainable parameters that lie together and are updated at the same rates: elements ``start .. stop - 1``."""

    rates: Rates
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """What a layer's buffer holds.

    Args:
        entries: The parameters; those that are tied to another layer's are not here.
        windows: Those that are trained.
        num_trainable: Elements that are trained.
        num_frozen: Elements of the job's type that are not.
        own_bytes: Of all that has a type of its own.
    """

    entries: tuple[ParameterEntry, ...]
    windows: tuple[Window, ...]
    num_trainable: int
    num_frozen: int
    own_bytes: int = 0

    def numel(self, num_slots: int) -> int:
        """Return how many elements of the job's type the buffer begins with."""
        return self.num_trainable * (1 + num_slots) + self.num_frozen

    def num_bytes(self, num_slots: int, itemsize: int) -> int:
        """Return the length of the buffer."""
        return self.numel(num_slots) * itemsize + self.own_bytes

    def rows(self, num_slots: int, itemsize: int) -> tuple[tuple[int, int], ...]:
        """Return :attr:`resilient.templates.inputs.profile.LayerProfile.rows` of the buffer.

        Args:
            num_slots: Of the optimizer.
            itemsize: Of the job's type.
        """
        typed = [entry for entry in self.entries if entry.dtype is None]
        slots = [entry for _ in range(num_slots) for entry in typed if entry.trainable]
        own = [entry for entry in self.entries if entry.dtype is not None]
        found: list[tuple[int, int]] = []
        for entry in (*typed, *slots, *own):
            size = itemsize if entry.dtype is None else entry.dtype.itemsize
            num_bytes, row = entry.numel * size, entry.row_numel * size * entry.is_cut
            if num_bytes and not row and found and not found[-1][1]:
                found[-1] = (found[-1][0] + num_bytes, 0)
            elif num_bytes:
                found.append((num_bytes, row))
        return tuple(found)

    @classmethod
    def of(cls, spec: LayerSpec, rates_of: RatesOf = _not_updated) -> BufferLayout:
        """Size a layer without allocating it.

        Args:
            spec: The layer.
            rates_of: The optimizer's; left out where nothing is to be updated.

        Raises:
            ValueError: The layer keeps running statistics, which are no function of the samples' order alone; or has
                a parameter of a type that cannot be kept, or none where it says how to cut one.
        """
        with torch.device("meta"):
            module = spec.build()
        for part in module.modules():
            if isinstance(part, _BatchNorm) and part.track_running_stats and part.training:
                raise ValueError(
                    f"layer {spec.name!r} must not keep running statistics, got {type(part).__name__}; "
                    "use LayerNorm or GroupNorm, or keep those it has with eval()"
                )
        named = {name: each for name, each in module.named_parameters() if name not in spec.tied}
        own = {name: dtype for name, dtype in own_types(module).items() if name in named}
        _check(spec, named, own)
        by_rates: dict[Rates, dict[str, nn.Parameter]] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                by_rates.setdefault(rates_of(f"{spec.name}.{name}", parameter.dim()), {})[name] = parameter
        entries: list[ParameterEntry] = []
        windows: list[Window] = []
        num_trainable = 0
        for rates, together in by_rates.items():
            start, num_trainable = num_trainable, _lay_out(entries, spec, together, num_trainable)
            windows.append(Window(rates=rates, start=start, stop=num_trainable))
        frozen = {name: each for name, each in named.items() if not each.requires_grad and name not in own}
        end = _lay_out(entries, spec, frozen, num_trainable)
        own_bytes = 0
        for name in sorted(own, key=lambda name: -own[name].itemsize):
            _lay_out(entries, spec, {name: named[name]}, own_bytes, own[name])
            own_bytes += named[name].numel() * own[name].itemsize
        return cls(
            entries=tuple(entries),
            windows=tuple(windows),
            num_trainable=num_trainable,
            num_frozen=end - num_trainable,
            own_bytes=own_bytes,
        )


def _check(spec: LayerSpec, named: Mapping[str, nn.Parameter], own: Mapping[str, torch.dtype]) -> None:
    for name, dtype in own.items():
        if dtype.itemsize > _LARGEST_OWN_BYTES:
            raise ArgumentError(
                f"frozen parameter {name!r} of layer {spec.name!r}",
                f"have elements of at most {_LARGEST_OWN_BYTES} bytes, or be float64",
                dtype,
                "make it a buffer, or give it a smaller type",
            )
    for part, dimension in spec.cut.items():
        alone = replace(spec, cut={part: dimension})
        if all(alone.cut_of(name, parameter.dim()) is None for name, parameter in named.items()):
            raise ArgumentError(
                f"cut of layer {spec.name!r}",
                "give parameters of its own and a dimension of each",
                {part: dimension},
                "see the names and shapes of the layer's parameters",
            )


def _lay_out(
    entries: list[ParameterEntry],
    spec: LayerSpec,
    named: Mapping[str, nn.Parameter],
    offset: int,
    dtype: torch.dtype | None = None,
) -> int:
    """Add parameters, one after the other from ``offset`` on, to the entries; return where they end."""
    for name, parameter in named.items():
        cut = spec.cut_of(name, parameter.dim())
        entry = ParameterEntry(
            name=name,
            shape=tuple(parameter.shape),
            offset=offset,
            trainable=parameter.requires_grad,
            cut=cut or 0,
            is_cut=cut is not None,
            dtype=dtype,
        )
        entries.append(entry)
        offset += entry.numel
    return offset
