"""What the planner knows of a model: per layer, how long it computes and how many bytes it holds.

Owns the cost description only; where layers go is decided in :mod:`resilient.templates.partition`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Cost of one layer for one microbatch.

    Args:
        name: Stable name, unique in the model (``vision.block.3``).
        forward_ms: Forward time of one microbatch.
        backward_ms: Backward time of one microbatch (0 where nothing is differentiated).
        state_bytes: Bytes of the layer's own state: parameters and optimizer slots. This is what a state copy moves.
        shares: Names of layers whose state this layer uses besides its own (tied parameters). A tied parameter
            belongs to exactly one layer, its owner; every user of it is a holder of the owner's state.
    """

    name: str
    forward_ms: float
    backward_ms: float
    state_bytes: int
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.forward_ms < 0 or self.backward_ms < 0 or self.state_bytes < 0:
            raise ValueError(f"costs of layer {self.name!r} must be >= 0, got {self}; profile the layer again")


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The layers of a model in execution order."""

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise ValueError("layers must hold at least one layer, got none; describe the model's layers")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"layer names must be unique, got {twice} more than once; rename them")
        for layer in self.layers:
            for owner in layer.shares:
                if owner not in names:
                    raise ValueError(f"layer {layer.name!r} shares the state of {owner!r}, which is no layer")

    def index(self, name: str) -> int:
        """Return the position of the layer called ``name``."""
        return next(i for i, layer in enumerate(self.layers) if layer.name == name)

    def states(self, first_layer: int, end_layer: int) -> tuple[str, ...]:
        """Return the names of the states that layers ``first_layer .. end_layer - 1`` use, in owner order."""
        used: set[str] = set()
        for layer in self.layers[first_layer:end_layer]:
            used.update((layer.name, *layer.shares))
        return tuple(layer.name for layer in self.layers if layer.name in used)

    @property
    def digest(self) -> str:
        """Content hash; equal on two machines exactly when the profiles are equal."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ModelProfile:
        """Decode what :meth:`to_json` wrote; ``msgspec.ValidationError`` names the field that does not fit."""
        return msgspec.json.decode(data, type=cls)
