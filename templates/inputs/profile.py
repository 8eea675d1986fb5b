"""What the planner knows of a model: per layer, how long it computes and how many bytes it holds.

Owns the cost description only; where layers go is decided in :mod:`resilient.templates.search.partition`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import inf
from operator import or_

import msgspec

from resilient.errors import ArgumentError, literal
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, merged
from resilient.templates.common.digests import content_digest
from resilient.templates.inputs.cluster import MOST_BYTES

_LARGEST_ELEMENT_BYTES = 8
"""Parts of a state begin at multiples of it: between elements, whatever their type."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Cost of one layer for one microbatch, on each of the devices that share it at one tensor-parallel degree.

    Args:
        forward_ms: Forward time, with the tensor-parallel communication.
        backward_input_ms: Backward time for the gradient of the layer's input.
        backward_weight_ms: Backward time for the gradient of the layer's parameters.
        activation_bytes: What the forward keeps for the backward, on each device: with what it keeps of what entered,
            without what is handed on.
        entered_bytes: Of what enters and wants a gradient, what it does not keep: a stage that begins with the layer
            holds it all the same. What is not known is 0.
        given_bytes: Of what is handed on, what it keeps: a stage holds that behind the layer, too, where the next one
            does not keep it. What is not known is 0.
        workspace_bytes: The most that a forward or a backward uses at a time beside that; what is not known is 0.
        ending_workspace_bytes: The same where a stage ends with the layer: beside what it hands on, and the gradient of
            that. What is not known of it and of the next ones is 0: what follows from the others counts then.
        split_workspace_bytes: As ``workspace_bytes``, with the gradients that wait at its parameters, where a schedule
            runs the two parts of a backward apart.
        again_bytes: The most that it uses at a time where it keeps no more than what entered, and runs again in its
            backward.
        ending_again_bytes: The same where a stage ends with the layer, as for ``ending_workspace_bytes``.
        deferred_bytes: Gradients that wait where parameters are used, from a backward for the input until the one for
            the parameters, where a schedule runs them apart; what is not known is 0.
        arriving_bytes: Of these, what comes from the layer behind; what is not known is 0.
        returned_bytes: Of these, what goes on to the layer before: where it waits there, too, a stage with both has it
            once. What is not known is 0.
        viewed_bytes: Of the gradients of parameters that it uses, what it finds as views of other tensors. Of a tied
            state the sum with the next layer's takes more memory then; else it takes the place of the first. What is
            not known is 0.
    """

    forward_ms: float
    backward_input_ms: float = 0.0
    backward_weight_ms: float = 0.0
    activation_bytes: int = 0
    entered_bytes: int = 0
    given_bytes: int = 0
    workspace_bytes: int = 0
    ending_workspace_bytes: int = 0
    split_workspace_bytes: int = 0
    again_bytes: int = 0
    ending_again_bytes: int = 0
    deferred_bytes: int = 0
    arriving_bytes: int = 0
    returned_bytes: int = 0
    viewed_bytes: int = 0

    def __post_init__(self) -> None:
        if not (  # made by the hundred whenever a node joins
            0 <= self.forward_ms < inf
            and 0 <= self.backward_input_ms < inf
            and 0 <= self.backward_weight_ms < inf
            and self.activation_bytes >= 0
            and self.entered_bytes >= 0
            and self.given_bytes >= 0
            and self.workspace_bytes >= 0
            and self.ending_workspace_bytes >= 0
            and self.split_workspace_bytes >= 0
            and self.again_bytes >= 0
            and self.ending_again_bytes >= 0
            and self.deferred_bytes >= 0
            and self.arriving_bytes >= 0
            and self.returned_bytes >= 0
            and self.viewed_bytes >= 0
        ):
            raise ValueError(f"costs of a layer must be >= 0 and finite, got {self}; profile the layer again")

    def deferred_with(self, before: LayerCost) -> int:
        """Return how many of the deferred bytes are the same gradients as those of the layer before."""
        return min(self.returned_bytes, before.arriving_bytes)


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer.

    Args:
        name: Stable name, unique in the model (``vision.block.3``).
        costs: One per tensor-parallel degree of the model's profile, in the same order.
        parameter_bytes: Bytes of the layer's own parameters.
        optimizer_bytes: Bytes of its optimizer slots; 0 where it is frozen.
        gradient_bytes: Bytes of its gradients: kept beside the state, and summed over the holders in every step; 0
            where it is frozen.
        input_bytes: Bytes of what enters the layer for one microbatch: what two stages that are cut before it send each
            other (forward, and again backward), and what activation checkpointing keeps.
        read_bytes: Bytes of what a device loads of a microbatch for the layer, or for the loss behind it, and keeps no
            longer than it runs; what is not known is 0.
        loaded_bytes: The same with what it keeps: all of that stays where the layer is to run again.
        keeps_nothing: Whether its backward needs nothing of its forward, not even parameters: it has not to run again
            where others do, nor is its input kept for that.
        segments: Bytes of what its state consists of, one after the other: what is trained, what is frozen, each
            optimizer slot, what has a type of its own. Devices that divide the state each have an equal part of every
            one: of a parameter and of its slots the same. Empty where that is not known: one segment.
        rows: Of what lies one after the other in its state: bytes, and those of a row where tensor-parallel devices
            have some rows each; 0 where all have it whole. Empty where that is not known: they have parts as of
            ``segments``.
        trainable: Whether its parameters have gradients.
        input_gradient: Whether its input needs a gradient: some layer strictly before it on its path is trainable.
        shares: Names of layers whose state this layer uses besides its own (tied parameters). A tied parameter
            belongs to exactly one layer, its owner; every user of it is a holder of the owner's state.
    """

    name: str
    costs: tuple[LayerCost, ...]
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    input_bytes: int = 0
    read_bytes: int = 0
    loaded_bytes: int = 0
    keeps_nothing: bool = False
    segments: tuple[int, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    trainable: bool = True
    input_gradient: bool = True
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        states = self.parameter_bytes, self.optimizer_bytes, self.gradient_bytes
        if min(*states, self.input_bytes, self.read_bytes, self.loaded_bytes) < 0:
            raise ValueError(f"bytes of layer {self.name!r} must be >= 0, got {self}; profile the layer again")
        if self.segments and (min(self.segments) < 0 or sum(self.segments) != self.state_bytes):
            raise ValueError(
                f"segments of layer {self.name!r} must add up to its {self.state_bytes} bytes, got {self.segments}; "
                "profile the layer again"
            )
        if self.rows and not self._are_rows():  # most have none, and layers are made by the hundred
            raise ValueError(
                f"rows of layer {self.name!r} must add up to its {self.state_bytes} bytes, got {self.rows}; "
                "profile the layer again"
            )

    def _are_rows(self) -> bool:
        is_whole = sum(num_bytes for num_bytes, _ in self.rows) == self.state_bytes
        return is_whole and all(0 <= row <= size and size % (row or 1) == 0 for size, row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Parameters and optimizer slots: what a state copy moves."""
        return self.parameter_bytes + self.optimizer_bytes

    @cached_property
    def whole(self) -> ByteIntervals:
        """All of the state."""
        return ByteIntervals.of(0, self.state_bytes)

    def share(self, index: int, degree: int) -> ByteIntervals:
        """Return what one of several devices has of the state: an equal part of each segment, between elements."""
        bounds = list(accumulate(self.segments or (self.state_bytes,), initial=0))
        parts = (_equal_part(start, end, index, degree) for start, end in pairwise(bounds))
        return reduce(or_, parts, NO_BYTES)

    def part(self, index: int, degree: int) -> ByteIntervals:
        """Return what one of several tensor-parallel devices has of the state."""
        if not self.rows:
            return self.share(index, degree)
        ends = accumulate(num_bytes for num_bytes, _ in self.rows)
        return merged(
            (end - size + first, end - size + last)
            for (size, row), end in zip(self.rows, ends, strict=True)
            for first, last in [_rows_of(size, row, index, degree)]
        )

    def device_bytes(self, degree: int) -> int:
        """Return what of state and gradients the tensor-parallel device with the most of them has."""
        if not self.rows:
            return -(-(self.state_bytes + self.gradient_bytes) // degree)
        part = self.part(degree - 1, degree)  # of what is divided unevenly the last one has the most
        return part.size + part.before(self.gradient_bytes)

    def backward_ms(self, degree_index: int = 0) -> float:
        """Return the backward time: only of the gradients that something needs."""
        cost = self.costs[degree_index]
        return self.trainable * cost.backward_weight_ms + self.input_gradient * cost.backward_input_ms


def _rows_of(size: int, row: int, index: int, degree: int) -> tuple[int, int]:
    if not row:
        return 0, size
    num_rows = size // row
    return num_rows * index // degree * row, num_rows * (index + 1) // degree * row


def _equal_part(start: int, end: int, index: int, degree: int) -> ByteIntervals:
    num_elements = -(-(end - start) // _LARGEST_ELEMENT_BYTES)
    first, last = (start + number * num_elements // degree * _LARGEST_ELEMENT_BYTES for number in (index, index + 1))
    return ByteIntervals.of(min(first, end), min(last, end))


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The layers of a model in execution order.

    Args:
        layers: The layers.
        tp_degrees: Tensor-parallel degrees that were profiled, ascending; planners use no others.
        source: Where the numbers come from, for people: the device and how they were found.
        microbatch: Samples of the microbatch that the costs are of; None where that is not known.
        undivided: Why there are no more degrees, in words; "" where that is not known.
    """

    layers: tuple[LayerProfile, ...]
    tp_degrees: tuple[int, ...] = (1,)
    source: str = ""
    microbatch: int | None = None
    undivided: str = ""

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise ArgumentError("layers", "hold at least one layer", "none", "describe the model's layers")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"layer names must be unique, got {twice} more than once; rename them")
        if not self.tp_degrees or list(self.tp_degrees) != sorted({*self.tp_degrees} - {0}) or self.tp_degrees[0] < 1:
            raise ArgumentError("tp_degrees", "be positive and ascending", self.tp_degrees, "(1,) means none")
        num_bytes = 0
        for layer in self.layers:
            if len(layer.costs) != len(self.tp_degrees):
                raise ValueError(
                    f"costs of layer {layer.name!r} must be one for each of tp_degrees {self.tp_degrees}, "
                    f"got {len(layer.costs)}; profile the layer again"
                )
            num_bytes += layer.state_bytes + layer.gradient_bytes + layer.input_bytes + layer.loaded_bytes
            num_bytes += max(
                cost.activation_bytes
                + cost.entered_bytes
                + cost.given_bytes
                + max(cost.workspace_bytes, cost.ending_workspace_bytes, cost.split_workspace_bytes)
                + max(cost.again_bytes, cost.ending_again_bytes)
                + cost.deferred_bytes
                for cost in layer.costs
            )
            for owner in layer.shares:
                if owner not in names:
                    raise ValueError(
                        f"shares of layer {layer.name!r} must name layers, got {owner!r}; see their spelling"
                    )

        if num_bytes > MOST_BYTES:
            raise ValueError(
                f"states, gradients, inputs, activations and workspace of all layers must be at most {MOST_BYTES} "
                f"bytes in all, got {num_bytes}; lower the microbatch, or profile the layers again"
            )

    def index(self, name: str) -> int:
        """Return the position of the layer called ``name``."""
        return next(i for i, layer in enumerate(self.layers) if layer.name == name)

    def states(self, first_layer: int, end_layer: int) -> tuple[str, ...]:
        """Return the names of the states that layers ``first_layer .. end_layer - 1`` use, in owner order."""
        used: set[str] = set()
        for layer in self.layers[first_layer:end_layer]:
            used.update((layer.name, *layer.shares))
        return tuple(layer.name for layer in self.layers if layer.name in used)

    def at_degree(self, degree: int) -> ModelProfile:
        """Return the profile of stages that all have this tensor-parallel degree.

        Raises:
            ArgumentError: The model cannot be run at it.
        """
        if degree not in self.tp_degrees:
            known = ", ".join(map(str, self.tp_degrees))
            why = literal(f": {self.undivided}") if self.undivided else ""
            raise ArgumentError("tp", f"be one of the model's degrees ({known}{why})", degree, "choose one of them")
        index = self.tp_degrees.index(degree)
        layers = tuple(replace(layer, costs=layer.costs[index : index + 1]) for layer in self.layers)
        return replace(self, layers=layers, tp_degrees=(degree,))

    def frozen(self, names: Collection[str]) -> ModelProfile:
        """Return the profile with these layers frozen, for a model whose layers are one path.

        A frozen layer has no gradients and no optimizer slots beside its parameters; its input needs a gradient when
        a layer strictly before it is trainable. Where it does not, the layer has no backward and keeps no
        activations.

        Raises:
            ValueError: A name is no layer.
        """
        unknown = sorted(set(names) - {layer.name for layer in self.layers})
        if unknown:
            raise ArgumentError("names", "be layers of the model", unknown, "see ModelProfile.layers")
        layers: list[LayerProfile] = []
        trained_before = False
        for layer in self.layers:
            trainable = layer.trainable and layer.name not in names
            if not trainable:
                layer = replace(layer, trainable=False, optimizer_bytes=0, gradient_bytes=0, segments=(), rows=())
                none_wait = {"deferred_bytes": 0, "arriving_bytes": 0, "returned_bytes": 0}
                layer = replace(layer, costs=tuple(replace(cost, **none_wait) for cost in layer.costs))
            if not trainable and not trained_before:
                nothing = {"activation_bytes": 0, "entered_bytes": 0, "given_bytes": 0}
                layer = replace(layer, costs=tuple(replace(cost, **nothing) for cost in layer.costs))
            layers.append(replace(layer, input_gradient=trained_before))
            trained_before = trained_before or trainable
        return replace(self, layers=tuple(layers))

    def __hash__(self) -> int:
        # Plans are looked up by their problem several times in a decision, which takes no longer for many layers so.
        return hash((len(self.layers), self.layers[0].name, self.layers[-1].name, self.tp_degrees))

    @property
    def digest(self) -> str:
        """Content hash; equal on two machines exactly when the profiles are equal."""
        return content_digest(self)

    def to_json(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ModelProfile:
        """Decode what :meth:`to_json` wrote; ``msgspec.ValidationError`` names the field that does not fit."""
        return msgspec.json.decode(data, type=cls)
