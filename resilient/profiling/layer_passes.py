"""Takes a layer's passes, and their times: forward, backward for what it received, whole backward.

Owns what one pass of one layer is; which layers and which samples, and what is made of the times, is decided by others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resilient.emulation.device import DEVICE
from resilient.models.compiled_layers import as_it_is
from resilient.models.layer import Activations, Batch, LayerSpec, initialize_layer
from resilient.models.summed_loss import loss_behind
from resilient.pipeline.backward_split import differentiate_inputs
from resilient.profiling.allocations import most_allocated
from resilient.runtime.job import Job
from resilient.state.layout import BufferLayout

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


@dataclass(frozen=True, kw_only=True)
class PassSeen:
    """What one layer does with microbatches of one shape.

    Args:
        activation_bytes: Kept from forward to backward, with what is kept of what entered and of the microbatch, but
            without what is handed on: that is the next layer's.
        entered_bytes: Of what entered and wants a gradient, what is not kept.
        given_bytes: Of what is handed on, what is kept.
        own_bytes: Of what is kept what the layer made itself.
        deferred_bytes: Gradients that wait for the second part of a split backward, where that has a first one.
        arriving_bytes: Of these, what comes from the layer behind.
        returned_bytes: Of these, what goes to the layer before.
        input_bytes: Of what enters.
        read_bytes: Of what is loaded of the microbatch where the layer is, and not kept.
        loaded_bytes: Of all that is loaded of it.
        keeps_nothing: Nothing at all is kept, not even a parameter.
        input_gradient: Some tensor that enters wants a gradient, though the layer may do no more than hand it on: an
            encoder does so with the features of the encoders before it.
        differentiates: A gradient is computed for one of them.
    """

    activation_bytes: int
    entered_bytes: int
    given_bytes: int
    own_bytes: int
    deferred_bytes: int
    arriving_bytes: int
    returned_bytes: int
    input_bytes: int
    read_bytes: int
    loaded_bytes: int
    keeps_nothing: bool
    input_gradient: bool
    differentiates: bool


class Workspace(NamedTuple):
    """The most bytes that one layer's passes use at a time beside what it keeps.

    Args:
        among: Other layers: what is handed on is held by who kept it, and its gradient goes when it was used.
        ending: A stage: what is handed on, and its gradient, are there throughout, and not counted.
        split: As ``among`` where a backward is split, with the gradients that wait at parameters.
        again: Others, beside what entered, where the layer keeps that alone and runs again.
        ending_again: The same where it ends a stage.
        viewed: Not at a time: gradients of parameters that are views of other tensors.
    """

    among: int
    ending: int
    split: int
    again: int
    ending_again: int
    viewed: int


@dataclass(kw_only=True)
class PassTimes:
    """How long one kind of layer takes for microbatches of one shape, round by round."""

    forward_ms: list[float] = field(default_factory=list)
    backward_input_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)


def materialise(job: Job, spec: LayerSpec, layouts: Mapping[str, BufferLayout]) -> nn.Module:
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


def layout_bytes(job: Job, layout: BufferLayout) -> tuple[int, int, int]:
    """Return the bytes of a layer's parameters, of its optimizer slots and of its gradients."""
    itemsize = job.dtype.itemsize
    trained = layout.num_trainable * itemsize
    return layout.num_bytes(0, itemsize), trained * len(job.optimizer.slots), trained


def layout_segments(job: Job, layout: BufferLayout) -> tuple[int, ...]:
    """Return :attr:`resilient.templates.inputs.profile.LayerProfile.segments` of a layer."""
    itemsize = job.dtype.itemsize
    trained = layout.num_trainable * itemsize
    return (trained, layout.num_frozen * itemsize, *(trained for _ in job.optimizer.slots), layout.own_bytes)


def layout_rows(job: Job, layout: BufferLayout) -> tuple[tuple[int, int], ...]:
    """Return :attr:`resilient.templates.inputs.profile.LayerProfile.rows` of a layer."""
    return layout.rows(len(job.optimizer.slots), job.dtype.itemsize)


