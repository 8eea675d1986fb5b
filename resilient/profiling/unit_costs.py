"""Measures what the layers of each unit of a model cost by the lengths of the samples that are packed together.

Owns the measurement and what is made of it: curves for planners, and one microbatch's costs for templates. A unit is
given what it is given in a planned step: cells of its own, and the features of these samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch

from resilient.errors import ArgumentError, note
from resilient.models.buffers import ConstantBuffers
from resilient.models.layer import Activations, Batch, LayerSpec
from resilient.models.packing import Packable
from resilient.pipeline.p2p import signature
from resilient.planners.costs.cell_profile import cell_layers
from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.profiling import exchange_times
from resilient.profiling.degree_passes import DegreePasses, DeviceCosts, tensor_degrees
from resilient.profiling.layer_passes import (
    LayerPass,
    PassTimes,
    Timed,
    device_clock,
    layout_bytes,
    layout_rows,
    layout_segments,
    materialise,
    take_times,
)
from resilient.profiling.unit_cells import CellReader, DrawnSamples
from resilient.runtime.job import Job
from resilient.runtime.steps.unit_graph import handed_over
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.profile import ModelProfile

UNIT_COSTS_VERSION = 10
"""Of what is measured, and how; costs of another version are measured again."""

_LEAST_MS = 1e-6
"""Measured times are at least this long: errors are relative to them."""


_Places = tuple[int, ...]
"""A cell: the positions of its samples among those that were drawn."""


@dataclass(kw_only=True)
class _Packed:
    """A cell on its way through the layers of a unit.

    Args:
        batch: What the unit reads of it.
        tokens: Sum of its lengths in this unit.
        squares: Sum of their squares.
        activations: What enters the next layer.
    """

    batch: Batch
    tokens: int
    squares: int
    activations: Activations = field(default_factory=dict)

    def bytes_per_token(self) -> float:
        """Return how large the activations are."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.activations.values()) / self.tokens


def measure_units(
    job: Job,
    drawn: DrawnSamples,
    *,
    on_layer: Callable[[str], None],
    timed: Timed | None = None,
    link: Link | None = None,
) -> CostModel:
    """Measure all layers of a job's model by unit, on cells of several sizes, and fit curves to their times.

    A time is the median over some rounds. Equal layers of a unit are measured once, and no two layers are there at the
    same time. Of several tensor-parallel devices one's part is measured, and what it receives of the others takes as
    long as a link says.

    Args:
        job: The job, whose model packs its data set's samples; its device is free but for this.
        drawn: Samples of :func:`resilient.profiling.unit_cells.draw_lengths`.
        on_layer: Called with the name of each layer that is done.
        timed: The clock; the device's own by default.
        link: Between two devices of a node; by default what is measured, where there is a degree beyond 1.

    Returns:
        The units without context parallelism, at the tensor-parallel degrees that the model can be run at. Bytes per
        token are those of the largest cell.

    Raises:
        ArgumentError: No sample is for one of the units, or a layer changes its buffers.
        SampleError: A sample cannot be trained on.
    """
    assert isinstance(job.model, Packable)
    units = job.model.units
    own = {unit: drawn.cells(unit, job.microbatch) for unit in units}
    needed = _needed(units, own)
    measuring = _Measuring(job, timed or device_clock(job.device), link, on_layer)
    reader = CellReader(job, drawn)
    made: dict[tuple[str, _Places], Activations] = {}
    costs: list[UnitCosts] = []
    cuda = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # dropout draws here; the script's own draws stay what they were
        for unit, read in units.items():
            lengths = drawn.table.units[unit]
            cells: list[_Packed] = []
            for places in needed[unit]:
                tokens, squares = (int(each[list(places)].sum()) for each in (lengths.tokens, lengths.squares))
                packed = _Packed(batch=reader.batch(unit, places), tokens=tokens, squares=squares)
                for name in read:
                    packed.activations |= made[name, places]
                cells.append(packed)
            wanted = any(map(measuring.trains, read))
            costs.append(measuring.unit(unit, cells, len(own[unit]), wanted=wanted, is_drawing=LLM in read))
            made |= {(unit, places): packed.activations for places, packed in zip(needed[unit], cells, strict=True)}
    if cuda:
        torch.cuda.empty_cache()
    return CostModel(units=tuple(costs), source=f"measured on {job.device_name}, {job.precision}")


