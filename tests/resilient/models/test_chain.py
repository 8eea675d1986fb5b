"""A chain equals the nn.Sequential it stands for; its values are its modules', or come from (seed, layer) alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from resilient.errors import SampleError
from resilient.models.chain import Chain
from resilient.models.layer import Batch, initialize_layer
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from tests.resilient.small import assemble

FACTORIES = (lambda: nn.Linear(4, 8), nn.ReLU, lambda: nn.Linear(8, 2))


def squared(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["target"]).square().sum()


REDUCTION = "sum"
CRITERION = nn.MSELoss(reduction="sum")


def by_global(output: Tensor, batch: Batch) -> Tensor:
    scores = [squared(output, batch), CRITERION(output, batch["target"])]
    return sum(scores, nn.functional.mse_loss(output, batch["target"], reduction=REDUCTION))


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


def test_initial_values_depend_on_seed_and_layer_alone() -> None:
    chain = Chain([*FACTORIES, Scale], squared)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_modules_keep_the_values_they_have(dtype: torch.dtype) -> None:
    given = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.LayerNorm(8), Scale()), nn.Linear(8, 2).bfloat16())
    given[0].weight.requires_grad_(False)
    chain = Chain(given, squared)
    for seed in (5, 6):
        whole = assemble(chain, seed, dtype)
        for ours, theirs in zip(whole.stack, given, strict=True):
            values = tensors(ours.get_submodule("module"))
            assert all(value.dtype is dtype for value in values)
            for value, reference in zip(values, tensors(theirs), strict=True):
                assert torch.equal(value, reference.to(dtype))
                assert value.requires_grad == reference.requires_grad


def test_values_of_modules_have_a_digest_and_structures_another() -> None:
    one, same, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    same.load_state_dict(one.state_dict())
    chains = [Chain([module, lambda: nn.Linear(2, 2)], squared) for module in (one, same, other)]
    first, second, third = (chain.values_digest() for chain in chains)
    assert first == second != third
    assert len({chain.digest() for chain in chains}) == 1
    with torch.no_grad():
        same.bias[1] += 1e-6
    assert chains[1].values_digest() != first


class Entropy(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(output, batch["target"], reduction=self.reduction)


def test_digest_tells_losses_apart_by_what_they_do() -> None:
    def loss(reduction: str) -> Callable[[Tensor, Batch], Tensor]:
        return lambda output, batch: nn.functional.mse_loss(output, batch["target"], reduction=reduction)

    losses = [
        loss("sum"),
        loss("mean"),
        lambda output, batch: output.sum(),
        lambda output, batch: output.mean(),
        lambda output, batch: 2 * output.sum(),
        Entropy("sum"),
        Entropy("mean"),
        partial(lambda output, batch, scale: scale * output.sum(), scale=3),
        squared,
    ]
    assert len({Chain(FACTORIES, loss).digest() for loss in losses}) == len(losses)
    assert Chain(FACTORIES, loss("sum")).digest() == Chain(FACTORIES, loss("sum")).digest()


class Weighted(nn.Module):
    """A loss of parts: one that is a module, one in a list, and one that is only called."""

    def __init__(self, reduction: str = "sum", weight: float = 1.0, dim: int = 1, slope: float = 0.1) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LeakyReLU(slope), nn.CrossEntropyLoss(torch.tensor([weight, 1.0])))
        self.others = [Entropy(reduction)]
        self.last = partial(torch.sum, dim=dim)

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        return self.inner[1](self.inner[0](output), batch["target"]) + self.last(self.others[0](output, batch))

    def method(self, output: Tensor, batch: Batch) -> Tensor:
        return self(output, batch)


def test_digest_sees_into_the_parts_of_a_loss() -> None:
    losses = [Weighted(), Weighted("mean"), Weighted(weight=2.0), Weighted(dim=0), Weighted(slope=0.2)]
    losses += [loss.method for loss in losses]
    assert len({Chain(FACTORIES, loss).digest() for loss in losses}) == len(losses)
    assert Chain(FACTORIES, Weighted()).digest() == Chain(FACTORIES, Weighted()).digest()


def test_digest_knows_the_variables_and_functions_that_a_loss_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(FACTORIES, by_global)
    digests = {chain.digest()}
    monkeypatch.setitem(globals(), "REDUCTION", "mean")
    digests.add(chain.digest())
    monkeypatch.setitem(globals(), "CRITERION", nn.MSELoss(reduction="mean"))
    digests.add(chain.digest())
    monkeypatch.setitem(globals(), "squared", lambda output, batch: output.sum())
    digests.add(chain.digest())
    assert len(digests) == 4
    monkeypatch.undo()
    assert chain.digest() in digests


def test_parts_of_a_layer_that_share_a_parameter_share_it_in_every_copy() -> None:
    given = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    given[1].weight = given[0].weight
    (spec,) = Chain([given], squared).layers
    layout = BufferLayout.of(spec)
    assert [entry.name for entry in layout.entries] == ["module.0.weight"]
    state = LayerState(spec, layout, (), torch.float32, torch.device("cpu"))
    state.initialize(seed=0)
    bound = bind(spec, {spec.name: state}, torch.device("cpu"))
    assert bound.get_parameter("module.1.weight") is bound.get_parameter("module.0.weight")
    assert torch.equal(bound.get_parameter("module.1.weight"), given.get_parameter("0.weight"))


def shared_weight() -> list[nn.Module]:
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return [embed, nn.Tanh(), head]


TWICE = nn.Linear(4, 4)
SHARED = (
    "'weight' of layer 'layer.2' must be the layer's own, got that of 'weight' of layer 'layer.0'; pass copy.deepcopy "
    "of the module, or tie them by LayerSpec.tied in a model of your own"
)
EMPTY = "of layer 'layer.0' must have values, got {}; load them first, or pass a function that makes the module"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([TWICE, nn.Tanh(), TWICE], SHARED),
        (shared_weight(), SHARED),
        ([nn.Sequential(nn.Linear(2, 2, device="meta"))], f"'0.weight' {EMPTY.format('one on the meta device')}"),
        ([nn.LazyLinear(3)], f"'weight' {EMPTY.format('an uninitialised one')}"),
    ],
    ids=["used twice", "tied", "meta", "lazy"],
)
def test_modules_without_values_of_their_own_are_refused(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Chain(layers, squared)


def test_modules_without_values_may_be_used_twice() -> None:
    activation = nn.Tanh()
    assert len(Chain([nn.Linear(2, 2), activation, nn.Linear(2, 2), activation], squared).layers) == 4


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"input": torch.ones(3)}, None),
        ({"target": torch.ones(3)}, None),
        ({"target": torch.ones(3, dtype=torch.bool)}, None),
        ({"label": 4}, 1),
        ({"labels": torch.tensor([3, -100, 4])}, 2),
        ({"targets": np.array([[1, 2], [3, -100]])}, 3),
        ({"target": "four"}, None),
    ],
)
def test_integers_called_labels_or_targets_are_counted(sample: dict[str, Any], expected: int | None) -> None:
    assert Chain(FACTORIES, squared).num_targets(sample) == expected


@pytest.mark.parametrize("names", [["a"], ["a", "a", "b"]])
def test_names_that_do_not_fit_are_refused(names: list[str]) -> None:
    message = f"names must be unique, one per layer (3), got {names}; rename them"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Chain(FACTORIES, squared, names=names)


def test_sample_without_input_is_named() -> None:
    message = "sample 3 of Rows: must hold 'input', which a chain reads, got ['x']; rename an entry"
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
