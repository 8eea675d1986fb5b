"""Asks a model for the loss of a microbatch, and names what is no loss to train on."""

from __future__ import annotations

import torch
from torch import Tensor

from resilient.common.arguments import described
from resilient.errors import ArgumentError
from resilient.models.layer import Activations, Batch, Model


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
