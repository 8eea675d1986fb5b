"""Asks a model for the loss of a microbatch where some is taken, and names what is no loss to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from resilient.common.arguments import described
from resilient.errors import ArgumentError
from resilient.models.layer import Activations, Batch, Model


def loss_units(model: Model) -> tuple[str, ...]:
    """Return the units behind whose layers a loss is taken, in order: a generator's is not the language model's."""
    last = model.layers[-1]
    return tuple(dict.fromkeys(spec.unit for spec in model.layers if spec.for_loss or spec is last))


def loss_behind(
    model: Model, layer_index: int, activations: Activations, batch: Batch
) -> tuple[Tensor | None, Activations]:
    """Return the loss of what a layer made, None where none is taken of it, and what goes on to the next layer.

    What is a part of something larger, as a chunk or the first token of each sequence is, goes on by itself: nobody
    holds the rest for its sake.

    Raises:
        ArgumentError: As :func:`summed_loss`.
    """
    if layer_index == len(model.layers) - 1:
        return summed_loss(model, activations, batch), {}
    names = model.layers[layer_index].for_loss
    if not names:
        return None, _by_themselves(activations)
    read = {name: tensor for name, tensor in activations.items() if name in names}
    rest = {name: tensor for name, tensor in activations.items() if name not in names}
    return summed_loss(model, read, batch), _by_themselves(rest)


def _by_themselves(activations: Activations) -> Activations:
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) if _is_part(tensor) else tensor
        for name, tensor in activations.items()
    }


def _is_part(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def summed_loss(model: Model, activations: Activations, batch: Batch) -> Tensor:
    """Return the model's loss of a microbatch, a scalar.

    Raises:
        ArgumentError: It is no tensor, no scalar, or cut off from what the model computed.
    """
    loss = model.loss(activations, batch)
    if not isinstance(loss, Tensor):
        fix = "have it return the sum of the targets' losses, without .item()"
        raise ArgumentError("loss", "return a tensor", described(loss), fix)
    if loss.ndim:
        constraint = "return one number, summed over the microbatch's targets"
        raise ArgumentError("loss", constraint, f"a tensor of shape {list(loss.shape)}", "end it with .sum()")
    wants_gradient = any(tensor.requires_grad for tensor in activations.values())
    if torch.is_grad_enabled() and wants_gradient and not loss.requires_grad:
        fix = "leave out .detach(), torch.no_grad() and whatever has no gradient, such as argmax"
        raise ArgumentError("loss", "depend on the model's output by operations with a gradient", "one without", fix)
    return loss
