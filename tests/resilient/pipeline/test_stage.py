"""Stages together compute what the whole model does, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from resilient.data.dataset import stack
from resilient.models.layer import WholeModel
from resilient.pipeline.stage import Stage, StageLayer
from resilient.templates.halves import Halves
from tests.resilient.small import CPU, TiedModel, Tokens, assemble

LAYERS = 6
CUTS = [(0, 6), (0, 1, 6), (0, 3, 5, 6), (0, 1, 2, 3, 4, 5, 6)]


def run(
    model: TiedModel,
    cut: Sequence[int],
    *,
    step: int = 4,
    position: int = 2,
    recomputed: int = 0,
    autocast: torch.dtype | None = None,
    split: bool = False,
) -> tuple[WholeModel, float, list]:
    """Train one microbatch through stages; return modules with gradients, the loss, and which gradients went back."""
    whole = assemble(model, seed=0, dtype=torch.float64)
    stages = [
        Stage(
            model,
            [StageLayer(index=index, module=whole.stack[index]) for index in range(first, end)],
            device=CPU,
            autocast=autocast,
            seed=9,
            recomputed_layers=min(recomputed, end - first),
        )
        for first, end in pairwise(cut)
    ]
    batch = stack([Tokens()[i] for i in range(3)])
    activations: dict[str, Tensor] = {}
    loss = None
    for stage in stages:
        received = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in activations.items()}
        activations, loss = stage.forward(0, received, batch, step=step, position=position, num_targets=30)
    gradients: dict[str, Tensor] = {}
    went_back = []
    for stage in reversed(stages):
        gradients = stage.backward_input(0, gradients) if split else stage.backward(0, gradients)
        went_back.append(sorted(gradients))
    if split:
        if not recomputed:
            assert not any(parameter.grad is not None for parameter in whole.parameters())
        for stage in stages:
            stage.backward_weight(0)
    assert loss is not None
    return whole, loss.item(), went_back


def gradients(whole: WholeModel) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_and_loss_are_the_whole_models(cut: Sequence[int]) -> None:
    model = TiedModel()
    whole = assemble(model, seed=0, dtype=torch.float64)
    expected = whole.loss(stack([Tokens()[i] for i in range(3)]))
    (expected / 30).backward()
    trained, loss, went_back = run(model, cut)
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradients(trained), gradients(whole), rtol=1e-12, atol=1e-14)
    assert went_back == [["hidden"]] * (len(cut) - 2) + [[]]


@pytest.mark.parametrize("cut", CUTS[1:])
def test_dropout_is_the_same_wherever_the_model_is_cut(cut: Sequence[int]) -> None:
    model = TiedModel(dropout=0.5)
    whole, loss, _ = run(model, (0, 6))
    parts, loss_of_parts, _ = run(model, cut)
    assert loss_of_parts == loss
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=1e-12, atol=1e-14)


def test_dropout_differs_by_step_microbatch_and_layer() -> None:
    model = TiedModel(dropout=0.5)
    losses = {run(model, (0, 6), step=step, position=position)[1] for step in (1, 2) for position in (0, 1)}
    assert len(losses) == 4
    stage = Stage(model, [], device=CPU, autocast=None, seed=0)
    draws = set()
    for layer in range(4):
        stage._seed_layer(1, 0, layer)
        draws.add(torch.rand(()).item())
    assert len(draws) == 4


class Drawing(nn.Module):
    """Multiplies by numbers of Python's and numpy's generators."""

    def forward(self, activations: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"hidden": activations["hidden"] * random.random() * float(np.random.random())}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_draw_from_python_and_numpy_draw_the_same_whatever_was_drawn_before(checkpointing: bool) -> None:
    options: dict[str, Any] = {"device": CPU, "autocast": None, "seed": 3}
    stage = Stage(TiedModel(), [StageLayer(index=1, module=Drawing())], recomputed_layers=int(checkpointing), **options)
    found = []
    for _ in range(2):
        hidden = torch.ones(2, dtype=torch.float64, requires_grad=True)
        sent, _ = stage.forward(0, {"hidden": hidden}, {}, step=1, position=0, num_targets=1)
        found += [*sent["hidden"].tolist(), *stage.backward(0, {"hidden": torch.ones_like(hidden)})["hidden"].tolist()]
    assert found == [found[0]] * 8
    sent, _ = stage.forward(0, {"hidden": torch.ones(2)}, {}, step=1, position=1, num_targets=1)
    assert sent["hidden"][0] != found[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0", "block.2")])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recomputed", [1, LAYERS])
def test_checkpointing_changes_no_bit(
    recomputed: int, cut: Sequence[int], frozen: Sequence[str], autocast: torch.dtype | None
) -> None:
    model = TiedModel(dropout=0.5, frozen=frozen)
    kept, loss, went_back = run(model, cut, autocast=autocast)
    again, loss_again, went_back_again = run(model, cut, autocast=autocast, recomputed=recomputed)
    assert (loss_again, went_back_again) == (loss, went_back)
    torch.testing.assert_close(gradients(again), gradients(kept), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"recomputed": 1}, {"recomputed": LAYERS}, {"autocast": torch.bfloat16}], ids=str
)
@pytest.mark.parametrize(
    "frozen", [(), ("embed", "block.0", "block.2"), tuple(spec.name for spec in TiedModel().layers)]
)
@pytest.mark.parametrize("cut", CUTS)
def test_backward_in_two_parts_changes_no_bit(
    cut: Sequence[int], frozen: Sequence[str], options: dict[str, Any]
) -> None:
    model = TiedModel(dropout=0.5, frozen=frozen)
    whole, loss, went_back = run(model, cut, **options)
    parts, loss_of_parts, went_back_in_parts = run(model, cut, split=True, **options)
    assert (loss_of_parts, went_back_in_parts) == (loss, went_back)
    torch.testing.assert_close(gradients(parts), gradients(whole), rtol=0, atol=0)


class Allocations(TorchDispatchMode):
    """Watches what is allocated inside; views of what was there before do not count."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self._before = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}
        self._seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            storage = tensor.untyped_storage()
            self._seen[StorageWeakRef(storage)] = storage.nbytes()
        return outputs

    def live_bytes(self) -> int:
        return sum(num for ref, num in self._seen.items() if ref not in self._before and not ref.expired())


