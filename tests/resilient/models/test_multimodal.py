"""Families against the whole transformers models, padding, tied embeddings, messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

from resilient.data import collate_multimodal
from resilient.errors import SampleError
from resilient.models.layer import initialize_layer
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from tests.resilient.small import assemble

TEXT: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 1,
    "initializer_range": 0.2,
}
LANGUAGE_MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TEXT, tie_word_embeddings=False)),
    "llama tied": (LlamaForCausalLM, LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TEXT)),
    "qwen2 half sliding": (
        Qwen2ForCausalLM,
        Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TEXT, head_dim=4)),
    "mistral": (MistralForCausalLM, MistralConfig(**TEXT, sliding_window=None)),
    "mistral sliding": (MistralForCausalLM, MistralConfig(**TEXT, sliding_window=3)),
}
VISION_MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (ViTModel, ViTConfig(**VISION)),
    "siglip": (SiglipVisionModel, SiglipVisionConfig(**VISION)),
    "clip": (CLIPVisionModel, CLIPVisionConfig(**VISION)),
}


def saved(model_class: Any, config: Any, folder: Path) -> Any:
    """Return a transformers model with random values, biases and norms included, and save it to ``folder``."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def vlm(**encoder: Any) -> MultimodalModule:
    return MultimodalModule(
        encoders={"vision": EncoderModule(SiglipVisionConfig(**VISION), placeholder_id=3, **encoder)},
        language_model=LlamaConfig(**TEXT, tie_word_embeddings=True),
    )


