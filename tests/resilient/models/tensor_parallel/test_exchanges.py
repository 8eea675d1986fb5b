"""What several devices compute of tokens that they divide is what one device computes, and so are the gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from resilient.models.tensor_parallel.devices import TensorDevices, part_bounds
from resilient.models.tensor_parallel.exchanges import gather_tokens, sum_tokens, token_losses
from tests.resilient.ranks import as_threads, join

Result = TypeVar("Result")
SAMPLES, TOKENS, WIDTH, CLASSES, IGNORED = 2, 5, 3, 7, -100


def on_devices(degree: int, work: Callable[[TensorDevices], Result], num_chunks: int = 1) -> list[Result]:
    """Call ``work`` on each of so many devices at once."""
    group = tuple(range(degree))
    return as_threads(degree, lambda rank, address: work(TensorDevices(join(address, rank, degree), group, num_chunks)))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 5, 12])
def test_parts_are_all_there_is_and_differ_by_one_at_most(size: int) -> None:
    bounds = part_bounds(size, 3)
    assert (bounds[0], bounds[-1]) == (0, size)
    assert {end - first for first, end in pairwise(bounds)} <= {size // 3, -(-size // 3)}


@pytest.mark.parametrize("degree", [2, 3, 6])
def test_tokens_are_gathered_and_sums_scattered_with_their_gradients(degree: int) -> None:
    """Of six devices one has no token."""
    hidden, factors = drawn(SAMPLES, TOKENS, WIDTH), drawn(SAMPLES, TOKENS, WIDTH, seed=1)
    weights = [drawn(WIDTH, WIDTH, seed=2 + index) for index in range(degree)]
    whole = hidden.clone().requires_grad_()
    matrix = torch.stack(weights).sum(0).requires_grad_()
    (torch.tanh(whole @ matrix) * factors).sum().backward()

    def work(devices: TensorDevices) -> tuple[Tensor, Tensor]:
        own = devices.own(TOKENS)
        part = hidden[:, own].clone().requires_grad_()
        weight = weights[devices.own(degree).start].clone().requires_grad_()
        summed = sum_tokens(gather_tokens(part, devices, TOKENS) @ weight, devices)
        (torch.tanh(summed) * factors[:, own]).sum().backward()
        assert part.grad is not None
        assert weight.grad is not None
        return part.grad, weight.grad

    assert whole.grad is not None
    assert matrix.grad is not None
    found = on_devices(degree, work)
    close(torch.cat([of_part for of_part, _ in found], dim=1), whole.grad)
    for _, of_weight in found:
        close(of_weight, matrix.grad)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 400.0], ids=["", "whose exponents are beyond all numbers"])
def test_losses_of_a_divided_vocabulary_are_those_of_the_whole_one(degree: int, scale: float) -> None:
    logits = (scale * drawn(SAMPLES, TOKENS, CLASSES)).requires_grad_()
    labels = torch.tensor([[0, 6, IGNORED, 3, 2], [IGNORED, 1, 4, 5, IGNORED]])
    weights = drawn(SAMPLES, TOKENS, seed=1)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels)
    (expected * weights).sum().backward()

    def work(devices: TensorDevices) -> tuple[Tensor, Tensor]:
        part = logits.detach()[..., devices.own(CLASSES)].clone().requires_grad_()
        losses = token_losses(part, labels, devices, CLASSES, IGNORED)
        (losses * weights[:, devices.own(TOKENS)]).sum().backward()
        assert part.grad is not None
        return losses.detach(), part.grad

    assert logits.grad is not None
    found = on_devices(degree, work)
    close(torch.cat([losses for losses, _ in found], dim=1), expected.detach())
    close(torch.cat([gradient for _, gradient in found], dim=-1), logits.grad)


def test_what_is_exchanged_stays_as_it_is() -> None:
    def work(devices: TensorDevices) -> list[float]:
        addend = torch.ones(1, 4, 1)
        devices.sum(addend)
        return addend.flatten().tolist()

    assert on_devices(2, work) == [[1.0] * 4] * 2
