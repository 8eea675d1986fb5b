"""A chain equals the nn.Sequential it stands for; its values come from (seed, layer) alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import Batch, initialize_layer
from resilient.state.layer_state import BufferLayout, LayerState, bind
from tests.resilient.small import assemble

FACTORIES = (lambda: nn.Linear(4, 8), nn.ReLU, lambda: nn.Linear(8, 2))


def squared(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["target"]).square().sum()


class Scale(nn.Module):
    """A module with a parameter, a buffer outside the state dict, and no reset_parameters()."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(1))
        self.register_buffer("offset", torch.rand(1), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.factor * hidden + self.offset


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chain_computes_what_the_sequence_of_its_modules_does(dtype: torch.dtype) -> None:
    whole = assemble(Chain(FACTORIES, squared), seed=0, dtype=dtype)
    batch = {"input": torch.ones(3, 4), "target": torch.zeros(3, 2)}
    sequence = nn.Sequential(*(layer.get_submodule("module") for layer in whole.stack))
    expected = sequence(batch["input"].to(dtype))
    torch.testing.assert_close(whole(batch)["hidden"], expected)
    torch.testing.assert_close(whole.loss(batch), expected.square().sum())


@pytest.mark.parametrize(
    "chain",
    [
        Chain([*FACTORIES, Scale], squared),
        Chain(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 2)), squared),
    ],
)
def test_initial_values_depend_on_seed_and_layer_alone(chain: Chain) -> None:
    whole = assemble(chain, seed=5, dtype=torch.float64)
    for spec in reversed(chain.layers):
        torch.manual_seed(99)
        before = torch.get_rng_state()
        alone = initialize_layer(spec, seed=5)
        assert torch.equal(torch.get_rng_state(), before)
        for value, reference in zip(tensors(alone), tensors(whole.layer(spec.name)), strict=True):
            assert torch.equal(value.double(), reference.double())
    first, other = (initialize_layer(chain.layers[0], seed=seed) for seed in (5, 6))
    assert not torch.equal(tensors(first)[0], tensors(other)[0])


def test_layers_of_equal_shape_start_differently() -> None:
    chain = Chain([lambda: nn.Linear(4, 4)] * 2, squared)
    first, second = (initialize_layer(spec, seed=0) for spec in chain.layers)
    assert not torch.equal(tensors(first)[0], tensors(second)[0])


def test_modules_given_are_not_touched_and_can_be_sized_on_meta() -> None:
    given = nn.Linear(4, 4)
    before = given.weight.detach().clone()
    (spec,) = Chain([given], squared).layers
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in tensors(spec.build()))
    initialize_layer(spec, seed=0)
    assert torch.equal(given.weight, before)


def test_digest_tells_structures_apart() -> None:
    assert Chain(FACTORIES, squared).digest() == Chain(FACTORIES, squared).digest()
    assert Chain(FACTORIES, squared).digest() != Chain(FACTORIES[:2], squared).digest()


def test_module_that_cannot_start_again_is_refused() -> None:
    message = (
        "layer 'layer.0' must be a factory, got a module whose part '1' (Scale) has no reset_parameters(); pass a "
        "function that builds it, e.g. lambda: Sequential(...)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Chain([nn.Sequential(nn.Linear(4, 4), Scale())], squared)


@pytest.mark.parametrize("names", [["a"], ["a", "a", "b"]])
def test_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    message = f"names must be unique, one per layer (3), got {names}; rename them"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Chain(FACTORIES, squared, names=names)


def test_sample_without_input_is_named() -> None:
    message = "sample 3 of Rows: a chain reads 'input', but the sample holds ['x']; rename its entry"
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        Chain(FACTORIES, squared).check({"x": 1}, "sample 3 of Rows")


def test_buffers_of_a_module_keep_their_values_when_the_layer_is_bound() -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("shift", torch.full((2,), 5.0))

    (spec,) = Chain([Shifted()], lambda output, batch: output.sum()).layers
    state = LayerState(spec, BufferLayout.of(spec), (), torch.float64, torch.device("cpu"))
    module = bind(spec, {spec.name: state}, torch.device("cpu"))
    assert module.get_buffer("module.shift").tolist() == [5.0, 5.0]
