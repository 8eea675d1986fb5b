"""Layers that ``torch.compile`` made train like others, also beside these in split backwards."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from resilient.models.chain import Chain
from resilient.models.layer import Batch, initialize_layer
from resilient.pipeline.stage import Stage, StageLayer
from resilient.profiling.profiler import draw_samples, measure
from tests.resilient.small import CPU, make_job


class Points:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.arange(8.0, dtype=torch.float64) + index, "labels": torch.tensor(index % 8)}


class Block(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if compiled:
            self.inner.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")


def chain(*, compiled: bool) -> Chain:
    return Chain([lambda: Block(compiled)] * 3, loss)


def trained(*, compiled: bool, split: bool) -> dict[str, Tensor | None]:
    """The gradients of the last two layers, as a stage of their own."""
    model = chain(compiled=compiled)
    layers = [initialize_layer(spec, 0, torch.float64) for spec in model.layers[1:]]
    stage_layers = [StageLayer(index=index, module=layer) for index, layer in enumerate(layers, 1)]
    stage = Stage(model, stage_layers, device=CPU, autocast=None, seed=0)
    batch = {"labels": torch.arange(4)}
    for microbatch in range(2):
        entering = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
        stage.forward(microbatch, {"hidden": entering}, batch, step=1, position=microbatch, num_targets=4)
    for microbatch in range(2):
        (stage.backward_input if split else stage.backward)(microbatch, {})
    for microbatch in range(2 * split):
        stage.backward_weight(microbatch)
    return {name: parameter.grad for name, parameter in nn.ModuleList(layers).named_parameters()}


@pytest.mark.parametrize("split", [False, True])
def test_compiled_layers_have_the_same_gradients(split: bool) -> None:
    expected = trained(compiled=False, split=False)
    torch.testing.assert_close(trained(compiled=True, split=split), expected, rtol=1e-12, atol=1e-14)


def test_compiled_layers_keep_what_they_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = import_module("torch._functorch.config")
    monkeypatch.setattr(settings, "donated_buffer", True)
    initialize_layer(chain(compiled=True).layers[0], 0)
    assert not settings.donated_buffer


def test_compiled_layers_are_measured() -> None:
    job = make_job(model=chain(compiled=True), dataset=Points(), precision="fp64")
    profile = measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None)
    assert [layer.costs[0].forward_ms > 0 for layer in profile.layers] == [True] * 3
