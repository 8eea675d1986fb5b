"""Modules that devices divide compute what the whole ones do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.linears import COLUMNS, ROWS, TokenCount, VocabularyEmbedding, divide_linears
from tests.resilient.models.tensor_parallel.test_exchanges import close, drawn, on_devices

TOKENS, WIDTH, INNER = 5, 4, 7


class Perceptron(nn.Module):
    """As in a block: two matrices, with biases, behind a name."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(hidden)


@pytest.mark.parametrize(("degree", "num_chunks"), [(2, 1), (3, 1), (2, 2), (3, 4), (6, 2)])
def test_perceptron_of_unequal_parts(degree: int, num_chunks: int) -> None:
    """Of six devices one has no token; others have fewer than there are chunks."""
    whole, hidden = Perceptron(INNER), drawn(2, TOKENS, WIDTH)
    expected = whole(hidden)
    (expected**2).sum().backward()

    def work(devices: TensorDevices) -> tuple[Tensor, dict[str, Tensor]]:
        own, num_tokens = devices.own(INNER), TokenCount()
        part = Perceptron(INNER)
        divide_linears(part, {"mlp.0": COLUMNS, "mlp.2": ROWS}, devices, num_tokens)
        part.double().load_state_dict(cut(whole.state_dict(), own))
        num_tokens.value = TOKENS
        made = part(hidden[:, devices.own(TOKENS)])
        (made**2).sum().backward()
        return made.detach(), {name: each.grad for name, each in part.named_parameters() if each.grad is not None}

    found = on_devices(degree, work, num_chunks)
    close(torch.cat([made for made, _ in found], dim=1), expected.detach())
    gradients = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    assert gradients.keys() == found[0][1].keys()
    close(torch.cat([each["mlp.0.weight"] for _, each in found]), gradients["mlp.0.weight"])
    close(torch.cat([each["mlp.0.bias"] for _, each in found]), gradients["mlp.0.bias"])
    close(torch.cat([each["mlp.2.weight"] for _, each in found], dim=1), gradients["mlp.2.weight"])
    close(torch.stack([each["mlp.2.bias"] for _, each in found]).sum(0), gradients["mlp.2.bias"])


def cut(values: dict[str, Tensor], own: slice) -> dict[str, Tensor]:
    """Return a device's part of a perceptron's parameters."""
    places = {"mlp.0.weight": own, "mlp.0.bias": own, "mlp.2.weight": (slice(None), own), "mlp.2.bias": slice(None)}
    return {name: copy.deepcopy(each[places[name]]) for name, each in values.items()}


@pytest.mark.parametrize("padding", [None, 0, 4])
@pytest.mark.parametrize("degree", [2, 3])
def test_embedding_of_a_divided_vocabulary(degree: int, padding: int | None) -> None:
    whole = nn.Embedding(INNER, WIDTH, padding, dtype=torch.float64)
    tokens, factors = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 6, 0, 4]]), drawn(2, TOKENS, WIDTH)
    expected = whole(tokens)
    (expected * factors).sum().backward()

    def work(devices: TensorDevices) -> tuple[Tensor, Tensor]:
        part = VocabularyEmbedding(INNER, WIDTH, padding, devices).double()
        part.weight.data.copy_(whole.weight.data[devices.own(INNER)])
        made = part(tokens)
        (made * factors[:, devices.own(TOKENS)]).sum().backward()
        assert part.weight.grad is not None
        return made.detach(), part.weight.grad

    assert whole.weight.grad is not None
    found = on_devices(degree, work)
    close(torch.cat([made for made, _ in found], dim=1), expected.detach())
    close(torch.cat([gradient for _, gradient in found]), whole.weight.grad)
