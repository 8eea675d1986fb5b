"""Derived cost models against the profiles of the same shapes, and shapes against the classes of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    InternVLVisionConfig,
    InternVLVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.encoder_models import ENCODERS, SHORT, units_of
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.known_models import MODELS
from resilient.templates.inputs.profile import LayerProfile

MODEL, DEVICE = "qwen2-vl-7b", "h100"


@pytest.mark.parametrize("device", ["a40", "h100"])
def test_times_are_those_of_the_profile(device: str) -> None:
    costs, profile = derive_costs(MODEL, device), derive_profile(MODEL, device, microbatch=8, seq_len=2048)
    for tp_index, tp in enumerate(profile.tp_degrees):
        forward, backward = np.empty(0), np.empty(0)
        for unit, tokens in zip(costs.units, (4096, 2048), strict=True):
            times = unit.layer_ms(8 * tokens, 8 * tokens**2, tp)
            forward, backward = np.append(forward, times[0]), np.append(backward, times[1])
        expected = [layer.costs[tp_index] for layer in profile.layers]
        np.testing.assert_allclose(forward, [cost.forward_ms for cost in expected], rtol=0.015)
        both = np.array([cost.backward_input_ms + cost.backward_weight_ms for cost in expected])
        both[0] = expected[0].backward_weight_ms  # the first layer's input needs no gradient
        embed = profile.index("llm.embed")
        np.testing.assert_allclose(np.delete(backward, embed), np.delete(both, embed), rtol=0.04)


def test_bytes_are_those_of_the_profile() -> None:
    costs, profile = derive_costs(MODEL, DEVICE), derive_profile(MODEL, DEVICE, microbatch=1, seq_len=2048)
    layers = [(unit, layer) for unit in costs.units for layer in unit.layers]
    assert [f"{unit.name}.{layer.name}" for unit, layer in layers] == [layer.name for layer in profile.layers]
    for (unit, layer), expected in zip(layers, profile.layers, strict=True):
        assert layer.parameter_bytes == expected.parameter_bytes
        assert layer.optimizer_bytes == expected.optimizer_bytes
        assert layer.gradient_bytes == expected.gradient_bytes
        tokens = 4096 if unit.name == "vision" else 2048
        for tp_index, tp in enumerate(profile.tp_degrees):
            kept = layer.curves[unit.index(tp, 1)].activation_bytes * tokens
            assert kept == pytest.approx(expected.costs[tp_index].activation_bytes, abs=1)


def meta_parameters(encoder: str) -> int:
    """Trained parameters of the tower in transformers, without what is on top for other uses."""
    shapes = {
        "clip-l-336": (1024, 4096, 24, 16),
        "siglip-so400m": (1152, 4304, 27, 16),
        "internvit-300m": (1024, 4096, 24, 16),
        "internvit-6b": (3200, 12800, 45, 25),
        "whisper-large-v3": (1280, 5120, 32, 20),
    }
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape = dict(zip(names, shapes[encoder], strict=True))
    with torch.device("meta"):
        if encoder == "clip-l-336":
            model = CLIPVisionModel(CLIPVisionConfig(image_size=336, patch_size=14, **shape))
        elif encoder == "siglip-so400m":
            model = SiglipVisionModel(SiglipVisionConfig(image_size=384, patch_size=14, vision_use_head=False, **shape))
        elif encoder == "whisper-large-v3":
            config = WhisperConfig(
                num_mel_bins=128, encoder_layers=32, encoder_attention_heads=20, d_model=1280, encoder_ffn_dim=5120
            )
            model = WhisperEncoder(config)
        else:
            config = InternVLVisionConfig(image_size=[448, 448], patch_size=[14, 14], attention_bias=True, **shape)
            model = InternVLVisionModel(config)
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize("encoder", [name for name in ENCODERS if name != "qwen2-vl"])
def test_towers_have_the_parameters_of_transformers(encoder: str) -> None:
    unit = derive_costs(f"{encoder}+llama3.2-1b", DEVICE).units[0]
    assert unit.layers[-1].name == "projector"
    tower = sum(layer.parameter_bytes for layer in unit.layers[:-1]) // 2
    assert tower == pytest.approx(meta_parameters(encoder), rel=0.001)


def test_projectors_have_the_parameters_of_the_published_ones() -> None:
    def projector(model: str) -> int:
        return derive_costs(model, DEVICE).units[0].layers[-1].parameter_bytes // 2

    # Beside the norm before it: LLaVA's two matrices, Qwen2-Audio's one, InternVL's two on four patches together.
    assert projector("clip-l-336+llama3-8b") == 1024 * 4096 + 4096 + 4096**2 + 4096 + 2 * 1024
    assert projector("whisper-large-v3+qwen2.5-7b") == 1280 * 3584 + 3584 + 2 * 1280
    assert projector("internvit-300m+qwen2.5-7b") == 4096 * 3584 + 3584 + 3584**2 + 3584 + 2 * 1024
    assert derive_costs("whisper-large-v3+qwen2.5-7b", DEVICE).units[0].output_bytes == 2 * 3584 / 2


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen2-vl-7b", 8.29), ("qwen2-vl-72b", 73.4), ("internvl2.5-38b", 38.4), ("internvl2.5-78b", 78.4)],
)
def test_whole_models_have_the_parameters_of_the_released_ones(model: str, billions: float) -> None:
    layers = [layer for unit in derive_costs(model, DEVICE).units for layer in unit.layers]
    assert sum(layer.parameter_bytes for layer in layers) / 2e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize("language", [name for name, known in MODELS.items() if known.vision is None])
def test_language_models_are_those_of_the_profiles(language: str) -> None:
    (unit,) = derive_costs(language, DEVICE).units
    assert unit.name == "llm"
    layers = derive_profile(language, DEVICE).layers
    assert unit.state_bytes == sum(layer.state_bytes + layer.gradient_bytes for layer in layers)


def test_degrees_divide_the_heads_of_their_unit() -> None:
    vision, llm = derive_costs(MODEL, DEVICE).units
    degrees = [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8)]
    assert vision.degrees == tuple(degrees)
    assert llm.degrees == tuple(degrees[:12])  # four key and value heads


def test_context_parallelism_divides_work_and_adds_gathering() -> None:
    llm = derive_costs("llama3-8b", DEVICE).units[0]
    block = llm.layers[1]
    alone, four = (block.curves[llm.index(1, cp)] for cp in (1, 4))
    link_bytes_per_ms, latency_ms = 0.8 * 450e6, 0.01
    gather = 3 / 4 * (2 * 2 * 8 * 128) / link_bytes_per_ms
    assert four.forward.attention == pytest.approx(alone.forward.attention / 4)
    assert four.forward.linear == pytest.approx(alone.forward.linear / 4 + gather)
    assert four.backward_input.linear == pytest.approx(alone.backward_input.linear / 4 + 2 * gather)
    assert four.backward_weight.linear == pytest.approx(alone.backward_weight.linear / 4)
    assert four.activation_bytes == pytest.approx(alone.activation_bytes / 4)
    assert four.forward.fixed > alone.forward.fixed + 3 * latency_ms - 1e-9
    # Groups of more than a node's eight devices speak over the network.
    inside, across = (block.curves[llm.index(tp, 8)].forward.linear for tp in (1, 2))
    own = [block.curves[llm.index(tp, 1)].forward.linear for tp in (1, 2)]
    gathered = 7 / 8 * (2 * 2 * 8 * 128)
    assert inside - own[0] / 8 == pytest.approx(gathered / link_bytes_per_ms)
    assert across - own[1] / 8 == pytest.approx(gathered / 2 / (0.8 * 50e6))


def work(unit: UnitCosts, tokens: int, tp: int, cp: int) -> float:
    return unit.work(tp, cp).call_ms(tokens, tokens**2)


@pytest.mark.parametrize("model", [MODEL, "whisper-large-v3+llama3.2-3b", "internvit-6b+qwen2.5-32b"])
def test_long_sequences_gain_by_more_devices_and_short_ones_do_not(model: str) -> None:
    for unit in derive_costs(model, DEVICE).units:
        longest = [work(unit, 2**18, tp, cp) for tp, cp in unit.degrees if tp == 1]
        assert longest == sorted(longest, reverse=True)
        assert work(unit, 16, 1, 8) > work(unit, 16, 1, 1)


def test_attention_is_apart() -> None:
    vision, llm = derive_costs(MODEL, DEVICE).units
    flops = 0.55 * 989.4e9
    assert vision.layers[1].curves[0].forward.attention == pytest.approx(4 * 1280 / flops)
    assert llm.layers[1].curves[0].forward.attention == pytest.approx(4 * 3584 / 2 / flops)
    assert {layer.curves[0].forward.attention for layer in (vision.layers[0], llm.layers[-1])} == {0.0}


def test_a_frozen_tower_leaves_its_projector_to_train() -> None:
    costs = derive_costs(MODEL, DEVICE, frozen=("vision", "llm"))
    vision, llm = costs.units
    assert [layer.name for layer in vision.layers if layer.trainable] == ["projector"]
    assert [layer.name for layer in vision.layers if layer.backward(0).linear] == ["projector"]
    assert not any(layer.trainable for layer in llm.layers)
    assert all(layer.input_gradient for layer in llm.layers)
    assert costs == derive_costs(MODEL, DEVICE, frozen=("vision", "llm"))
    none = derive_costs(MODEL, DEVICE, frozen=("vision", "vision.projector"))
    assert not any(layer.backward(0).linear for layer in none.units[0].layers)
    assert not none.units[1].layers[0].input_gradient
    assert costs.source == "derived: qwen2-vl-7b, h100, frozen llm, vision"


@pytest.mark.parametrize("frozen", [("vision",), ("llm",), ("vision", "llm"), ("projector",), ("vision", "projector")])
def test_frozen_layers_are_those_of_the_profile_that_templates_are_planned_with(frozen: tuple[str, ...]) -> None:
    def flags(layers: Iterable[UnitLayer | LayerProfile]) -> list[tuple[str, bool, bool, int]]:
        return [
            (each.name.split(".", 1)[-1] if isinstance(each, LayerProfile) else each.name, each.trainable,
             each.input_gradient, each.optimizer_bytes + each.gradient_bytes) for each in layers
        ]  # fmt: skip

    costs, profile = derive_costs(MODEL, DEVICE, frozen=frozen), derive_profile(MODEL, DEVICE, frozen=frozen)
    assert flags(layer for unit in costs.units for layer in unit.layers) == flags(profile.layers)


def test_cost_models_are_kept_as_json() -> None:
    costs = derive_costs("siglip-so400m+whisper-large-v3+llama3.2-3b", DEVICE)
    assert [unit.name for unit in costs.units] == ["vision", "audio", "llm"]
    again = CostModel.from_json(costs.to_json())
    assert again == costs
    assert again.digest == costs.digest != derive_costs("siglip-so400m+llama3.2-3b", DEVICE).digest


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("siglip+llama3-8b", f"encoder must be one of {', '.join(ENCODERS)}, got 'siglip'; "
         "did you mean 'siglip-so400m'?"),
        ("qwen2-vl+llama4", "language model must be one of "
         f"{', '.join(name for name, known in MODELS.items() if known.vision is None)}, got 'llama4'; "
         "did you mean 'llama3-8b'?"),
        ("qwen2-vl", f"model must be one of {', '.join(SHORT)}, "
         f"{', '.join(name for name, known in MODELS.items() if known.vision is None)}, got 'qwen2-vl'; "
         "did you mean 'qwen2-vl-7b' or 'qwen2-vl-72b'?"),
        ("clip-l-336+siglip-so400m+llama3-8b", "model must have encoders of different units, got "
         "'clip-l-336+siglip-so400m+llama3-8b' with vision, vision; leave one out"),
    ],
)  # fmt: skip
def test_unknown_models_are_named(model: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        units_of(model)
