"""Computes one stage whose devices divide its states: each layer is gathered before it runs, and freed after it.

Each layer is an autograd graph of its own, so a backward goes layer by layer: gather, differentiate, sum the whole
gradient into the devices' parts, free. Every device takes a microbatch of its own; one that has none joins all gathers
and sums. What of it runs a backward follows from the model alone: all devices do the same in the same order.

Of layers, the next one's parameters are on their way while one computes, and of the one before the gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from resilient.models.layer import Activations, Batch, Model
from resilient.pipeline.finite_watch import FiniteWatch
from resilient.pipeline.stage import InFlight, Stage, StageLayer, differentiated, or_zeros, wanted
from resilient.state.gathered.gathered_state import GatheredState, SummedGradients


@dataclass(frozen=True, kw_only=True)
class ShardedLayer:
    """What the devices divide of a layer.

    Args:
        gathered: Its state, and those it shares by tied parameters.
        trained: Those of them that are trained, with their indices.
        has_backward: Whether anything is differentiated in it.
    """

    gathered: Sequence[GatheredState]
    trained: Mapping[int, GatheredState]
    has_backward: bool


class ShardedStage(Stage):
    """Contiguous layers on one of several devices that divide their states.

    Args:
        model: Gives the loss, on stages where some is taken.
        layers: The stage's layers in order; their modules' parameters are those of what is gathered.
        sharded: What is divided of each.
        device: Where the layers are.
        autocast: Lower precision for matrix products, None for none.
        seed: Of the job.
        recomputed_layers: So many layers, the first ones, keep only their inputs and run again in the backward.
        reach: Told the phase, ``gather`` or ``scatter``, and the step, whenever a layer is to be gathered or its
            gradient is there to be summed.
        on_summed: Told the index of a state, whenever a backward has added to what is held of its gradient.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[StageLayer],
        sharded: Sequence[ShardedLayer],
        *,
        device: torch.device,
        autocast: torch.dtype | None,
        seed: int,
        recomputed_layers: int = 0,
        reach: Callable[[str, int], None] = lambda phase, step: None,
        on_summed: Callable[[int], None] = lambda index: None,
    ) -> None:
        super().__init__(
            model, layers, device=device, autocast=autocast, seed=seed, recomputed_layers=recomputed_layers
        )
        self._sharded = tuple(sharded)
        self._reach = reach
        self._on_summed = on_summed
        self._runs: dict[Hashable, list[InFlight]] = {}
        self._summing: list[tuple[int, SummedGradients]] = []
        self._step = 0
        numbers = range(len(self._layers))  # behind a layer with a backward all have one
        self._forward_order = list(numbers)
        self._backward_order = [number for number in reversed(numbers) if sharded[number].has_backward]

    def begin(self) -> None:
        """Forget microbatches of a step that was given up."""
        super().begin()
        self._runs.clear()
        self._summing.clear()

    def forward(
        self,
        microbatch: Hashable,
        activations: Activations,
        batch: Batch,
        *,
        step: int,
        position: int,
        num_targets: int,
        watch: FiniteWatch | None = None,
    ) -> tuple[Activations, Tensor | None]:
        """Run the layers on one microbatch, as :meth:`resilient.pipeline.stage.Stage.forward` does."""
        self._step = step
        runs = self._runs[microbatch] = []
        losses: list[tuple[str, Tensor]] = []
        for number in self._each_gathered(self._forward_order):
            layer = self._layers[number]
            received = {
                name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in activations.items()
            }
            run = partial(self._run, layer, batch, step, position, watch)
            again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            # entered anew for each layer: it keeps what it has cast until it is left
            with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None):
                activations, loss = again(received) if number < self._recomputed_layers else run(received)
            if loss is not None:
                losses.append((self._model.layers[layer.index].unit, loss))
            scaled = None if loss is None else loss / num_targets
            runs.append(InFlight(received=wanted(received), sent=wanted(activations), loss=scaled))
        return activations, self._told(losses)

    def forward_idle(self, step: int) -> None:
        """Take part in the forward of the other devices' microbatches."""
        self._step = step
        for _ in self._each_gathered(self._forward_order):
            pass

    def forget(self, microbatch: Hashable) -> None:
        """Drop what the backward of a microbatch would need: it has none."""
        del self._runs[microbatch]

    def backward(self, microbatch: Hashable, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Differentiate one microbatch, as :meth:`resilient.pipeline.stage.Stage.backward` does."""
        runs = self._runs.pop(microbatch)
        found = dict(gradients)
        first = runs[0].received
        for number in self._each_gathered(self._backward_order):
            run = runs.pop()
            sum_up = self._catch_gradients(number)
            outputs, output_gradients = differentiated(run, found)
            if outputs:
                torch.autograd.backward(outputs, output_gradients)
            found = {name: or_zeros(tensor, tensor.grad) for name, tensor in run.received.items()}
            self._sum(sum_up)
        self._finish_sums()
        return {name: or_zeros(tensor, tensor.grad) for name, tensor in first.items()}

    def backward_idle(self) -> None:
        """Take part in the backward of the other devices' microbatches."""
        for number in self._each_gathered(self._backward_order):
            self._sum(self._catch_gradients(number))
        self._finish_sums()

    def backward_input(self, microbatch: Hashable, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Do the whole backward: for a second part all would have to be gathered once more."""
        return self.backward(microbatch, gradients)

    def backward_weight(self, microbatch: Hashable) -> None:
        """Nothing is left to be done."""

    def _each_gathered(self, order: Sequence[int]) -> Iterator[int]:
        """Yield layers, each while it is gathered and the next one is on its way."""
        self._acquire(order[:1])
        for place, number in enumerate(order):
            self._acquire(order[place + 1 : place + 2])
            for state in self._sharded[number].gathered:
                state.wait()
            yield number
            for state in self._sharded[number].gathered:
                state.release()

    def _acquire(self, layers: Sequence[int]) -> None:
        for number in layers:
            self._reach("gather", self._step)
            for state in self._sharded[number].gathered:
                state.acquire()

    def _catch_gradients(self, number: int) -> dict[int, Callable[[], SummedGradients]]:
        return {index: state.catch_gradients() for index, state in self._sharded[number].trained.items()}

    def _sum(self, gradients: Mapping[int, Callable[[], SummedGradients]]) -> None:
        """Start to sum a layer's gradients, once those of the one before are: two are in memory at a time."""
        self._finish_sums()
        self._reach("scatter", self._step)
        self._summing = [(index, sum_up()) for index, sum_up in gradients.items()]

    def _finish_sums(self) -> None:
        for index, summed in self._summing:
            summed.add()
            self._on_summed(index)
        self._summing = []
