"""Measures what each layer of a job costs on this device: times, activations, and what crosses its border.

Owns the measurement. Layers are made one at a time, so that a model is measured that fits no single device; what is
remembered of it is :mod:`resilient.profiling.cache`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from resilient.emulation.device import DEVICE
from resilient.errors import ArgumentError, note
from resilient.models.buffers import ConstantBuffers
from resilient.models.layer import Activations, Batch, LayerSpec, initialize_layer
from resilient.models.summed_loss import summed_loss
from resilient.pipeline.p2p import Signature, signature
from resilient.profiling.additivity import AdditivityCheck
from resilient.runtime.batches import Batches, Read
from resilient.runtime.job import Job
from resilient.runtime.preflight import first_samples
from resilient.state.layout import BufferLayout
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile

logger = logging.getLogger(__name__)

PROFILER_VERSION = 4
"""Of what is measured and verified, and how; profiles of another version are measured again."""

_MIN_ROUNDS, _MAX_ROUNDS = 3, 20
_MIN_SAMPLES = 5
"""Rounds of a kind of layer whose median has settled, over all layers of the kind."""
_ENOUGH_MS = 10.0
"""A layer measured for this long, and in the fewest rounds, is done."""
_TOO_LONG_MS = 2000.0
"""A layer measured for this long is done in any case."""

Run = Callable[[], object]
Timed = Callable[[Run], float]
"""Runs something and returns how long it took, in ms."""


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
class _Seen:
    """What one layer does with microbatches of one shape.

    Args:
        activation_bytes: As in :class:`LayerCost`.
        input_bytes: As in :class:`LayerProfile`.
        input_gradient: Some tensor that enters wants a gradient, though the layer may do no more than hand it on: an
            encoder does so with the features of the encoders before it.
        differentiates: A gradient is computed for one of them.
    """

    activation_bytes: int
    input_bytes: int
    input_gradient: bool
    differentiates: bool


@dataclass(kw_only=True)
class _Times:
    """How long one kind of layer takes for microbatches of one shape, round by round."""

    forward_ms: list[float] = field(default_factory=list)
    backward_input_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One layer; ``seen`` and ``times`` by sample, ``times`` shared by all layers of its kind."""

    spec: LayerSpec
    trainable: bool
    seen: tuple[_Seen, ...]
    times: list[_Times]


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
) -> ModelProfile:
    """Measure all layers of a job, and verify on the way that it can be trained in parts.

    A time is the median over some rounds, the mean over the samples' shapes; bytes are those of the largest sample.
    Layers of one kind (equal modules that keep and receive the same) are measured together: what disturbs a measurement
    would otherwise tell them apart, and a model of equal layers would be cut unevenly.

    Args:
        job: The job; its device is free but for this.
        layouts: Of all its layers.
        samples: Of :func:`draw_samples`; they end up at the model's end.
        on_layer: Called with the name of each layer that is done.
        timed: The clock; the device's own by default.

    Raises:
        ArgumentError: The loss is no sum over samples, or a layer changes its buffers.
    """
    timed = timed or _clock(job.device)
    measured: list[_Measured] = []
    kinds: dict[Hashable, list[_Times]] = {}
    cuda = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # dropout draws here; the script's own draws stay what they were
        loss = AdditivityCheck(job, [sample for drawn in samples for sample in drawn.samples])
        for spec in job.model.layers:
            try:
                measured.append(_measure_layer(job, spec, layouts, samples, timed, kinds, loss))
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
    return ModelProfile(layers=layers, source=source, microbatch=job.microbatch)


def _materialise(job: Job, spec: LayerSpec, layouts: Mapping[str, BufferLayout]) -> nn.Module:
    """Build a layer with its initial values and, as in training, with gradients to add to."""
    module = initialize_layer(spec, job.seed, job.dtype).to(job.device)
    for name, (owner, owned) in spec.tied.items():
        entry = next(entry for entry in layouts[owner].entries if entry.name == owned)
        parameter = module.get_parameter(name).requires_grad_(entry.trainable)
        parameter.data = parameter.data.to(entry.dtype or job.dtype)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return module


def _measure_layer(
    job: Job,
    spec: LayerSpec,
    layouts: Mapping[str, BufferLayout],
    samples: Sequence[ProfiledBatch],
    timed: Timed,
    kinds: dict[Hashable, list[_Times]],
    loss: AdditivityCheck,
) -> _Measured:
    module = _materialise(job, spec, layouts)
    buffers, reached = ConstantBuffers(spec.name, module), _reached(module)
    trainable = any(parameter.requires_grad for parameter in module.parameters())
    is_last = spec.name == job.model.layers[-1].name
    passes = [_Pass(job, module, sample, is_last=is_last) for sample in samples]
    seen = tuple(one.inspect() for one in passes)
    kind = (spec.unit, repr(module), layouts[spec.name], trainable, is_last, seen)
    times = kinds.setdefault(kind, [_Times() for _ in samples])
    elapsed_ms = 0.0
    for num_rounds in range(1, _MAX_ROUNDS + 1):
        for one, found, taken in zip(passes, seen, times, strict=True):
            elapsed_ms += one.time(taken, timed, trainable=trainable, differentiates=found.differentiates)
        settled = num_rounds >= _MIN_ROUNDS and len(times[0].forward_ms) >= _MIN_SAMPLES
        if elapsed_ms >= _TOO_LONG_MS or (elapsed_ms >= _ENOUGH_MS and settled):
            break
    buffers.check()
    _tell_untrained(spec.name, module, reached, seen)
    loss.advance(spec.name, module, is_last=is_last)
    for one in passes:
        one.advance()
    return _Measured(spec=spec, trainable=trainable, seen=seen, times=times)