def take_times(
    passes: Sequence[LayerPass],
    seen: Sequence[PassSeen],
    times: Sequence[PassTimes],
    timed: Timed,
    *,
    trainable: bool,
) -> None:
    """Run passes of one layer in turn, round by round, until their medians have settled.

    Args:
        passes: One or more.
        seen: What their inspection has shown.
        times: Of the layer's kind, by pass: those taken are added.
        timed: The clock.
        trainable: Whether the layer is.
    """
    elapsed_ms = 0.0
    for num_rounds in range(1, _MAX_ROUNDS + 1):
        for one, found, taken in zip(passes, seen, times, strict=True):
            elapsed_ms += one.time(taken, timed, trainable=trainable, differentiates=found.differentiates)
        settled = num_rounds >= _MIN_ROUNDS and len(times[0].forward_ms) >= _MIN_SAMPLES
        if elapsed_ms >= _TOO_LONG_MS or (elapsed_ms >= _ENOUGH_MS and settled):
            break


class LayerPass:
    """Takes one batch through one layer, any number of times.

    Args:
        job: The job.
        index: The layer's in the model: behind some a loss is taken.
        module: The layer.
        batch: The batch.
        activations: What enters the layer; tensors require a gradient where they do in training.
    """

    def __init__(self, job: Job, index: int, module: nn.Module, batch: Batch, activations: Activations) -> None:
        self._job = job
        self._index = index
        self._module = module
        self._batch = batch
        self._activations = activations
        self._received: Activations = {}
        self._sent: Activations = {}
        self._ends: list[Tensor] = []

    def inspect(self) -> PassSeen:
        """Run once, untimed, to see what is kept and where gradients go."""
        parameters = {_address(tensor) for tensor in [*self._module.parameters(), *self._module.buffers()]}
        read = {_address(tensor): _num_bytes(tensor) for tensor in self._batch.values()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(as_it_is(pack), lambda tensor: tensor):
            self._forward()
        # the graph is alive: no address stands for two storages
        handed_on = {_address(tensor) for tensor in self._sent.values()}
        entered = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in self._received.values()}
        wanted = {_address(tensor) for tensor in self._received.values() if tensor.requires_grad}
        own = sum(kept[each] for each in kept.keys() - parameters - handed_on - read.keys() - entered.keys())
        kept_of_entered = sum(entered[each] for each in kept.keys() & entered.keys() - handed_on - read.keys())
        arriving = [torch.ones_like(tensor) for tensor in self._ends]
        found, deferred = differentiate_inputs(self._ends, arriving, self._wanted(), self._trained())
        waiting = deferred.waiting if found else {}
        returned = {_address(gradient) for gradient in found if gradient is not None}
        seen = PassSeen(
            activation_bytes=own + kept_of_entered + sum(read[each] for each in kept.keys() & read.keys()),
            entered_bytes=sum(entered[each] for each in wanted - kept.keys() - handed_on - read.keys()),
            given_bytes=sum(kept[each] for each in kept.keys() & handed_on - entered.keys() - read.keys()),
            own_bytes=own,
            deferred_bytes=sum(waiting.values()),
            arriving_bytes=sum(waiting[each] for each in waiting.keys() & set(map(_address, arriving))),
            returned_bytes=sum(waiting[each] for each in waiting.keys() & returned),
            input_bytes=sum(map(_num_bytes, self._received.values())),
            read_bytes=sum(map(_num_bytes, self._loaded(kept.keys() | handed_on).values())),
            loaded_bytes=sum(map(_num_bytes, self._loaded(set()).values())),
            keeps_nothing=not kept,
            input_gradient=any(tensor.requires_grad for tensor in self._received.values()),
            differentiates=any(gradient is not None for gradient in found),
        )
        self._let_go()
        return seen

    def _loaded(self, kept: Set[int]) -> dict[str, Tensor]:
        """Return what a worker with the layer alone loads of the microbatch, but for what is kept."""
        reads = self._job.model.layers[self._index].reads
        return {
            name: tensor
            for name, tensor in self._batch.items()
            if (reads is None or name in reads) and _address(tensor) not in kept
        }

    def workspace(self, seen: PassSeen) -> Workspace:
        """Run forward and backward a few times more; return what is in use at a time beside what is kept."""
        held = 0

        def among(differentiate: Callable[[Tensor], object], again: bool = False) -> None:
            self._forward(again=again)
            ends, self._ends, self._sent = self._ends, [], {}
            if ends:
                behind = _Behind.apply(*ends)
                del ends
                differentiate(behind)
            self._let_go()

        def in_parts(behind: Tensor) -> None:
            gradients, left = differentiate_inputs([behind], [None], self._wanted(), self._trained())
            del gradients
            left.accumulate()

        def ending(again: bool = False) -> None:
            nonlocal held
            self._forward(again=again)
            gradients = [torch.ones_like(tensor) for tensor in self._ends]
            there = {_address(tensor) for tensor in [*self._received.values(), *self._batch.values()]}
            made = {_address(each): each.untyped_storage().nbytes() for each in self._sent.values()}
            held = sum(made[each] for each in made.keys() - there) + sum(map(_num_bytes, gradients))
            if gradients:
                torch.autograd.backward(self._ends, gradients)
            self._let_go()

        def most(run: Run) -> int:
            return most_allocated(run, self._job.device)

        def noting_views() -> int:
            viewed: list[int] = []
            handles = [
                parameter.register_hook(lambda found: viewed.append(_num_bytes(found) * (found._base is not None)))
                for parameter in self._trained()
            ]
            ending()
            for handle in handles:
                handle.remove()
            return sum(viewed)

        backward = torch.autograd.backward
        whole, at_end = most(partial(among, backward)), most(ending)
        return Workspace(
            among=max(0, whole - seen.own_bytes),
            ending=max(0, at_end - held - seen.own_bytes),
            split=max(0, max(whole, most(partial(among, in_parts))) - seen.own_bytes),
            again=most(partial(among, backward, again=True)),
            ending_again=max(0, most(partial(ending, again=True)) - held),
            viewed=noting_views(),
        )

    def time(self, times: PassTimes, timed: Timed, *, trainable: bool, differentiates: bool) -> float:
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
        self._let_go()
        return forward_ms + input_ms + backward_ms

    def sent(self) -> Activations:
        """Return what enters the next layer."""
        self._forward()
        sent = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self._sent.items()}
        self._let_go()
        return sent

    def _let_go(self) -> None:
        """Free the graph: passes of several batches take turns."""
        self._received, self._sent, self._ends = {}, {}, []

    def _forward(self, *, again: bool = False) -> None:
        """Run; with ``again`` keep what entered alone, for another run in the backward."""
        job = self._job
        self._received = {
            name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in self._activations.items()
        }
        with torch.autocast(job.device.type, dtype=job.autocast, enabled=job.autocast is not None):
            entering = dict(self._received)
            loss, self._sent = (
                checkpoint(self._made_of, entering, use_reentrant=False, preserve_rng_state=False)
                if again
                else self._made_of(entering)
            )
        ends = [*self._sent.values(), *([] if loss is None else [loss])]
        passed_on = {id(tensor) for tensor in self._received.values()}
        self._ends = [tensor for tensor in ends if tensor.requires_grad and id(tensor) not in passed_on]

    def _made_of(self, entering: Activations) -> tuple[Tensor | None, Activations]:
        made = self._module(entering, self._batch)
        return loss_behind(self._job.model, self._index, made, self._batch)

    def _backward(self) -> None:
        torch.autograd.backward(self._ends, [torch.ones_like(tensor) for tensor in self._ends])

    def _wanted(self) -> list[Tensor]:
        return [tensor for tensor in self._received.values() if tensor.requires_grad]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _input_gradients(self) -> Sequence[Tensor | None]:
        wanted = self._wanted()
        if not wanted or not self._ends:
            return ()
        ones = [torch.ones_like(tensor) for tensor in self._ends]
        return torch.autograd.grad(self._ends, wanted, ones, allow_unused=True)


class _Behind(torch.autograd.Function):
    """What follows a layer: it keeps nothing, and makes the gradients of what it was given when they are needed."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in given]
        return given[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def device_clock(device: torch.device) -> Timed:
    """Return what times runs on a device."""
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
