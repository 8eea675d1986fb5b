"""Derived profiles against what is published, and their formulas on numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.derive import derive_profile, freeze
from resilient.templates.inputs.devices import DEVICES, cluster_of
from resilient.templates.inputs.known_models import MODELS
from resilient.templates.inputs.layer_work import layer_works
from resilient.templates.inputs.profile import LayerProfile, ModelProfile

PUBLISHED = {
    "bert-large": 335_174_458,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "gpt3-medium": 355_871_744,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2-vl-72b": 73_405_560_320,
}
"""Parameters of the released checkpoints; for GPT-3, which has none, of GPT-2's code at GPT-3's sizes."""


def parameters(profile: ModelProfile, unit: str = "") -> int:
    return sum(layer.parameter_bytes for layer in profile.layers if layer.name.startswith(unit)) // 2


def layer(profile: ModelProfile, name: str) -> LayerProfile:
    return profile.layers[profile.index(name)]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_published(model: str) -> None:
    assert parameters(derive_profile(model, "a40")) == PUBLISHED[model]


def test_parameters_of_a_multimodal_models_units() -> None:
    profile = derive_profile("qwen2-vl-7b", "a40")
    assert parameters(profile, "vision.") == 675_759_104
    assert parameters(profile, "llm.") == 7_615_616_512
    assert [each.name for each in profile.layers[32:36]] == [
        "vision.block.31",
        "vision.projector",
        "llm.embed",
        "llm.block.0",
    ]


@pytest.mark.parametrize("model", [model for model in MODELS if not MODELS[model].vision])
def test_training_flops_are_six_times_parameters_times_tokens_and_attention(model: str) -> None:
    known = MODELS[model]
    works = list(layer_works(model, known.microbatch, known.seq_len))
    tokens = known.microbatch * known.seq_len
    attention = sum(work.attention_flops for work in works)
    # Learnt positions, vectors, and a table beside the head's matrix are looked up or added.
    looked_up = 0 if known.tied else known.vocabulary * known.blocks.hidden
    flops = 3 * sum(work.forward_flops for work in works)
    assert flops - 3 * attention == pytest.approx(6 * (PUBLISHED[model] - looked_up) * tokens, rel=0.01)
    assert attention / flops < 0.1


def test_times_of_a_block_are_the_formulas() -> None:
    tokens, hidden, matrix = 2 * 2048, 4096, 12 * 4096**2
    flops_per_ms, bytes_per_ms = 0.5 * 149.7e9, 696e6
    attention = 4 * 2 * 2048**2 * hidden / 2
    norms, gelu = tokens * (8 + 12) * hidden, tokens * 4 * 4 * hidden
    block = layer(derive_profile("gpt3-6.7b", "a40"), "llm.block.7")
    alone = block.costs[0]
    assert alone.forward_ms == pytest.approx((2 * matrix * tokens + attention) / flops_per_ms + (norms + gelu) / 696e6)
    assert alone.backward_input_ms == pytest.approx(
        (2 * matrix * tokens + 2.5 * attention) / flops_per_ms + (norms + gelu) / bytes_per_ms
    )
    assert alone.backward_weight_ms == pytest.approx(2 * matrix * tokens / flops_per_ms)
    reduce_ms = 6 * 0.015 + 6 / 4 * (2 * tokens * hidden) / (0.8 * 32e6)
    assert block.costs[2].forward_ms == pytest.approx(
        (2 * matrix * tokens + attention) / 4 / flops_per_ms + (norms + gelu / 4) / bytes_per_ms + 2 * reduce_ms
    )
    assert block.costs[2].backward_weight_ms == pytest.approx(alone.backward_weight_ms / 4)


def test_a_lookup_costs_its_memory_traffic() -> None:
    tokens, hidden = 2 * 2048, 4096
    embed = layer(derive_profile("gpt3-6.7b", "a40", microbatch=2, seq_len=2048), "llm.embed").costs[0]
    bytes_per_ms = DEVICES["a40"].memory_bytes_per_s / 1e3
    # Of a token the gradient that comes, of 2 bytes, and its row of the table's, of 4, read and written; forward, its
    # row and its position's are read and their sum is written, all of 2 bytes.
    assert embed.backward_weight_ms == pytest.approx(tokens * hidden * (2 + 4 + 4) / bytes_per_ms)
    assert embed.forward_ms == pytest.approx(tokens * hidden * 6 / bytes_per_ms)


def test_what_enters_the_language_model_are_ids_and_what_pictures_became() -> None:
    found = derive_profile("qwen2-vl-7b", "a40", microbatch=2, seq_len=2048)
    vision = MODELS["qwen2-vl-7b"].vision
    assert vision is not None
    pictures = 2 * vision.patches // vision.patches_per_token
    assert layer(found, "llm.embed").input_bytes == 8 * 2 * 2048 + 2 * 3584 * pictures
    assert layer(found, "llm.block.0").input_bytes == 2 * 3584 * 2 * 2048


def test_few_tokens_take_the_time_to_read_the_matrices() -> None:
    block = layer(derive_profile("llama3-8b", "h100", seq_len=1), "llm.block.0")
    matrix = (block.parameter_bytes - 2 * 2 * 4096) // 2
    assert block.costs[0].forward_ms == pytest.approx(2 * matrix / 3350e6, rel=1e-3)
    assert block.costs[0].backward_weight_ms == pytest.approx(8 * matrix / 3350e6, rel=1e-3)


@pytest.mark.parametrize("model", ["gpt2-medium", "gpt3-6.7b"])
def test_activations_of_a_gpt_block_are_korthikantis_with_flash_attention(model: str) -> None:
    known = MODELS[model]
    tokens = known.microbatch * known.seq_len
    block = layer(derive_profile(model, "a40"), "llm.block.0")
    for degree, cost in zip((1, 2, 4, 8), block.costs, strict=True):
        log_sum_exp = 4 * tokens * known.blocks.num_heads
        expected = tokens * known.blocks.hidden * (10 + 24 / degree) + log_sum_exp / degree
        assert cost.activation_bytes == expected
    assert block.input_bytes == 2 * tokens * known.blocks.hidden


@pytest.mark.parametrize(
    ("model", "degrees"),
    [("gpt3-6.7b", (1, 2, 4, 8)), ("gpt2-xl", (1,)), ("qwen2-vl-7b", (1, 2, 4)), ("llama3-70b", (1, 2, 4, 8))],
)
def test_degrees_divide_the_heads_of_all_blocks(model: str, degrees: tuple[int, ...]) -> None:
    assert derive_profile(model, "h100").tp_degrees == degrees


def test_more_devices_are_faster_over_nvlink_but_never_for_nothing() -> None:
    costs = layer(derive_profile("llama3-70b", "h100"), "llm.block.0").costs
    for of, degree, more in zip(costs, (1, 2, 4), costs[1:], strict=False):
        assert more.forward_ms < of.forward_ms < 2 * more.forward_ms, degree
        assert more.backward_input_ms < of.backward_input_ms < 2 * more.backward_input_ms, degree
        assert more.activation_bytes < of.activation_bytes < 2 * more.activation_bytes, degree


@pytest.mark.parametrize("device", DEVICES)
def test_a_faster_device_is_faster_in_every_layer(device: str) -> None:
    """H200: none is faster in anything."""
    for mine, best in zip(
        derive_profile("gpt3-medium", device).layers, derive_profile("gpt3-medium", "h200").layers, strict=True
    ):
        assert mine.costs[0].forward_ms >= best.costs[0].forward_ms > 0, mine.name
        assert mine.backward_ms() >= best.backward_ms() > 0, mine.name


def test_a_step_of_the_whole_model_on_one_device_reaches_a_plausible_part_of_the_peak() -> None:
    for model, known in MODELS.items():
        profile = derive_profile(model, "a100-80gb")
        flops = 3 * sum(work.forward_flops for work in layer_works(model, known.microbatch, known.seq_len))
        ms = sum(each.costs[0].forward_ms + each.backward_ms() for each in profile.layers)
        assert 0.45 < flops / (ms / 1e3) / 312e12 < 0.6, model


def test_state_is_18_bytes_a_parameter_and_a_tied_matrix_is_the_embeddings() -> None:
    profile = derive_profile("llama3.2-1b", "a40")
    assert sum(each.state_bytes + each.gradient_bytes for each in profile.layers) == 18 * PUBLISHED["llama3.2-1b"]
    assert layer(profile, "llm.head").shares == ("llm.embed",)
    assert layer(profile, "llm.head").parameter_bytes == 2 * 2048
    assert layer(derive_profile("llama3-8b", "a40"), "llm.head").shares == ()


def test_memory_of_one_pipeline_is_plausible() -> None:
    """70 B parameters on 16 devices of 80 GB: state alone fits, and does not on 8."""
    profile = derive_profile("llama3-70b", "h100")
    state = sum(each.state_bytes + each.gradient_bytes for each in profile.layers)
    memory = cluster_of("h100", 8).memory_bytes
    assert memory is not None
    assert 16 < state / memory < 24


def test_costs_grow_with_microbatch_and_sequence() -> None:
    one, two = (layer(derive_profile("gpt3-2.7b", "a40", microbatch=m), "llm.block.0").costs[0] for m in (1, 2))
    assert two.forward_ms == pytest.approx(2 * one.forward_ms)
    assert two.activation_bytes == 2 * one.activation_bytes
    short, long = (layer(derive_profile("gpt3-2.7b", "a40", seq_len=s), "llm.block.0").costs[0] for s in (1024, 2048))
    assert long.forward_ms > 2.05 * short.forward_ms, "attention is quadratic"
    assert long.activation_bytes == 2 * short.activation_bytes


def test_frozen_tower_has_no_backward_and_a_frozen_llm_behind_a_projector_only_one_for_inputs() -> None:
    whole = derive_profile("qwen2-vl-7b", "a100-80gb")
    alone = derive_profile("qwen2-vl-7b", "a100-80gb", frozen=["vision", "llm"])
    tower, projector, block = (layer(alone, name) for name in ("vision.block.3", "vision.projector", "llm.block.3"))
    assert tower.backward_ms() == 0
    assert {cost.activation_bytes for cost in tower.costs} == {0}
    assert block.costs == tuple(replace(cost, deferred_bytes=0) for cost in layer(whole, "llm.block.3").costs)
    assert projector.backward_ms() == projector.costs[0].backward_weight_ms > 0
    assert block.backward_ms() == block.costs[0].backward_input_ms
    assert (block.optimizer_bytes, block.gradient_bytes) == (0, 0)
    assert block.parameter_bytes == layer(whole, "llm.block.3").parameter_bytes
    assert layer(whole, "vision.block.3").backward_ms() > 0
    assert alone.source == "derived: qwen2-vl-7b, a100-80gb, microbatch 1, 2048 tokens, frozen llm, vision"
    assert freeze(whole, ["llm", "vision"]).layers == alone.layers


def test_profile_survives_json_and_is_the_same_every_time() -> None:
    profile = derive_profile("gpt3-6.7b", "a40")
    assert profile.source == "derived: gpt3-6.7b, a40, microbatch 2, 2048 tokens"
    assert ModelProfile.from_json(profile.to_json()) == profile
    assert derive_profile("gpt3-6.7b", "a40").digest == profile.digest


def test_cluster_of_known_devices() -> None:
    cluster = cluster_of("a40", 8)
    assert (cluster.devices_per_node, cluster.memory_bytes) == (8, int(0.9 * 48 * 2**30))
    assert cluster.inter_node == Link(latency_ms=0.02, bytes_per_s=20e9)
    slow = Link(latency_ms=0.1, bytes_per_s=1e9)
    assert cluster_of("a40", 8, inter_node=slow).inter_node == slow


ALL_MODELS = ", ".join(MODELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model": "gpt3-6.7B-"},
            f"model must be one of {ALL_MODELS}, got 'gpt3-6.7B-'; did you mean 'gpt3-6.7b'?",
        ),
        ({"model": "x"}, f"model must be one of {ALL_MODELS}, got 'x'; choose one of these"),
        (
            {"device": "A100"},
            "device must be one of a40, a100-40gb, a100-80gb, h100, h200, v100-32gb, l4, got 'A100'; "
            "did you mean 'a100-40gb' or 'a100-80gb'?",
        ),
        ({"frozen": ["vison"]}, "frozen must be one of vision, projector, llm, got 'vison'; did you mean 'vision'?"),
        (
            {"frozen": ["llm", "vision", "projector"]},
            "frozen must leave a unit to train, got llm, vision, projector; leave one out",
        ),
        ({"microbatch": 0}, "microbatch must be >= 1, got 0; 1 is usual for qwen2-vl-7b"),
        (
            {"seq_len": 1024},
            "seq_len must be 1025 to 32768 for qwen2-vl-7b (1024 of a sample's tokens are its picture's), got 1024; "
            "2048 is usual",
        ),
        (
            {"model": "gpt2-medium", "seq_len": 2048},
            "seq_len must be 1 to 1024 for gpt2-medium, got 2048; 1024 is usual",
        ),
    ],
)
def test_bad_arguments_are_refused_with_what_there_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        derive_profile(**{"model": "qwen2-vl-7b", "device": "a40", **arguments})
