"""A layer's state is one buffer that modules, optimizer and copies all see."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from resilient.models.layer import LayerSpec, initialize_layer
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from tests.resilient.small import CPU, VOCABULARY, WIDTH, TiedModel, draw

SLOTS = ("exp_avg", "exp_avg_sq")


def spec_of(module: nn.Module, **tied: tuple[str, str]) -> LayerSpec:
    return LayerSpec(name="layer", unit="llm", build=lambda: module, initialize=draw, tied=tied)


def state_of(spec: LayerSpec, dtype: torch.dtype = torch.float32) -> LayerState:
    return LayerState(spec, BufferLayout.of(spec), SLOTS, dtype, CPU)


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    return module


def test_layout_puts_trainable_parameters_first_and_leaves_out_tied_ones() -> None:
    layout = BufferLayout.of(spec_of(half_frozen(), **{"1.bias": ("embed", "weight")}))
    assert [(entry.name, entry.offset, entry.trainable) for entry in layout.entries] == [
        ("1.weight", 0, True),
        ("0.weight", 4, False),
        ("0.bias", 10, False),
    ]
    assert (layout.num_trainable, layout.num_frozen, layout.numel(num_slots=2)) == (4, 8, 20)


def test_layout_refuses_running_statistics() -> None:
    message = (
        "layer 'layer' must not keep running statistics, got BatchNorm1d; use LayerNorm or GroupNorm, or keep those it "
        "has with eval()"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BufferLayout.of(spec_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    assert BufferLayout.of(spec_of(nn.BatchNorm1d(2, track_running_stats=False))).num_trainable == 4
    assert BufferLayout.of(spec_of(nn.BatchNorm1d(2).eval())).num_trainable == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_values_are_those_of_the_layer_and_slots_are_zero(dtype: torch.dtype) -> None:
    spec = TiedModel().layers[1]
    state = state_of(spec, dtype)
    state.buffer.fill_(7)
    state.initialize(seed=5)
    for name, expected in initialize_layer(spec, 5, dtype).named_parameters():
        torch.testing.assert_close(state.parameters[name], expected, rtol=0, atol=0)
    assert not any(slot.any() for slot in state.slots.values())


def test_module_gradient_and_optimizer_share_the_buffer() -> None:
    spec = TiedModel().layers[1]
    state = state_of(spec)
    state.initialize(seed=0)
    module = bind(spec, {spec.name: state}, CPU)
    module.get_parameter("linear.weight").sum().backward()
    expected = [float(entry.name == "linear.weight") for entry in state.layout.entries for _ in range(entry.numel)]
    assert state.grad.tolist() == expected
    with torch.no_grad():
        for window in state.windows:
            window.parameter.fill_(3)
    assert all(parameter.eq(3).all() for parameter in module.parameters())
    assert state.buffer[: state.layout.num_trainable].eq(3).all()


def test_bound_modules_share_tied_parameters() -> None:
    model = TiedModel(num_blocks=0)
    states = {spec.name: state_of(spec) for spec in model.layers}
    embed, head = (bind(spec, states, CPU) for spec in model.layers)
    assert head.get_parameter("weight") is embed.get_parameter("weight")
    assert [entry.name for entry in states["head"].layout.entries] == ["shift"]


def test_building_a_layer_does_not_draw_its_values() -> None:
    spec = LayerSpec(name="layer", unit="llm", build=lambda: nn.Linear(4, 4), initialize=draw)
    states = {"layer": state_of(spec)}
    before = torch.get_rng_state()
    bind(spec, states, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_loads_what_another_gave() -> None:
    spec = TiedModel().layers[0]
    source, target = state_of(spec), state_of(spec)
    source.buffer.copy_(torch.arange(source.buffer.numel()))
    target.load(source.tensors())
    assert torch.equal(source.buffer, target.buffer)


@pytest.mark.parametrize(
    ("tensors", "got"),
    [
        ({}, "nothing"),
        ({"weight": torch.zeros(2)}, "torch.float32 of shape (2,)"),
        ({"weight": torch.zeros(VOCABULARY, WIDTH).double()}, f"torch.float64 of shape ({VOCABULARY}, {WIDTH})"),
    ],
)
def test_load_names_what_does_not_fit(tensors: dict[str, torch.Tensor], got: str) -> None:
    message = (
        f"'weight' of layer 'embed' must be torch.float32 of shape ({VOCABULARY}, {WIDTH}), got {got}; "
        "the checkpoint belongs to another model, optimizer or precision"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        state_of(TiedModel().layers[0]).load(tensors)
