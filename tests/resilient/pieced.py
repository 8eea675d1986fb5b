"""Layer states of any sizes, of which workers hold pieces; every element has a value of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from resilient.models.layer import LayerSpec
from resilient.optim import Optimizer
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.mixtures import StateSizes
from tests.resilient.small import CPU


class Parts(nn.Module):
    """Trainable and frozen parameters of these sizes."""

    def __init__(self, sizes: StateSizes) -> None:
        super().__init__()
        for index, numel in enumerate(sizes.trainable):
            self.register_parameter(f"trained{index}", nn.Parameter(torch.empty(numel)))
        for index, numel in enumerate(sizes.frozen):
            self.register_parameter(f"frozen{index}", nn.Parameter(torch.empty(numel), requires_grad=False))


def piece_of(
    sizes: StateSizes, held: ByteIntervals | None = None, name: str = "layer", optimizer: Optimizer | None = None
) -> LayerState:
    """Make a state of float64, of which the given bytes are held; None for all."""

    def draw(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter)

    spec = LayerSpec(name=name, unit="llm", build=lambda: Parts(sizes), initialize=draw)
    layout = BufferLayout.of(spec, optimizer.rates) if optimizer else BufferLayout.of(spec)
    slots = optimizer.slots if optimizer else tuple(f"slot{i}" for i in range(sizes.num_slots))
    return LayerState(spec, layout, slots, torch.float64, CPU, held)


def cut_from(whole: Tensor, held: ByteIntervals) -> Tensor:
    """Return the elements of a canonical tensor, of float64, that are held, one after the other."""
    return torch.cat([whole[:0], *(whole[start // 8 : end // 8] for start, end in held)])


def number(state: LayerState, offset: int = 0) -> LayerState:
    """Give every element its index in the canonical buffer as its value, plus an offset."""
    state.buffer.copy_(cut_from(torch.arange(1000, dtype=torch.float64), state.held) + offset)
    return state