def _reached(module: nn.Module) -> set[str]:
    """Return a set to which the name of each parameter is added that a gradient reaches from now on."""
    reached: set[str] = set()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
    return reached


def _tell_untrained(layer: str, module: nn.Module, reached: set[str], seen: Sequence[_Seen]) -> None:
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

    backward_ms = mean([times.backward_ms for times in measured.times])
    # what is measured is the time of both and of one; the other is the rest
    backward_input_ms = min(mean([times.backward_input_ms for times in measured.times]), backward_ms)
    itemsize = job.dtype.itemsize
    return LayerProfile(
        name=measured.spec.name,
        costs=(
            LayerCost(
                forward_ms=mean([times.forward_ms for times in measured.times]),
                backward_input_ms=backward_input_ms,
                backward_weight_ms=backward_ms - backward_input_ms,
                activation_bytes=max(seen.activation_bytes for seen in measured.seen),
            ),
        ),
        parameter_bytes=layout.num_bytes(0, itemsize),
        optimizer_bytes=layout.num_trainable * len(job.optimizer.slots) * itemsize,
        gradient_bytes=layout.num_trainable * itemsize,
        input_bytes=max(seen.input_bytes for seen in measured.seen),
        trainable=measured.trainable,
        input_gradient=any(seen.input_gradient for seen in measured.seen),
        shares=tuple(dict.fromkeys(owner for owner, _ in measured.spec.tied.values())),
    )


class _Pass:
    """Takes one sample through one layer, any number of times.

    Args:
        job: The job.
        module: The layer.
        sample: Has the activations that enter the layer.
        is_last: Whether the model ends here, with its loss.
    """

    def __init__(self, job: Job, module: nn.Module, sample: ProfiledBatch, *, is_last: bool) -> None:
        self._job = job
        self._module = module
        self._sample = sample
        self._is_last = is_last
        self._received: Activations = {}
        self._sent: Activations = {}
        self._ends: list[Tensor] = []

    def inspect(self) -> _Seen:
        """Run once, untimed, to see what is kept and where gradients go."""
        batch, parameters = self._sample.batch, [*self._module.parameters(), *self._module.buffers()]
        others = {tensor.untyped_storage().data_ptr() for tensor in [*batch.values(), *parameters]}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in others:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._forward()
        activation_bytes = sum(kept.values())  # the graph is alive: no address stands for two storages
        return _Seen(
            activation_bytes=activation_bytes,
            input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in self._received.values()),
            input_gradient=any(tensor.requires_grad for tensor in self._received.values()),
            differentiates=any(gradient is not None for gradient in self._input_gradients()),
        )

    def time(self, times: _Times, timed: Timed, *, trainable: bool, differentiates: bool) -> float:
        """Run once, timed; return the ms of it all."""
        forward_ms, input_ms, backward_ms = timed(self._forward), 0.0, 0.0
        if trainable and differentiates:
            input_ms = timed(self._input_gradients)
            self._forward()
        if self._ends:
            backward_ms = timed(self._backward)
        times.forward_ms.append(forward_ms)
        times.backward_input_ms.append(input_ms if trainable else backward_ms)
        times.backward_ms.append(backward_ms)
        return forward_ms + input_ms + backward_ms

    def advance(self) -> None:
        """Hand what the layer returns to the next one, and let go of it."""
        self._forward()
        self._sample.activations = {
            name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self._sent.items()
        }
        self._received, self._sent, self._ends = {}, {}, []

    def _forward(self) -> None:
        job, batch = self._job, self._sample.batch
        self._received = {
            name: tensor.detach().requires_grad_(tensor.requires_grad)
            for name, tensor in self._sample.activations.items()
        }
        with torch.autocast(job.device.type, dtype=job.autocast, enabled=job.autocast is not None):
            self._sent = self._module(dict(self._received), batch)
            ends = [summed_loss(job.model, self._sent, batch)] if self._is_last else list(self._sent.values())
        passed_on = {id(tensor) for tensor in self._received.values()}
        self._ends = [tensor for tensor in ends if tensor.requires_grad and id(tensor) not in passed_on]

    def _backward(self) -> None:
        torch.autograd.backward(self._ends, [torch.ones_like(tensor) for tensor in self._ends])

    def _input_gradients(self) -> Sequence[Tensor | None]:
        wanted = [tensor for tensor in self._received.values() if tensor.requires_grad]
        if not wanted or not self._ends:
            return ()
        ones = [torch.ones_like(tensor) for tensor in self._ends]
        return torch.autograd.grad(self._ends, wanted, ones, allow_unused=True)


def _clock(device: torch.device) -> Timed:
    # its own processor time is what a single thread takes where nobody disturbs it, and workers start all at once
    alone = torch.get_num_threads() == 1

    def now() -> float:
        return time.thread_time() + DEVICE.waited_s if alone else time.perf_counter()

    def on_cpu(run: Run) -> float:
        started = now()
        run()
        return 1e3 * (now() - started)

    def on_cuda(run: Run) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        return begin.elapsed_time(end)

    return on_cuda if device.type == "cuda" else on_cpu