def _needed(units: Mapping[str, tuple[str, ...]], own: Mapping[str, Sequence[_Places]]) -> dict[str, list[_Places]]:
    """Return the cells that go through each unit: its own, and then those of units that read it."""
    found: dict[str, list[_Places]] = {}
    for unit in reversed(list(units)):
        further = (places for reader, read in units.items() if unit in read for places in found[reader])
        found[unit] = list(dict.fromkeys((*own[unit], *further)))
    return found


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What was measured of equal layers of a unit: the costs, and what they make of each cell."""

    layer: UnitLayer
    sent: list[Activations]


class _Measuring:
    """Measures one unit after the other.

    Args:
        job: The job.
        timed: The clock.
        link: Between two devices; None for what is measured.
        on_layer: Called with the name of each layer that is done.
    """

    def __init__(self, job: Job, timed: Timed, link: Link | None, on_layer: Callable[[str], None]) -> None:
        self._job = job
        self._layouts = job.layouts()
        self._degrees, _ = tensor_degrees(job.model, self._layouts)
        if link is None and len(self._degrees) > 1:
            link = exchange_times.measured_link(job.device)
        self._link = link or Link()
        self._timed = timed
        self._on_layer = on_layer
        self._trained: set[str] = set()

    def trains(self, unit: str) -> bool:
        """Return whether gradients go back into a unit that was measured."""
        return unit in self._trained

    def unit(self, name: str, cells: Sequence[_Packed], num_own: int, *, wanted: bool, is_drawing: bool) -> UnitCosts:
        """Measure a unit.

        Args:
            name: Its name.
            cells: That go through it, with what it reads of other units; they end up at its end.
            num_own: Those that are measured, the first ones; units that read this one need the others.
            wanted: Whether something before it wants a gradient.
            is_drawing: Whether it comes after the language model.
        """
        kinds: dict[Hashable, _Kind] = {}
        layers: list[UnitLayer] = []
        boundary_bytes = 0.0
        largest = max(cells[:num_own], key=lambda cell: cell.tokens)
        received_bytes = largest.bytes_per_token()
        own = cells[:num_own]
        batches, entering = [cell.batch for cell in own], [cell.activations for cell in own]
        divided = [
            DegreePasses(self._job, self._layouts, batches, degree, self._timed, self._link, entering)
            for degree in self._degrees
            if degree > 1
        ]
        for spec in self._job.model.layers:
            if spec.unit != name:
                continue
            if layers:
                boundary_bytes = max(boundary_bytes, largest.bytes_per_token())
            kind = self._kind(spec, cells, wanted=wanted)
            if kind not in kinds:
                kinds[kind] = self._noted(spec, cells, num_own, wanted=wanted)
            found = kinds[kind]
            for cell, sent in zip(cells, found.sent, strict=True):
                cell.activations = sent
            index = self._job.model.layers.index(spec)
            shared = [_curves(own, each.advance(index, kind)) for each in divided]
            layer_name = spec.name.removeprefix(f"{name}.")
            shares = tuple(owner.removeprefix(f"{name}.") for owner in _owners(spec))
            curves = (*found.layer.curves, *shared)
            layers.append(replace(found.layer, name=layer_name, curves=curves, shares=shares))
            wanted = wanted or found.layer.trainable
            self._on_layer(spec.name)
        if wanted:
            self._trained.add(name)
        return UnitCosts(
            name=name,
            layers=tuple(layers),
            degrees=tuple((degree, 1) for degree in self._degrees),
            boundary_bytes=boundary_bytes,
            output_bytes=received_bytes if is_drawing else 0.0 if name == LLM else largest.bytes_per_token(),
        )

    def _kind(self, spec: LayerSpec, cells: Sequence[_Packed], *, wanted: bool) -> Hashable:
        """Return what is equal of layers that cost the same."""
        with torch.device("meta"):
            built = spec.build()
        received = tuple(signature(cell.activations) for cell in cells)
        is_last = spec is self._job.model.layers[-1]
        tied, loss = tuple(sorted(spec.tied.items())), (is_last, spec.for_loss)
        return repr(built), self._layouts[spec.name], tied, loss, wanted, received

    def _noted(self, spec: LayerSpec, cells: Sequence[_Packed], num_own: int, *, wanted: bool) -> _Kind:
        try:
            return self._measured(spec, cells, num_own, wanted=wanted)
        except ArgumentError:  # says all there is to say
            raise
        except Exception as error:  # the job's own code: it keeps its type
            note(error, f"while measuring layer {spec.name!r}")
            raise

    def _measured(self, spec: LayerSpec, cells: Sequence[_Packed], num_own: int, *, wanted: bool) -> _Kind:
        job, layout = self._job, self._layouts[spec.name]
        module = materialise(job, spec, self._layouts)
        buffers = ConstantBuffers(spec.name, module)
        trainable = any(parameter.requires_grad for parameter in module.parameters())
        index = job.model.layers.index(spec)
        passes = [LayerPass(job, index, module, each.batch, each.activations) for each in cells]
        own = passes[:num_own]
        seen = [one.inspect() for one in own]
        times = [PassTimes() for _ in own]
        take_times(own, seen, times, self._timed, trainable=trainable)
        buffers.check()
        parameter_bytes, optimizer_bytes, gradient_bytes = layout_bytes(job, layout)
        workspaces = [one.workspace(each) for one, each in zip(own, seen, strict=True)]
        costs = DeviceCosts(seen=seen, workspaces=workspaces, times=times)
        layer = UnitLayer(
            name=spec.name,
            curves=(_curves(cells[:num_own], costs),),
            parameter_bytes=parameter_bytes,
            optimizer_bytes=optimizer_bytes,
            gradient_bytes=gradient_bytes,
            trainable=trainable,
            input_gradient=wanted,
            segments=layout_segments(job, layout),
            rows=layout_rows(job, layout),
        )
        return _Kind(layer=layer, sent=[one.sent() for one in passes])


def _owners(spec: LayerSpec) -> tuple[str, ...]:
    """Return the layers whose parameters a layer uses."""
    return tuple(dict.fromkeys(owner for owner, _ in spec.tied.values()))


def _curves(cells: Sequence[_Packed], costs: DeviceCosts) -> LayerCurves:
    times, workspaces = costs.times, costs.workspaces
    largest = max(range(len(cells)), key=lambda number: cells[number].tokens)
    seen, of_largest = costs.seen[largest], cells[largest].tokens
    tokens, squares = ([getattr(cell, name) for cell in cells] for name in ("tokens", "squares"))

    def fit(times_ms: Sequence[float], relative_to: Sequence[float]) -> Curve:
        if not any(times_ms):  # there is nothing to compute
            return Curve()
        scale = np.maximum(relative_to, _LEAST_MS)
        return Curve.fit(tokens, times_ms, squares=squares, relative_to=scale)

    among = [each.among for each in workspaces]
    forward_ms = [median(each.forward_ms) for each in times]
    backward_ms = [median(each.backward_ms) for each in times]
    # what is measured is the time of both and of one; the other is the rest
    input_ms = [min(median(each.backward_input_ms), both) for each, both in zip(times, backward_ms, strict=True)]
    weight_ms = [both - one for both, one in zip(backward_ms, input_ms, strict=True)]
    return LayerCurves(
        forward=fit(forward_ms, forward_ms),
        backward_input=fit(input_ms, backward_ms),
        backward_weight=fit(weight_ms, backward_ms),
        activation_bytes=seen.activation_bytes / of_largest,
        entered_bytes=seen.entered_bytes / of_largest,
        given_bytes=seen.given_bytes / of_largest,
        deferred_bytes=seen.deferred_bytes / of_largest,
        loaded_bytes=seen.loaded_bytes / of_largest,
        workspace_bytes=fit(among, among),
        ending_workspace_bytes=fit([each.ending for each in workspaces], among),
        split_workspace_bytes=fit([each.split for each in workspaces], among),
        again_bytes=fit([each.again for each in workspaces], among),
        ending_again_bytes=fit([each.ending_again for each in workspaces], among),
    )


def mean_profile(job: Job, costs: CostModel, samples: SampleTable) -> ModelProfile:
    """Return what a job's layers cost for the mean cell of their unit, in which a microbatch of mean samples is.

    Args:
        job: The job.
        costs: Of its model's units.
        samples: Of its data set.
    """
    model = job.model
    assert isinstance(model, Packable)
    means = {
        unit: tuple(job.microbatch * float(each.mean()) for each in (lengths.tokens, lengths.squares))
        for unit, lengths in samples.units.items()
    }
    layers_of = {
        unit.name: iter(cell_layers(unit, *means[unit.name], received_bytes=sum(handed)))
        for unit in costs.units
        for sources in [[handed_over(each, unit.name) for each in model.units[unit.name]]]
        for handed in [[costs.by_name[each].output_bytes * means[each][0] for each in sources]]
    }
    layers = [replace(next(layers_of[spec.unit]), name=spec.name, shares=_owners(spec)) for spec in model.layers]
    degrees, undivided = tensor_degrees(model, job.layouts())
    return ModelProfile(
        layers=tuple(layers), tp_degrees=degrees, source=costs.source, microbatch=job.microbatch, undivided=undivided
    )
