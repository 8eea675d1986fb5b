"""Modules and graphs keep their tensors while there is no memory behind them, and are right once it is filled again."""

from __future__ import annotations

import torch
from torch import nn

from resilient.state.gathered.freeable_buffer import FreeableBuffer
from tests.resilient.small import CPU


def test_memory_is_there_only_while_it_is_allocated() -> None:
    buffer = FreeableBuffer(1000, CPU)
    assert buffer.num_bytes == 0
    buffer.allocate()
    assert buffer.num_bytes == buffer.bytes.numel() == 1000
    buffer.free()
    assert buffer.num_bytes == 0


def test_graph_is_differentiated_with_values_that_were_gone_in_between() -> None:
    values = torch.linspace(-1, 1, 12, dtype=torch.float64)
    buffer = FreeableBuffer(12 * 8, CPU)
    weight = nn.Parameter(buffer.view(0, 96, torch.float64).view(3, 4))
    buffer.free()
    given = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
    expected = (nn.functional.linear(given, values.view(3, 4)) ** 2).sum()
    (wanted,) = torch.autograd.grad(expected, given)
    buffer.allocate()
    buffer.bytes.copy_(values.view(torch.uint8))
    found = (nn.functional.linear(given, weight) ** 2).sum()
    assert found.item() == expected.item()
    buffer.free()
    others = [torch.full((12,), 7.0) for _ in range(100)]  # the place in memory may be another one
    buffer.allocate()
    buffer.bytes.copy_(values.view(torch.uint8))
    found.backward()
    torch.testing.assert_close(given.grad, wanted, rtol=0, atol=0)
    assert weight.grad is not None
    assert len(others) == 100