def test_checkpointing_keeps_the_inputs_of_layers_alone() -> None:
    batch = stack([Tokens()[i] for i in range(3)])
    kept: dict[int, int] = {}
    for recomputed in (0, 2, LAYERS):
        whole = assemble(TiedModel(dropout=0.5), seed=0, dtype=torch.float64)
        layers = [StageLayer(index=index, module=module) for index, module in enumerate(whole.stack)]
        stage = Stage(whole.model, layers, device=CPU, autocast=None, seed=0, recomputed_layers=recomputed)
        with Allocations([*whole.parameters(), *batch.values()]) as allocations:
            stage.forward(0, {}, batch, step=1, position=0, num_targets=15)
        kept[recomputed] = allocations.live_bytes()
    hidden, odd, loss = 3 * 5 * 6 * 8, 3 * 5 * 8, 8
    assert kept[LAYERS] == 5 * hidden + odd + loss
    assert kept[0] > 2 * kept[LAYERS]
    assert kept[LAYERS] < kept[2] < kept[0]


def test_frozen_layers_in_front_ask_for_no_gradient() -> None:
    model = TiedModel(frozen=["embed", "block.0"])
    trained, _, went_back = run(model, (0, 1, 2, 6))
    assert went_back == [[], [], []]
    found = {name.split(".")[1] for name, grad in gradients(trained).items() if grad is not None}
    assert found == {"2", "3", "4", "5"}


