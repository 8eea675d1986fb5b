"""The halves that planners count are those that workers compute."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from resilient.data.dataset import stack
from resilient.pipeline.stage import Stage, StageLayer
from resilient.templates.schedules.halves import Halves
from tests.resilient.small import CPU, TiedModel, Tokens, assemble

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
