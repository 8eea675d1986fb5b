"""What tensor-parallel devices exchange in a forward, and the other way round in its backward.

The loss that is differentiated is the sum of what the devices have of it. Where a device has some tokens alone, its
gradients of parameters that all have whole are addends of theirs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from resilient.models.tensor_parallel.devices import TensorDevices

TOKEN_LOSSES = "losses"
"""Entry of the activations behind a layer that has taken the loss of some tokens itself."""


def gather_tokens(part: Tensor, devices: TensorDevices, num_tokens: int) -> Tensor:
    """Return all tokens ``[microbatch, num_tokens, ...]`` of which each device has some."""
    return cast(Tensor, _Gather.apply(part, devices, num_tokens))


def sum_tokens(addend: Tensor, devices: TensorDevices) -> Tensor:
    """Return this device's tokens of a sum of which each device has an addend ``[microbatch, tokens, ...]``."""
    return cast(Tensor, _Sum.apply(addend, devices))


def token_losses(logits: Tensor, labels: Tensor, devices: TensorDevices, num_classes: int, ignored: int) -> Tensor:
    """Return the cross entropy of each of this device's tokens, ``[microbatch, own tokens]``.

    Args:
        logits: Of all tokens, for those classes that are this device's part, ``[microbatch, tokens, own classes]``.
        labels: ``[microbatch, tokens]``.
        devices: They.
        num_classes: Of all devices.
        ignored: A token with this label has none.
    """
    return cast(Tensor, _TokenLosses.apply(logits, labels, devices, devices.own(num_classes), ignored))


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, devices: TensorDevices, num_tokens: int) -> Tensor:
        ctx.devices = devices
        return devices.gather(part, num_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.devices.sum(gradients[0]), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, addend: Tensor, devices: TensorDevices) -> Tensor:
        ctx.devices, ctx.num_tokens = devices, addend.shape[1]
        return devices.sum(addend)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.devices.gather(gradients[0], ctx.num_tokens), None


class _TokenLosses(Function):
    """Each device has the sum of exponents over its classes; all of them are told to all in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, devices: TensorDevices, classes: slice, ignored: int
    ) -> Tensor:
        is_own = (labels >= classes.start) & (labels < classes.stop)
        places = (labels - classes.start).where(is_own, 0)[..., None]
        largest = logits.amax(-1)
        summed = (logits - largest[..., None]).exp().sum(-1)
        meant = logits.gather(-1, places)[..., 0].where(is_own, 0)
        all_largest, all_summed, all_meant = devices.stack(torch.stack([largest, summed, meant])).unbind(1)
        top = all_largest.amax(0)
        log_sum = top + (all_summed * (all_largest - top).exp()).sum(0).log()
        counts = labels != ignored
        ctx.devices = devices
        ctx.save_for_backward(logits, log_sum, places, is_own, counts)
        losses = (log_sum - all_meant.sum(0)).where(counts, 0)
        return losses[:, devices.own(labels.shape[1])].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, log_sum, places, is_own, counts = ctx.saved_tensors
        gradient = ctx.devices.gather(gradients[0], counts.shape[1]).where(counts, 0)
        found = (logits - log_sum[..., None]).exp()
        found.scatter_add_(-1, places, -is_own[..., None].to(found.dtype))
        return found * gradient[..., None], None, None, None, None
