"""The cost model of a multimodal model: time and memory of its layers as functions of sequence lengths.

Of lengths it has curves (:mod:`.curves`); degrees of parallelism are none: those that were not profiled are refused.

Sources: Entrain section 4.4.1, DFLOP section 3.2, DHP section 4.2; the backward of frozen parts: Cornstarch section
3.3.1, with a layer's own trainability left out of what its input needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from resilient.common.files import write_whole
from resilient.errors import ArgumentError, literal
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.templates.common.arrays import Floats
from resilient.templates.common.digests import content_digest

ENCODER, PROJECTOR = "encoder", "projector"
"""What is frozen under these names: all encoders, without their projectors; and these."""

COST_MODEL_VERSION = 3
"""Of saved cost models: another when what is in them changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class UnitLayer:
    """One layer of a unit.

    Args:
        name: Unique in the unit.
        curves: One per entry of the unit's ``degrees``.
        parameter_bytes: Of the whole layer, undivided; likewise the next two.
        optimizer_bytes: 0 where it is frozen; likewise ``gradient_bytes``.
        trainable: Whether it has gradients.
        input_gradient: Whether its input needs one: some layer strictly before it on its path is trainable.
        segments: What its state consists of, as of :class:`~resilient.templates.inputs.profile.LayerProfile`.
        rows: Likewise, for tensor-parallel devices.
        shares: Names of layers of the unit whose state it uses besides its own.
    """

    name: str
    curves: tuple[LayerCurves, ...]
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    trainable: bool = True
    input_gradient: bool = True
    segments: tuple[int, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    shares: tuple[str, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Return whether something needs one of its gradients; without any it keeps no activations."""
        return self.trainable or self.input_gradient

    def backward(self, index: int) -> Curve:
        """Return the backward's curve: only what something needs."""
        curves = self.curves[index]
        return curves.backward_weight * float(self.trainable) + curves.backward_input * float(self.input_gradient)


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """One unit.

    Args:
        name: ``vision``, ``audio``, ``llm``, ``image``.
        layers: In order.
        degrees: Profiled (tp, cp) pairs, ascending; planners use no others.
        boundary_bytes: Per token, of what travels between two of its stages.
        output_bytes: Per token of its input, of what it hands to the language model, or gets of it if it comes after.
        padded: Whether a call computes each of its sequences as long as the longest of them.
    """

    name: str
    layers: tuple[UnitLayer, ...]
    degrees: tuple[tuple[int, int], ...] = ((1, 1),)
    boundary_bytes: float = 0.0
    output_bytes: float = 0.0
    padded: bool = False

    def __post_init__(self) -> None:
        if not self.layers or any(len(layer.curves) != len(self.degrees) for layer in self.layers):
            raise ValueError(
                f"unit {self.name!r} must have layers with curves for each of its degrees {self.degrees}, got "
                f"{[len(layer.curves) for layer in self.layers]} curves; profile it again"
            )

    def index(self, tp: int, cp: int) -> int:
        """Return the position of a degree.

        Raises:
            ValueError: It was not profiled.
        """
        if (tp, cp) not in self.degrees:
            known = f"one of {self.degrees}, got {(tp, cp)}"
            raise ValueError(f"(tp, cp) of {self.name!r} must be {known}; profile it, or choose another")
        return self.degrees.index((tp, cp))

    def forward(self, tp: int = 1, cp: int = 1) -> Curve:
        """Return the forward of all layers."""
        return self._sums(tp, cp)[0]

    def backward(self, tp: int = 1, cp: int = 1) -> Curve:
        """Return the backward of all layers, as far as something needs it."""
        return self._sums(tp, cp)[1]

    def work(self, tp: int = 1, cp: int = 1) -> Curve:
        """Return forward and backward of all layers: what planners balance."""
        return self.forward(tp, cp) + self.backward(tp, cp)

    def _sums(self, tp: int, cp: int) -> tuple[Curve, Curve]:
        if (tp, cp) not in self._known_sums:
            index = self.index(tp, cp)
            forward = sum((layer.curves[index].forward for layer in self.layers), Curve())
            backward = sum((layer.backward(index) for layer in self.layers), Curve())
            self._known_sums[tp, cp] = forward, backward
        return self._known_sums[tp, cp]

    @cached_property
    def _known_sums(self) -> dict[tuple[int, int], tuple[Curve, Curve]]:
        """Asked for in every step."""
        return {}

    def layer_ms(self, tokens: float, squares: float, tp: int = 1, cp: int = 1) -> tuple[Floats, Floats]:
        """Return each layer's forward and backward time of one call. [num_layers] each"""
        attention, linear, fixed = self.coefficients(tp, cp) * float(tokens > 0)
        forward, backward = attention * squares + linear * tokens + fixed
        return forward, backward

    def coefficients(self, tp: int = 1, cp: int = 1) -> Floats:
        """Return those of the curves of each layer, in the curves' order: forward, backward. [3, 2, num_layers]"""
        if (tp, cp) not in self._known_layers:
            index = self.index(tp, cp)
            curves = [(layer.curves[index].forward, layer.backward(index)) for layer in self.layers]
            self._known_layers[tp, cp] = np.array([[astuple(curve) for curve in pair] for pair in curves]).T
        return self._known_layers[tp, cp]

    @cached_property
    def _known_layers(self) -> dict[tuple[int, int], Floats]:
        """Asked for by every candidate of a search."""
        return {}

    @cached_property
    def gradient_bytes(self) -> Floats:
        """What each layer's gradients take, undivided. [num_layers]"""
        return np.array([layer.gradient_bytes for layer in self.layers], np.float64)

    @property
    def state_bytes(self) -> int:
        """Parameters, optimizer slots and gradients of all layers, undivided."""
        return sum(layer.parameter_bytes + layer.optimizer_bytes + layer.gradient_bytes for layer in self.layers)

    def activation_bytes(self, tp: int = 1, cp: int = 1) -> float:
        """Return what the forward of all layers keeps, per token, on each device."""
        index = self.index(tp, cp)
        return sum(layer.curves[index].activation_bytes for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """All units of a model: encoders, the language model ``llm``, and a generator where there is one.

    Args:
        units: In order of execution.
        source: Where the numbers come from, for people.
    """

    units: tuple[UnitCosts, ...]
    source: str = ""

    @cached_property
    def by_name(self) -> Mapping[str, UnitCosts]:
        """The units by name."""
        return {unit.name: unit for unit in self.units}

    def at_degrees(self, degrees: Collection[int]) -> CostModel:
        """Return the model for planners that are to use these tensor-parallel degrees alone, as far as they are known.

        Raises:
            ValueError: A unit was profiled at none of them.
        """
        units: list[UnitCosts] = []
        for unit in self.units:
            kept = [place for place, (tp, _) in enumerate(unit.degrees) if tp in degrees]
            if not kept:
                wanted = f"be among {[tp for tp, _ in unit.degrees]}"
                raise ArgumentError(f"degrees of {unit.name!r}", wanted, sorted(degrees), "profile others")
            layers = tuple(replace(layer, curves=tuple(layer.curves[at] for at in kept)) for layer in unit.layers)
            units.append(replace(unit, layers=layers, degrees=tuple(unit.degrees[at] for at in kept)))
        return replace(self, units=tuple(units))

    def frozen(self, names: Collection[str]) -> CostModel:
        """Return the model with some parts frozen.

        An encoder's layer needs a gradient of its input when a layer strictly before it in the encoder is trainable;
        one of the language model also when anything in any encoder is, one of a generator when anything before it is.

        Args:
            names: Units (``vision``: all its layers but its projector), ``encoder`` for all units before the language
                model, ``projector`` for the projectors of all, or single layers (``vision.projector``).

        Raises:
            ValueError: A name is none of these.
        """
        language = next((i for i, unit in enumerate(self.units) if unit.name == "llm"), len(self.units) - 1)
        layers_named = {f"{unit.name}.{layer.name}" for unit in self.units for layer in unit.layers}
        several = {
            ENCODER: {unit.name for unit in self.units[:language]},
            PROJECTOR: {name for name in layers_named if name.endswith(f".{PROJECTOR}")},
        }
        units_named = [unit.name for unit in self.units] + [name for name in several if several[name]]
        unknown = set(names) - layers_named - set(units_named)
        if unknown:
            one = f"{self.units[0].name}.{self.units[0].layers[0].name}"
            raise ArgumentError(
                "frozen",
                literal(f"name units ({', '.join(units_named)}) or layers (such as {one})"),
                ", ".join(map(repr, sorted(unknown))),
                "see their spelling",
            )
        names = set(names).union(*(several.get(name, ()) for name in names))
        units: list[UnitCosts] = []
        encoder_trains = False
        for position, unit in enumerate(self.units):
            trained_before = encoder_trains if position >= language else False
            layers: list[UnitLayer] = []
            for layer in unit.layers:
                of_unit = unit.name in names and layer.name != PROJECTOR
                trainable = layer.trainable and not (of_unit or f"{unit.name}.{layer.name}" in names)
                if not trainable:
                    layer = replace(layer, trainable=False, optimizer_bytes=0, gradient_bytes=0, segments=(), rows=())
                layers.append(replace(layer, input_gradient=trained_before))
                trained_before = trained_before or trainable
            encoder_trains = encoder_trains or trained_before
            units.append(replace(unit, layers=tuple(layers)))
        return replace(self, units=tuple(units))

    @property
    def digest(self) -> str:
        """Content hash: of the numbers, wherever they come from."""
        return content_digest(self.units)

    def to_json(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode({"version": COST_MODEL_VERSION, "costs": self})

    @classmethod
    def from_json(cls, data: bytes) -> CostModel:
        """Decode what :meth:`to_json` wrote.

        Raises:
            ValueError: It is something else, of another version, or damaged; the message names what does not fit.
        """
        try:
            version = msgspec.json.decode(data, type=_Version).version
            if version == COST_MODEL_VERSION:
                return msgspec.json.decode(data, type=_Kept).costs
        except ValueError as error:
            raise ValueError(
                f"a cost model must be what was written as one, got other data ({error}); derive or profile it again"
            ) from error
        raise ValueError(
            f"a cost model must be of version {COST_MODEL_VERSION}, got {version}; derive or profile it again"
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: As :meth:`from_json`, with the file's name.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


class _Version(msgspec.Struct):
    version: int


class _Kept(msgspec.Struct):
    costs: CostModel