def sample(rows: int, cols: int, *answer: int, seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.tensor([1] + [3] * rows * cols + list(answer) + [2])
    labels = torch.full_like(tokens[1:], -100)
    labels[rows * cols :] = tokens[1 + rows * cols :]
    pixels = torch.randn(1, 4 * rows, 4 * cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"input_ids": tokens[:-1], "labels": labels, "vision.pixels": pixels}


@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_language_model_equals_transformers_given_its_checkpoint(case: str, tmp_path: Path) -> None:
    reference = saved(*LANGUAGE_MODELS[case], tmp_path)
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    ours = assemble(MultimodalModule(encoders={}, language_model=tmp_path), seed=0)
    with torch.no_grad():
        torch.testing.assert_close(ours({"input_ids": tokens})["logits"], reference(tokens).logits)


@pytest.mark.parametrize("case", VISION_MODELS)
def test_encoder_equals_transformers_given_its_checkpoint(case: str, tmp_path: Path) -> None:
    reference = saved(*VISION_MODELS[case], tmp_path)
    encoder = EncoderModule(tmp_path, placeholder_id=3)
    model = assemble(MultimodalModule(encoders={"vision": encoder}, language_model=LlamaConfig(**TEXT)), seed=0)
    pixels = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    batch = {"vision.pixels": pixels, "vision.sizes": torch.full((3, 2), 12)}
    activations: dict[str, Tensor] = {}
    for name in ("vision.embed", "vision.block.0", "vision.block.1"):
        activations = model.layer(name)(activations, batch)
    with torch.no_grad():
        ours = model.layer("vision.projector").get_submodule("norm")(activations["vision.hidden"])
        torch.testing.assert_close(ours, reference(pixels).last_hidden_state)


def test_placeholders_become_the_features_in_order() -> None:
    model = assemble(vlm(), seed=0, dtype=torch.float64)
    batch = collate_multimodal([sample(1, 2, 5), sample(2, 1, 6, 7, seed=1)])
    activations: dict[str, Tensor] = {}
    for name in model.names[:4]:
        activations = model.layer(name)(activations, batch)
    hidden = model.layer("llm.embed")(activations, batch)["hidden"]
    features = activations["vision.features"].unflatten(1, (2, 2))
    torch.testing.assert_close(hidden[0, 1:3], features[0, 0, :])
    torch.testing.assert_close(hidden[1, 1:3], features[1, :, 0])
    torch.testing.assert_close(hidden[1, 3], model.layer("llm.embed").get_parameter("embed_tokens.weight")[6])


@pytest.mark.parametrize("config", [config for _, config in VISION_MODELS.values()], ids=VISION_MODELS)
def test_padding_changes_neither_loss_nor_gradients(config: Any) -> None:
    model = MultimodalModule(
        encoders={"vision": EncoderModule(config, placeholder_id=3)}, language_model=LlamaConfig(**TEXT)
    )
    whole = assemble(model, seed=0, dtype=torch.float64)
    samples = [sample(1, 2, 5), sample(3, 1, 6, 7, 8, seed=1), sample(2, 3, 9, seed=2)]
    alone = torch.stack([whole.loss(collate_multimodal([one])) for one in samples]).sum()
    together = whole.loss(collate_multimodal(samples))
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    parameters = [p for p in whole.parameters() if p.requires_grad]
    for left, right in zip(
        torch.autograd.grad(together, parameters), torch.autograd.grad(alone, parameters), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_padding_bytes_are_never_read() -> None:
    whole = assemble(vlm(), seed=0, dtype=torch.float64)
    batch = collate_multimodal([sample(1, 2, 5), sample(3, 3, 6, seed=1)])
    before = whole.loss(batch)
    batch["vision.pixels"][0, :, 4:] = 7.0
    batch["input_ids"][0, 4:] = 9
    torch.testing.assert_close(whole.loss(batch), before, rtol=1e-12, atol=1e-12)


def test_microbatch_without_images_gives_every_parameter_a_finite_gradient() -> None:
    whole = assemble(vlm(), seed=0)
    text = {"input_ids": torch.tensor([1, 5, 6]), "labels": torch.tensor([5, 6, 2])}
    whole.loss(collate_multimodal([text])).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())


def test_several_images_and_encoders_run_in_one_chain() -> None:
    model = MultimodalModule(
        encoders={
            "vision": EncoderModule(ViTConfig(**VISION), placeholder_id=3),
            "depth": EncoderModule(SiglipVisionConfig(**VISION), placeholder_id=4, projector="linear"),
        },
        language_model=LlamaConfig(**TEXT),
    )
    image = torch.randn(1, 4, 8)
    tokens = torch.tensor([1, 3, 3, 4, 4, 3, 3, 5])
    one = {"input_ids": tokens, "labels": tokens, "vision.pixels": [image, image], "depth.pixels": image}
    model.check(one, "sample 0")
    whole = assemble(model, seed=0)
    assert [spec.name for spec in model.layers] == list(whole.names)
    assert whole.names[4:9] == ("depth.embed", "depth.block.0", "depth.block.1", "depth.projector", "llm.embed")
    whole.loss(collate_multimodal([one])).backward()
    assert all(parameter.grad is not None for parameter in whole.parameters())


def test_bfloat16_autocast_runs_forward_and_backward() -> None:
    whole = assemble(vlm(), seed=0)
    batch = collate_multimodal([sample(1, 2, 5)])
    reference = whole.loss(batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = whole.loss(batch)
    loss.backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, reference, rtol=0.05, atol=0.05)


def test_tied_head_uses_the_embedding_and_adds_to_its_gradient() -> None:
    model = vlm()
    assert model.layers[-1].tied == {"lm_head.weight": ("llm.embed", "embed_tokens.weight")}
    whole = assemble(model, seed=0)
    weight = whole.layer("llm.embed").get_parameter("embed_tokens.weight")
    assert whole.layer("llm.head").get_parameter("lm_head.weight") is weight
    whole.loss(collate_multimodal([sample(1, 2, 5)])).backward()
    assert weight.grad is not None
    assert weight.grad[19].abs().sum() > 0  # never read, only a column of the head


@pytest.mark.parametrize("config", [config for _, config in VISION_MODELS.values()], ids=VISION_MODELS)
def test_initial_values_depend_on_seed_and_layer_alone(config: Any) -> None:
    model = MultimodalModule(
        encoders={"vision": EncoderModule(config, placeholder_id=3)}, language_model=LlamaConfig(**TEXT)
    )
    whole = assemble(model, seed=5)
    for spec in reversed(model.layers):
        torch.manual_seed(99)
        alone, other = initialize_layer(spec, seed=5), initialize_layer(spec, seed=6)
        named = dict(whole.layer(spec.name).named_parameters())
        assert all(torch.equal(value, named[name]) for name, value in alone.named_parameters())
        assert not all(torch.equal(value, named[name]) for name, value in other.named_parameters())
    first, second = (whole.layer(f"llm.block.{i}").get_parameter("block.mlp.up_proj.weight") for i in (0, 1))
    assert not torch.equal(first, second)


def test_initial_values_follow_transformers_rule() -> None:
    config = SiglipVisionConfig(**{**VISION, "hidden_size": 64, "num_attention_heads": 4})
    llm = LlamaConfig(**{**TEXT, "hidden_size": 64, "vocab_size": 500}, initializer_range=0.05)
    model = MultimodalModule(encoders={"vision": EncoderModule(config, placeholder_id=3)}, language_model=llm)
    whole, theirs = assemble(model, seed=0), dict(SiglipVisionModel(config).named_parameters())
    for layer, name, key in (
        ("vision.embed", "positions", "embeddings.position_embedding.weight"),
        ("vision.block.0", "block.mlp.fc1.weight", "encoder.layers.0.mlp.fc1.weight"),
    ):
        mine = whole.layer(layer).get_parameter(name)
        reference = next(value for full, value in theirs.items() if full.endswith(key))
        assert mine.std().item() == pytest.approx(reference.std().item(), rel=0.2)
    embedding = whole.layer("llm.embed").get_parameter("embed_tokens.weight")
    assert embedding[1:].std().item() == pytest.approx(0.05, rel=0.05)
    assert embedding[0].abs().sum() == 0
    assert torch.equal(whole.layer("llm.head").get_parameter("norm.weight"), torch.ones(64))


def test_layers_can_be_sized_on_meta() -> None:
    for spec in vlm().layers:
        with torch.device("meta"):
            module = spec.build()
        assert all(parameter.is_meta for parameter in module.parameters())
        assert not list(module.buffers())


def test_frozen_parts_need_no_gradient() -> None:
    model = vlm(frozen=True)
    trainable = {spec.name for spec in model.layers if any(p.requires_grad for p in spec.build().parameters())}
    assert trainable == {"vision.projector", "llm.embed", "llm.block.0", "llm.block.1", "llm.head"}
    projector = model.layers[3].build()
    assert {name for name, p in projector.named_parameters() if not p.requires_grad} == {"norm.weight", "norm.bias"}


def test_digest_tells_configs_apart() -> None:
    assert vlm().digest() == vlm().digest()
    assert vlm().digest() != vlm(frozen=True).digest()


def replace(one: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    return {**one, **{key.replace("vision_", "vision."): value for key, value in changes.items()}}


GOOD = sample(1, 2, 5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            replace(GOOD, vision_pixels=torch.zeros(1, 12, 8)),
            "vision gives 6 features but input_ids holds 2 placeholder tokens (id 3); make both equal",
        ),
        (
            {key: value for key, value in GOOD.items() if key != "vision.pixels"},
            "vision gives 0 features but input_ids holds 2 placeholder tokens (id 3); put its images into the entry "
            "'vision.pixels', of which there is none beside ['input_ids', 'labels']",
        ),
        (
            replace(GOOD, vision_pixels=torch.zeros(1, 4, 16)),
            "vision image must be at most 12 x 12 pixels, got 4 x 16; shrink it or raise image_size in the config of "
            "its model",
        ),
        (
            replace(GOOD, vision_pixels=torch.zeros(1, 4, 7)),
            "vision image must be a multiple of 4 x 4 pixels, got 4 x 7; pad it",
        ),
        (
            replace(GOOD, vision_pixels=torch.zeros(3, 4, 8)),
            "vision image must have shape [1, height, width], got (3, 4, 8); reshape it",
        ),
        (
            replace(GOOD, labels=torch.full_like(GOOD["labels"], -100)),
            "must have at least one target, got labels of -100 only; leave it out",
        ),
        (
            replace(GOOD, input_ids=torch.ones(17).long(), labels=torch.ones(17).long()),
            "must have at most 16 tokens, got 17; shorten it",
        ),
        (
            replace(GOOD, input_ids=torch.tensor([1, 3, 3, 20])),
            "input_ids must be tokens from 0 to 19, got 20; use the model's tokenizer",
        ),
        (
            replace(GOOD, labels=torch.tensor([-100, -100, 5, -1])),
            "labels must be tokens from 0 to 19, got -1; use the model's tokenizer",
        ),
        (
            replace(GOOD, labels=torch.tensor([1])),
            "input_ids and labels must have one shape [seq], got (4,) and (1,); make them equal",
        ),
        ({"input_ids": GOOD["input_ids"]}, "must hold 'labels', got ['input_ids']; add it"),
    ],
)
def test_bad_sample_is_named(bad: dict[str, Any], message: str) -> None:
    vlm().check(GOOD, "sample 17 of Digits")
    with pytest.raises(SampleError, match=f"^{re.escape('sample 17 of Digits: ' + message)}$"):
        vlm().check(bad, "sample 17 of Digits")


