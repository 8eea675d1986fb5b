"""Computes one stage of a pipeline: forward and backward of a microbatch through contiguous layers.

Owns the activations of the microbatches in flight. Knows nothing of processes: activations come in and go out.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resilient.models.buffers import ConstantBuffers
from resilient.models.layer import Activations, Batch, Model
from resilient.models.summed_loss import loss_behind, loss_units
from resilient.pipeline.backward_split import Deferred, differentiate_inputs
from resilient.pipeline.finite_watch import FiniteWatch

_MASK = (1 << 63) - 1
_NUMPY_MASK = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class StageLayer:
    """A layer with its position in the model."""

    index: int
    module: nn.Module


@dataclass(kw_only=True)
class InFlight:
    """A microbatch between its forward and its backward: leaves, what was made of them, and the scaled loss.

    Of leaves and of what was made, those that require a gradient: the others are nobody's any more.
    """

    received: Activations
    sent: Activations
    loss: Tensor | None


class Stage:
    """Contiguous layers on one device.

    Args:
        model: Gives the loss, on stages where some is taken.
        layers: The stage's layers in order.
        device: Where the layers are.
        autocast: Lower precision for matrix products, None for none.
        seed: Of the job; random layers (dropout) draw from (seed, step, microbatch, layer), whatever the stage; of
            Python's, numpy's and torch's generators.
        recomputed_layers: So many layers, the first ones, keep only their inputs and run again in the backward.
    """

    def __init__(
        self,
        model: Model,
        layers: Sequence[StageLayer],
        *,
        device: torch.device,
        autocast: torch.dtype | None,
        seed: int,
        recomputed_layers: int = 0,
    ) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._device = device
        self._autocast = autocast
        self._seed = seed
        self._recomputed_layers = recomputed_layers
        self._loss_units = loss_units(model)
        self._in_flight: dict[Hashable, InFlight] = {}
        self._deferred: dict[Hashable, Deferred] = {}
        self._num_steps = 0
        self._buffers = [ConstantBuffers(model.layers[layer.index].name, layer.module) for layer in layers]

    def begin(self) -> None:
        """Forget microbatches of a step that was given up."""
        self._in_flight.clear()
        self._deferred.clear()

    def end(self) -> None:
        """Finish a step; of steps 1, 2, 4, 8, ... of a generation, see that the layers' buffers are as they were.

        What begins to change later than in the first step is found in at most as many steps as it took.

        Raises:
            ArgumentError: They do not.
        """
        self._num_steps += 1
        if self._num_steps.bit_count() == 1:
            for buffers in self._buffers:
                buffers.check()

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
        """Run the layers on one microbatch and keep what its backward needs.

        Args:
            microbatch: Key under which the backward finds the activations.
            activations: From the stage before; tensors that want a gradient have ``requires_grad`` set. Empty on the
                first.
            batch: The collated microbatch on the stage's device.
            step: The step, for the random state.
            position: Index of the microbatch within the step over all pipelines, for the random state.
            num_targets: Loss-bearing targets of the whole step; the loss that is differentiated is divided by it.
            watch: Sees what every layer makes of it, where a step is repeated for that.

        Returns:
            The activations for the next stage, and the summed losses (detached) of what the stage's layers made for
            them, float64 by unit, ``[num_losses]`` (:func:`resilient.models.summed_loss.loss_units`); None where they
            made nothing.
        """
        received = dict(activations)
        losses: list[tuple[str, Tensor]] = []
        for number, layer in enumerate(self._layers):
            run = partial(self._run, layer, batch, step, position, watch)
            # a run seeds itself, so that the second one draws what the first drew
            again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            # entered anew for each layer: it keeps what it has cast until it is left
            with torch.autocast(self._device.type, dtype=self._autocast) if self._autocast else nullcontext():
                activations, loss = again(activations) if number < self._recomputed_layers else run(activations)
            if loss is not None:
                losses.append((self._model.layers[layer.index].unit, loss))
        scaled = torch.stack([loss for _, loss in losses]).sum() / num_targets if losses else None
        self._in_flight[microbatch] = InFlight(received=wanted(received), sent=wanted(activations), loss=scaled)
        return activations, self._told(losses)

    def _told(self, losses: Sequence[tuple[str, Tensor]]) -> Tensor | None:
        """Return the losses taken of some units' layers, added up by unit, ``[num_losses]``."""
        if not losses:
            return None
        told = torch.zeros(len(self._loss_units), dtype=torch.float64, device=self._device)
        for unit, loss in losses:
            told[self._loss_units.index(unit)] += loss.detach()
        return told

    def forget(self, microbatch: Hashable) -> None:
        """Drop what the backward of a microbatch would need: it has none."""
        del self._in_flight[microbatch]

    def backward(self, microbatch: Hashable, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Differentiate one microbatch; parameter gradients are added up.

        Args:
            microbatch: As given to :meth:`forward`.
            gradients: Of the activations sent to the next stage that require one.

        Returns:
            Gradients of the received activations that require one.
        """
        flight = self._in_flight.pop(microbatch)
        outputs, output_gradients = differentiated(flight, gradients)
        if outputs:
            torch.autograd.backward(outputs, output_gradients)
        return {name: or_zeros(tensor, tensor.grad) for name, tensor in flight.received.items()}

    def backward_input(self, microbatch: Hashable, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Differentiate one microbatch for what was received; :meth:`backward_weight` does the rest.

        Where layers run again this is the whole backward: they would have to run twice more for two parts.

        Args:
            microbatch: As given to :meth:`forward`.
            gradients: Of the activations sent to the next stage that require one.

        Returns:
            Gradients of the received activations that require one.
        """
        received = self._in_flight[microbatch].received
        if self._recomputed_layers and received:
            self._deferred[microbatch] = Deferred()
            return self.backward(microbatch, gradients)
        outputs, output_gradients = differentiated(self._in_flight.pop(microbatch), gradients)
        parameters = dict.fromkeys(p for layer in self._layers for p in layer.module.parameters() if p.requires_grad)
        found, self._deferred[microbatch] = differentiate_inputs(
            outputs, output_gradients, list(received.values()), list(parameters)
        )
        return {name: or_zeros(tensor, grad) for (name, tensor), grad in zip(received.items(), found, strict=True)}

    def backward_weight(self, microbatch: Hashable) -> None:
        """Add up the parameter gradients of a microbatch whose :meth:`backward_input` is done."""
        self._deferred.pop(microbatch).accumulate()

    def _run(
        self,
        layer: StageLayer,
        batch: Batch,
        step: int,
        position: int,
        watch: FiniteWatch | None,
        activations: Activations,
    ) -> tuple[Activations, Tensor | None]:
        """Run one layer, and the loss where one is taken behind it: checkpointing then keeps no logits either."""
        self._seed_layer(step, position, layer.index)
        activations = layer.module(activations, batch)
        if watch is not None:
            watch.see_layer(layer.index, layer.module, position, batch, activations)
        loss, activations = loss_behind(self._model, layer.index, activations, batch)
        if watch is not None and loss is not None:
            watch.see_loss(layer.index, position, batch, loss)
        return activations, loss

    def _seed_layer(self, step: int, position: int, layer_index: int) -> None:
        # three odd multipliers keep neighbouring (step, microbatch, layer) triples apart
        value = self._seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9
        value += position * 0x94D049BB133111EB + layer_index
        random.seed(value & _MASK)
        np.random.seed(value & _NUMPY_MASK)
        torch.default_generator.manual_seed(value & _MASK)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(value & _MASK)


def differentiated(flight: InFlight, gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what a microbatch's backward starts from, with its gradients."""
    used: list[tuple[Tensor, Tensor | None]] = [
        (tensor, gradients[name]) for name, tensor in flight.sent.items() if name in gradients
    ]
    if flight.loss is not None and flight.loss.requires_grad:
        used.append((flight.loss, None))
    return [tensor for tensor, _ in used], [gradient for _, gradient in used]


def wanted(activations: Activations) -> Activations:
    """Return those that require a gradient."""
    return {name: tensor for name, tensor in activations.items() if tensor.requires_grad}


def or_zeros(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a tensor's gradient, which is zero where none arrived."""
    return torch.zeros_like(tensor) if gradient is None else gradient