def test_gradient_passes_through_frozen_layers_in_between() -> None:
    trained, _, went_back = run(TiedModel(frozen=["block.1"]), (0, 2, 3, 6))
    assert went_back == [["hidden"], ["hidden"], []]
    found = {name.split(".")[1] for name, grad in gradients(trained).items() if grad is not None}
    assert found == {"0", "1", "3", "4", "5"}


def test_everything_frozen_trains_nothing() -> None:
    names = [spec.name for spec in TiedModel().layers]
    trained, _, went_back = run(TiedModel(frozen=names), (0, 3, 6))
    assert went_back == [[], []]
    assert not any(grad is not None for grad in gradients(trained).values())


def test_microbatches_in_flight_are_kept_apart_and_forgotten_on_a_new_step() -> None:
    model = TiedModel()
    whole = assemble(model, seed=0, dtype=torch.float64)
    layers = [StageLayer(index=index, module=module) for index, module in enumerate(whole.stack)]
    stage = Stage(model, layers, device=CPU, autocast=None, seed=0)
    batches = [stack([Tokens()[i]]) for i in range(3)]
    stage.begin()
    for index, batch in enumerate(batches):
        stage.forward(index, {}, batch, step=1, position=index, num_targets=1)
    for index in (0, 1):
        stage.backward(index, {})
    expected = assemble(model, seed=0, dtype=torch.float64)
    (expected.loss(batches[0]) + expected.loss(batches[1])).backward()
    torch.testing.assert_close(gradients(whole), gradients(expected), rtol=1e-12, atol=1e-14)
    stage.backward_input(2, {})
    stage.begin()
    with pytest.raises(KeyError):
        stage.backward_weight(2)


def test_autocast_computes_matrix_products_in_the_lower_type() -> None:
    model = TiedModel()
    whole = assemble(model, seed=0)
    layer = StageLayer(index=4, module=whole.stack[4])
    stage = Stage(model, [layer], device=CPU, autocast=torch.bfloat16, seed=0)
    batch = stack([Tokens()[0]])
    activations = {"hidden": torch.ones(1, 5, 6), "odd": batch["tokens"] % 2}
    sent, _ = stage.forward(0, activations, batch, step=1, position=0, num_targets=1)
    exact = whole.stack[4](activations, batch)["hidden"]
    assert 0 < (sent["hidden"] - exact).abs().max() < 0.05


MULTIPLIES = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in MULTIPLIES
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0"), ("embed", "block.0", "block.1"), ("block.1", "block.2")])
def test_halves_of_backwards_are_those_that_stages_compute(frozen: tuple[str, ...], recomputed: int) -> None:
    model = TiedModel(frozen=frozen)
    whole = assemble(model, seed=0, dtype=torch.float64)
    stages = [
        Stage(
            model,
            [StageLayer(index=index, module=whole.stack[index]) for index in range(first, end)],
            device=CPU,
            autocast=None,
            seed=9,
            recomputed_layers=recomputed,
        )
        for first, end in pairwise((0, 2, 4, 6))
    ]
    batch = stack([Tokens()[i] for i in range(3)])
    given: dict[str, Tensor] = {}
    expected: list[Halves] = []
    for number, stage in enumerate(stages):
        received = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in given.items()}
        given, _ = stage.forward(0, received, batch, step=1, position=0, num_targets=15)
        parameters = whole.stack[2 * number : 2 * number + 2].parameters()
        wanted = any(tensor.requires_grad for tensor in received.values())
        trains = any(parameter.requires_grad for parameter in parameters)
        expected.append(Halves.of(trains=trains, wanted=wanted, again=recomputed > 0))
    gradients: dict[str, Tensor] = {}
    found: list[Halves] = []
    for stage in reversed(stages):
        with Products() as inputs:
            gradients = stage.backward_input(0, gradients)
        with Products() as weights:
            stage.backward_weight(0)
        found.append(Halves(inputs.number > 0, weights.number > 0))
    assert found[::-1] == expected
