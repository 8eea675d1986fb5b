"""What is not finite is named where it begins, by microbatch and layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from resilient.data.dataset import stack
from resilient.models.layer import Activations
from resilient.pipeline.finite_watch import FiniteWatch
from resilient.pipeline.stage import Stage, StageLayer
from tests.resilient.small import CPU, TiedModel, Tokens, assemble

NAN, INF = float("nan"), float("inf")
MODEL = TiedModel(num_blocks=1)


def told(watch: FiniteWatch) -> tuple[int, int, str] | None:
    return watch.found and (watch.found.position, watch.found.layer_index, watch.found.what)


def output(value: float, **more: Tensor) -> Activations:
    return {"odd": torch.ones(3, dtype=torch.int64), "hidden": torch.tensor([1.0, value]), **more}


@pytest.mark.parametrize("value", [NAN, INF])
def test_output_is_named_with_its_layer_and_entry(value: float) -> None:
    watch = FiniteWatch(MODEL)
    watch.see_layer(0, nn.Identity(), 3, {"tokens": torch.ones(2)}, output(1.0))
    assert told(watch) is None
    watch.see_layer(1, nn.Identity(), 3, {"not read here": torch.empty(2, device="meta")}, output(value))
    what = f"the output of layer 'block.0' is not finite ('hidden' is {value:g}), though its input is"
    assert told(watch) == (3, 1, what)


def test_parameter_that_is_not_finite_is_named_before_anything_else() -> None:
    watch, module = FiniteWatch(MODEL), nn.Linear(2, 2)
    with torch.no_grad():
        module.bias[1] = NAN
    watch.see_layer(1, module, 0, {"pixels": torch.tensor(NAN)}, output(NAN))
    assert told(watch) == (0, 1, "parameter 'bias' of layer 'block.0' is not finite (nan)")


def test_entry_of_the_samples_that_is_not_finite_is_named() -> None:
    watch = FiniteWatch(MODEL)
    watch.see_layer(1, nn.Identity(), 0, {"tokens": torch.ones(1).int(), "pixels": torch.tensor(INF)}, output(NAN))
    assert told(watch) == (0, 1, "entry 'pixels', which layer 'block.0' may read, is not finite (inf)")


@pytest.mark.parametrize(
    ("batch", "cause"), [({}, ""), ({"target": torch.tensor([0.0, NAN])}, "; entry 'target' is not, either (nan)")]
)
def test_loss_is_named_with_what_may_be_its_cause(batch: dict[str, Tensor], cause: str) -> None:
    watch = FiniteWatch(MODEL)
    watch.see_loss(2, 2, batch, torch.tensor(1.0))
    assert told(watch) is None
    watch.see_loss(2, 2, batch, torch.tensor(INF))
    assert told(watch) == (2, 2, f"the loss is not finite (inf), though the output of layer 'head' is{cause}")


def test_mask_of_minus_infinity_is_no_fault_and_an_activation_of_it_is() -> None:
    watch, mask = FiniteWatch(MODEL), torch.tensor([0.0, -INF])
    watch.see_layer(0, nn.Identity(), 0, {}, output(1.0, mask=mask))
    assert told(watch) is None
    watch.see_layer(0, nn.Identity(), 0, {}, {"hidden": mask.clone().requires_grad_()})
    assert told(watch) == (
        0, 0, "the output of layer 'embed' is not finite ('hidden' is -inf), though its input is"
    )  # fmt: skip


def test_first_layer_and_its_first_microbatch_win() -> None:
    watch = FiniteWatch(MODEL)
    for position, layer in ((3, 0), (1, 2), (2, 0), (1, 1), (3, 0)):
        watch.see_layer(layer, nn.Identity(), position, {}, output(NAN))
    assert watch.found is not None
    assert (watch.found.position, watch.found.layer_index) == (2, 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_stage_shows_what_its_layers_make_of_a_microbatch(checkpointing: bool) -> None:
    whole, watch = assemble(MODEL, seed=0), FiniteWatch(MODEL)
    layers = [StageLayer(index=index, module=module) for index, module in enumerate(whole.stack)]
    recomputed = len(layers) * checkpointing
    stage = Stage(MODEL, layers, device=CPU, autocast=None, seed=0, recomputed_layers=recomputed)
    batch = stack([Tokens()[0]])
    stage.forward(0, {}, batch, step=1, position=5, num_targets=5, watch=watch)
    stage.backward(0, {})
    assert watch.found is None
    with torch.no_grad():
        whole.layer("block.0").get_parameter("linear.weight")[0] = INF
    stage.forward(0, {}, batch, step=1, position=5, num_targets=5, watch=watch)
    assert told(watch) == (5, 1, "parameter 'linear.weight' of layer 'block.0' is not finite (inf)")
