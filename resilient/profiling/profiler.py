"""Measures what each layer of a job costs on this device: times, activations, and what crosses its border.

Owns the measurement of one chain of layers. They are made one at a time, so that a model is measured that fits no
single device; what is remembered of it is :mod:`resilient.profiling.cache`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from resilient.errors import ArgumentError, note
from resilient.models.buffers import ConstantBuffers
from resilient.models.layer import Activations, Batch, LayerSpec
from resilient.pipeline.p2p import Signature, signature
from resilient.profiling import exchange_times
from resilient.profiling.additivity import AdditivityCheck
from resilient.profiling.degree_passes import DegreePasses, DeviceCosts, tensor_degrees
from resilient.profiling.layer_passes import (
    LayerPass,
    PassSeen,
    PassTimes,
    Timed,
    Workspace,
    device_clock,
    layout_bytes,
    layout_rows,
    layout_segments,
    materialise,
    take_times,
)
from resilient.runtime.batches import Batches, Read
from resilient.runtime.job import Job
from resilient.runtime.preflight import first_samples
from resilient.state.layout import BufferLayout
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile

logger = logging.getLogger(__name__)

PROFILER_VERSION = 17
"""Of what is measured and verified, and how; profiles of another version are measured again."""


@dataclass(kw_only=True)
class ProfiledBatch:
    """Microbatches of equal shapes: one of them, standing for all, on its way through the layers.

    Args:
        batch: The microbatch.
        shapes: Its shapes.
        samples: What it was collated from, and then what was read of the other microbatches of these shapes.
        count: Microbatches of these shapes among those looked at.
        activations: What enters the next layer; tensors require a gradient where they do in training.
    """

    batch: Batch
    shapes: Signature
    samples: list[Read] = field(default_factory=list)
    count: int = 1
    activations: Activations = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One layer; ``seen`` by sample, ``costs`` by degree, ``kind`` shared with all layers of its kind."""

    spec: LayerSpec
    trainable: bool
    seen: tuple[PassSeen, ...]
    kind: _Kind
    costs: tuple[DeviceCosts, ...]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What layers of a kind have in common: times by sample, and what they need in use on one device."""

    times: list[PassTimes]
    workspaces: list[Workspace]


def draw_samples(job: Job) -> list[ProfiledBatch]:
    """Load the first microbatches of the job's first step, one of each shape.

    Raises:
        SampleError: One of them cannot be trained on, which would end the job's first step.
    """
    batches = Batches(job)
    drawn: dict[Signature, ProfiledBatch] = {}
    for samples in first_samples(job):
        batch = batches.join(samples)
        shapes = signature(batch)
        one = drawn.setdefault(shapes, ProfiledBatch(batch=batch, shapes=shapes, count=0))
        one.count += 1
        one.samples += samples
    return list(drawn.values())


def measure(
    job: Job,
    layouts: Mapping[str, BufferLayout],
    samples: Sequence[ProfiledBatch],
    *,
    on_layer: Callable[[str], None],
    timed: Timed | None = None,
    link: Link | None = None,
) -> ModelProfile:
    """Measure all layers of a job, and verify on the way that it can be trained in parts.

    A time is the median over some rounds, the mean over the samples' shapes; bytes are those of the largest sample. Of
    several tensor-parallel devices one's part is measured, and what it receives of the others takes as long as a link
    says.
    Layers of one kind (equal modules that keep and receive the same) are measured together: what disturbs a measurement
    would otherwise tell them apart, and a model of equal layers would be cut unevenly.

    Args:
        job: The job; its device is free but for this.
        layouts: Of all its layers.
        samples: Of :func:`draw_samples`; they end up at the model's end.
        on_layer: Called with the name of each layer that is done.
        timed: The clock; the device's own by default.
        link: Between two devices of a node; by default what is measured, where there is a degree beyond 1.

    Raises:
        ArgumentError: The loss is no sum over samples, or a layer changes its buffers.
    """
    timed = timed or device_clock(job.device)
    measured: list[_Measured] = []
    kinds: dict[Hashable, _Kind] = {}
    degrees, undivided = tensor_degrees(job.model, layouts)
    batches, several = [each.batch for each in samples], [degree for degree in degrees if degree > 1]
    if several and link is None:
        link = exchange_times.measured_link(job.device)
    divided = [DegreePasses(job, layouts, batches, degree, timed, link or Link()) for degree in several]
    cuda = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # dropout draws here; the script's own draws stay what they were
        loss = AdditivityCheck(job, [sample for drawn in samples for sample in drawn.samples])
        for spec in job.model.layers:
            try:
                measured.append(_measure_layer(job, spec, layouts, samples, timed, kinds, loss, divided))
            except ArgumentError:  # says all there is to say
                raise
            except Exception as error:  # the job's own code: it keeps its type
                note(error, f"while measuring layer {spec.name!r}")
                raise
            on_layer(spec.name)
    if cuda:
        torch.cuda.empty_cache()
    weights = [sample.count for sample in samples]
    layers = tuple(_layer_profile(job, layouts[layer.spec.name], layer, weights) for layer in measured)
    source = f"measured on {job.device_name}, {job.precision}"
    return ModelProfile(
        layers=layers, tp_degrees=degrees, source=source, microbatch=job.microbatch, undivided=undivided
    )


def _measure_layer(
    job: Job,
    spec: LayerSpec,
    layouts: Mapping[str, BufferLayout],
    samples: Sequence[ProfiledBatch],
    timed: Timed,
    kinds: dict[Hashable, _Kind],
    loss: AdditivityCheck,
    divided: Sequence[DegreePasses],
) -> _Measured:
    module = materialise(job, spec, layouts)
    buffers, reached = ConstantBuffers(spec.name, module), _reached(module)
    trainable = any(parameter.requires_grad for parameter in module.parameters())
    index = job.model.layers.index(spec)
    is_last = index == len(job.model.layers) - 1
    passes = [LayerPass(job, index, module, each.batch, each.activations) for each in samples]
    seen = tuple(one.inspect() for one in passes)
    key = (spec.unit, repr(module), layouts[spec.name], trainable, is_last, spec.for_loss, seen)
    if key not in kinds:
        workspaces = [one.workspace(each) for one, each in zip(passes, seen, strict=True)]
        kinds[key] = _Kind(times=[PassTimes() for _ in samples], workspaces=workspaces)
    kind = kinds[key]
    take_times(passes, seen, kind.times, timed, trainable=trainable)
    buffers.check()
    _tell_untrained(spec.name, module, reached, seen)
    loss.advance(index, module)
    for sample, one in zip(samples, passes, strict=True):
        sample.activations = one.sent()
    alone = DeviceCosts(seen=seen, workspaces=kind.workspaces, times=kind.times)
    costs = (alone, *(each.advance(index, key) for each in divided))
    return _Measured(spec=spec, trainable=trainable, seen=seen, kind=kind, costs=costs)


def _reached(module: nn.Module) -> set[str]:
    """Return a set to which the name of each parameter is added that a gradient reaches from now on."""
    reached: set[str] = set()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
    return reached


def _tell_untrained(layer: str, module: nn.Module, reached: set[str], seen: Sequence[PassSeen]) -> None:
    """Warn of what is to be trained and is not: it may be so for these samples alone, so that it is no error."""
    missed = [name for name, each in module.named_parameters() if each.requires_grad and name not in reached]
    if missed:
        logger.warning(
            "no gradient reaches %s of layer %r, which weight decay shrinks all the same; freeze with "
            "requires_grad_(False) what is not to be trained",
            ", ".join([*missed[:3], *(["..."] if missed[3:] else [])]),
            layer,
        )
    if seen and all(each.input_gradient and not each.differentiates for each in seen):
        logger.warning(
            "layer %r passes no gradient back, so those before it are not trained; take out detach() or no_grad(), "
            "or freeze them with requires_grad_(False)",
            layer,
        )


def _layer_profile(job: Job, layout: BufferLayout, measured: _Measured, weights: Sequence[int]) -> LayerProfile:
    def mean(times_ms: Sequence[list[float]]) -> float:
        medians = [median(rounds) for rounds in times_ms]
        return sum(value * weight for value, weight in zip(medians, weights, strict=True)) / sum(weights)

    def cost(of: DeviceCosts) -> LayerCost:
        backward_ms = mean([times.backward_ms for times in of.times])
        # what is measured is the time of both and of one; the other is the rest
        backward_input_ms = min(mean([times.backward_input_ms for times in of.times]), backward_ms)
        return LayerCost(
            forward_ms=mean([times.forward_ms for times in of.times]),
            backward_input_ms=backward_input_ms,
            backward_weight_ms=backward_ms - backward_input_ms,
            activation_bytes=max(seen.activation_bytes for seen in of.seen),
            entered_bytes=max(seen.entered_bytes for seen in of.seen),
            given_bytes=max(seen.given_bytes for seen in of.seen),
            workspace_bytes=max(each.among for each in of.workspaces),
            ending_workspace_bytes=max(each.ending for each in of.workspaces),
            split_workspace_bytes=max(each.split for each in of.workspaces),
            again_bytes=max(each.again for each in of.workspaces),
            ending_again_bytes=max(each.ending_again for each in of.workspaces),
            deferred_bytes=max(seen.deferred_bytes for seen in of.seen),
            arriving_bytes=max(seen.arriving_bytes for seen in of.seen),
            returned_bytes=max(seen.returned_bytes for seen in of.seen),
            viewed_bytes=max(each.viewed for each in of.workspaces),
        )

    parameter_bytes, optimizer_bytes, gradient_bytes = layout_bytes(job, layout)
    return LayerProfile(
        name=measured.spec.name,
        costs=tuple(map(cost, measured.costs)),
        parameter_bytes=parameter_bytes,
        optimizer_bytes=optimizer_bytes,
        gradient_bytes=gradient_bytes,
        segments=layout_segments(job, layout),
        rows=layout_rows(job, layout),
        input_bytes=max(seen.input_bytes for seen in measured.seen),
        read_bytes=max(seen.read_bytes for seen in measured.seen),
        loaded_bytes=max(seen.loaded_bytes for seen in measured.seen),
        keeps_nothing=all(seen.keeps_nothing for seen in measured.seen),
        trainable=measured.trainable,
        input_gradient=any(seen.input_gradient for seen in measured.seen),
        shares=tuple(dict.fromkeys(owner for owner, _ in measured.spec.tied.values())),
    )
