"""Workers that hold unequal parts of a state update its elements to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.models.layer import LayerSpec
from resilient.optim import SGD, AdamW, Optimizer, ParameterGroup
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import ByteIntervals, merged
from tests.resilient.small import draw
from tests.resilient.state.test_layer_state import CPU

NUM_STEPS = 20
WIDTH, OUTPUTS = 31, 43
GROUPS = (ParameterGroup("*.bias", lr=2e-2, weight_decay=0.1),)


def parts(layout: BufferLayout, num_slots: int, cuts: list[int], itemsize: int) -> list[ByteIntervals]:
    """Return what each of several devices holds that divide the elements of the parameters, and of slots the same."""
    firsts = range(0, (1 + num_slots) * layout.num_trainable, layout.num_trainable)
    return [
        merged(((first + start) * itemsize, (first + end) * itemsize) for first in firsts)
        for start, end in zip([0, *cuts], [*cuts, layout.num_trainable], strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(lr=1e-2, groups=GROUPS),
        SGD(lr=1e-2, momentum=0.9, groups=GROUPS),
        SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
    ids=["AdamW", "momentum", "Nesterov's"],
)
def test_parts_of_any_lengths_are_updated_as_the_whole_is(optimizer: Optimizer, dtype: torch.dtype) -> None:
    spec = LayerSpec(name="layer", unit="llm", build=lambda: nn.Linear(WIDTH, OUTPUTS), initialize=draw)
    layout = BufferLayout.of(spec, optimizer.rates)
    held = parts(layout, len(optimizer.slots), [7, 450, 907, 1332], dtype.itemsize)
    whole, *divided = [LayerState(spec, layout, optimizer.slots, dtype, CPU, each) for each in (None, *held)]
    for state in (whole, *divided):
        state.initialize(seed=0)
    built = [optimizer.build([state], 0) for state in (whole, *divided)]
    sizes = [len(state.grad) for state in divided]
    for step in range(NUM_STEPS):
        drawn = torch.Generator().manual_seed(step)
        whole.grad.copy_(torch.randn(layout.num_trainable, generator=drawn, dtype=torch.float64))
        for state, gradient in zip(divided, whole.grad.split(sizes), strict=True):
            state.grad.copy_(gradient)
        for each in built:
            each.step()
    assert sum(sizes) == layout.num_trainable
    assert all(torch.equal(state.bytes, whole.held_bytes(state.held)) for state in divided)