def test_unknown_family_is_named() -> None:
    message = (
        "language_model must be of a supported family (llama, mistral, qwen2, qwen3), got gpt2 (GPT2Config); pass a "
        "config or a checkpoint folder of one of them"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MultimodalModule(encoders={}, language_model=GPT2Config())


def test_live_model_is_refused_with_the_fix() -> None:
    message = (
        "encoder must be a transformers config or a checkpoint folder, got a live ViTModel; pass its .config, or the "
        "folder of its save_pretrained(folder) to keep its weights (families: clip_vision_model, "
        "siglip_vision_model, vit)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EncoderModule(ViTModel(ViTConfig(**VISION)), placeholder_id=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EncoderModule("/nowhere", placeholder_id=3),
            "encoder must be a folder with config.json and safetensors files, got '/nowhere', which is no "
            "folder here; check the path",
        ),
        (
            lambda: EncoderModule(ViTConfig(**VISION), placeholder_id=3, projector="qformer"),
            "projector must be 'mlp' or 'linear', got 'qformer'; pass one of them",
        ),
        (
            lambda: MultimodalModule(
                encoders={"vision": EncoderModule(ViTConfig(**VISION), placeholder_id=20)},
                language_model=LlamaConfig(**TEXT),
            ),
            "placeholder_id of vision must be a token below 20, got 20; choose another",
        ),
    ],
)
def test_wrong_argument_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    saved(LlamaForCausalLM, LlamaConfig(**TEXT), tmp_path)
    LlamaConfig(**{**TEXT, "num_hidden_layers": 3}).save_pretrained(tmp_path)
    model = MultimodalModule(encoders={}, language_model=tmp_path)
    with pytest.raises(ValueError, match=r"must hold 'model\.layers\.2\..*', got none; its config does not fit$"):
        initialize_layer(model.layers[3], seed=0)
