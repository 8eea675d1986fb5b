"""Cells of packed samples against the padded model in one process: losses, gradients, units apart, dropout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen2Config, SiglipVisionConfig, ViTConfig

from resilient.data import collate_multimodal
from resilient.data.seeding import sample_key
from resilient.errors import ArgumentError
from resilient.models.chain import Chain
from resilient.models.layer import Activations, WholeModel
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.models.packing import why_padded
from resilient.models.sample_dropout import SampleDropout
from tests.resilient.models.test_multimodal import LANGUAGE_MODELS, TEXT, VISION, VISION_MODELS
from tests.resilient.small import Tokens, assemble

Images = list[tuple[int, int]]
"""Rows and columns of patches of each."""

TOKENS = {"vision": 3, "depth": 4}


def make_sample(images: Mapping[str, Images], num_words: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    tokens: list[int] = []
    for unit, grids in images.items():
        pixels = [torch.randn(1, 4 * r, 4 * c, generator=generator, dtype=torch.float64) for r, c in grids]
        if pixels:
            made[f"{unit}.pixels"] = pixels
        for rows, cols in grids:
            tokens += [TOKENS[unit]] * rows * cols + [1]
    ids = torch.cat((torch.tensor(tokens, dtype=torch.int64), torch.randint(5, 20, (num_words,), generator=generator)))
    labels = torch.randint(0, 20, ids.shape, generator=generator)
    labels[: len(tokens)] = -100
    return {**made, "input_ids": ids, "labels": labels}


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3))
SAMPLES = st.lists(
    st.builds(
        make_sample,
        images=st.fixed_dictionaries(
            {"vision": st.lists(GRIDS, max_size=3), "depth": st.lists(GRIDS, max_size=1)},
        ),
        num_words=st.integers(1, 9),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=5,
)

MODELS: dict[str, tuple[Any, Any]] = {
    **{f"{name} with siglip": (config, VISION_MODELS["siglip"][1]) for name, (_, config) in LANGUAGE_MODELS.items()},
    **{f"llama with {name}": (LANGUAGE_MODELS["llama"][1], config) for name, (_, config) in VISION_MODELS.items()},
}


@cache
def whole_model(case: str, labels: Any = "shifted") -> WholeModel:
    language, vision = MODELS[case]
    encoders = {
        "vision": EncoderModule(vision, placeholder_id=3),
        "depth": EncoderModule(ViTConfig(**VISION), placeholder_id=4, projector="linear"),
    }
    model = MultimodalModule(encoders=encoders, language_model=language, labels=labels)
    return assemble(model, seed=0, dtype=torch.float64)


def unit_model(whole: WholeModel) -> MultimodalModule:
    assert isinstance(whole.model, MultimodalModule)
    return whole.model


def packed(model: Any, samples: Sequence[Mapping[str, Any]], indices: Sequence[int] | None = None) -> dict[str, Tensor]:
    keys = [sample_key(0, 1, index) for index in indices or range(len(samples))]
    batch: dict[str, Tensor] = {}
    for unit in model.units:
        batch |= model.collate_unit(unit, samples, keys)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def gradients(whole: WholeModel, loss: Tensor) -> dict[str, Tensor]:
    named = dict(whole.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def check_equal(whole: WholeModel, one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    left, right = gradients(whole, one), gradients(whole, other)
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", MODELS)
@given(samples=SAMPLES)
@settings(max_examples=20)
def test_packed_loss_and_gradients_are_those_of_padded_samples(case: str, samples: list[dict[str, Any]]) -> None:
    whole = whole_model(case)
    check_equal(whole, whole.loss(packed(unit_model(whole), samples)), whole.loss(collate_multimodal(samples)))


def made_apart(
    whole: WholeModel, samples: Sequence[Mapping[str, Any]], cells: Mapping[str, Sequence[Sequence[int]]]
) -> Tensor:
    """Return the loss where every unit processes cells of its own; features go to the samples' cells of ``llm``."""
    model = unit_model(whole)
    features: dict[str, dict[int, Tensor]] = {}
    total = torch.zeros((), dtype=torch.float64)
    for unit, read in model.units.items():
        stack = [whole.layer(spec.name) for spec in model.layers if spec.unit == unit]
        for cell in cells[unit]:
            batch = packed(model, [samples[index] for index in cell], cell)
            batch = {name: batch[name] for name in model.collate_unit(unit, [], [])}
            activations: Activations = {
                f"{name}.features": torch.cat(
                    [features[name][index] for index in cell] or [torch.zeros(0, 16).double()]
                )
                for name in read
            }
            for layer in stack:
                activations = layer(activations, batch)
            if unit == "llm":
                total = total + model.loss(activations, batch)
            else:
                sizes = [sum(model.lengths(samples[index])[unit]) for index in cell]
                made = activations[f"{unit}.features"].split(sizes) if sizes else ()
                features.setdefault(unit, {}).update(zip(cell, made, strict=True))
    return total


@given(samples=SAMPLES, data=st.data())
@settings(max_examples=30)
def test_units_with_cells_of_their_own_train_as_one_padded_model(
    samples: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = whole_model("mistral sliding with siglip")
    cells: dict[str, list[list[int]]] = {}
    for unit in unit_model(whole).units:
        order = data.draw(st.permutations(range(len(samples))))
        ends = data.draw(st.lists(st.integers(0, len(samples)), max_size=2).map(sorted))
        cells[unit] = [order[start:end] for start, end in pairwise([0, *ends, len(samples)])]
    check_equal(whole, made_apart(whole, samples, cells), whole.loss(collate_multimodal(samples)))


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_labels_are_predicted_after_the_same_tokens_as_padded(labels: Any) -> None:
    whole = whole_model("llama with vit", labels)
    samples = [make_sample({"vision": [(1, 2)] * images}, 2 + images, seed=images) for images in (0, 2, 1)]
    check_equal(whole, whole.loss(packed(unit_model(whole), samples)), whole.loss(collate_multimodal(samples)))


def test_an_empty_cell_gives_every_parameter_a_gradient_of_zero() -> None:
    whole = whole_model("llama with clip")
    loss = whole.loss(packed(unit_model(whole), []))
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(whole, loss).values())


def test_no_token_is_computed_twice_or_for_nothing() -> None:
    whole = whole_model("llama with clip")
    samples = [make_sample({"vision": [(3, 3)]}, 1, seed=0), make_sample({"vision": [(1, 1), (1, 2)]}, 9, seed=1)]
    seen: dict[str, tuple[int, ...]] = {}
    for name in whole.names:
        whole.layer(name).register_forward_hook(
            lambda _, __, output, name=name: seen.update({name: tuple(next(reversed(output.values())).shape)})
        )
    whole(packed(unit_model(whole), samples))
    assert seen["vision.block.0"] == (1, (9 + 1) + (1 + 1) + (2 + 1), 12)  # with a class token each
    assert seen["vision.projector"] == (9 + 1 + 2, 16)
    assert seen["llm.block.0"] == (1, (9 + 1 + 1) + (1 + 1 + 2 + 1 + 9), 16)


def test_attention_never_sees_a_mask_of_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, ...]] = []
    real = nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        computed.append((len(query), query.shape[2], key.shape[2]))
        return real(query, key, value, **rest)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    whole = whole_model("llama with siglip")
    samples = [make_sample({}, words, seed=words) for words in (4, 4, 7, 1)]
    whole(packed(unit_model(whole), samples))
    assert computed[-3:] == [(2, 4, 4), (1, 7, 7), (1, 1, 1)]  # of the last block


def dropping_model() -> WholeModel:
    config = ViTConfig(**VISION, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
    encoders = {"vision": EncoderModule(config, placeholder_id=3)}
    model = MultimodalModule(encoders=encoders, language_model=LlamaConfig(**TEXT))
    return assemble(model, seed=0, dtype=torch.float64)


def test_dropout_of_a_sample_is_the_same_whatever_lies_beside_it() -> None:
    whole = dropping_model()
    samples = [make_sample({"vision": [(2, 2), (1, 3)]}, 3, seed=index) for index in range(3)]
    apart = torch.stack([whole.loss(packed(unit_model(whole), [samples[index]], [index])) for index in (1, 2, 0)]).sum()
    check_equal(whole, whole.loss(packed(unit_model(whole), samples)), apart)


def test_dropout_differs_between_samples_steps_images_layers_and_calls() -> None:
    dropout = SampleDropout(0.3, "vision.block.0.dropout")
    other_layer = SampleDropout(0.3, "vision.block.1.dropout")
    model = unit_model(dropping_model())
    one = make_sample({"vision": [(1, 2), (1, 2)]}, 1, seed=0)
    keys = model.collate_unit("vision", [one, one], [sample_key(0, 1, 5), sample_key(0, 1, 6)])["vision.keys"]
    later = model.collate_unit("vision", [one], [sample_key(0, 2, 5)])["vision.keys"]
    row = torch.ones(1, 3, 4096)  # a class token, and two patches
    drawn: list[Tensor] = []
    for each, layer in ((keys[:3], dropout), (keys[3:6], dropout), (keys[6:9], dropout), (later[:3], other_layer)):
        layer.begin(each)
        drawn += [layer(row), layer(row)]
    dropout.begin(later[:3])
    patterns = torch.cat([*drawn, dropout(row)], dim=1)[0].bool().double()
    # of tokens that draw alone 0.3 are dropped, give or take 5 standard deviations, and no two have the same ones
    assert patterns.shape == (27, 4096)
    assert (patterns.mean(1) - 0.7).abs().max() < 5 * (0.3 * 0.7 / 4096) ** 0.5
    correlation = torch.corrcoef(patterns).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / 4096**0.5
    assert drawn[0].max().item() == pytest.approx(1 / 0.7)


def test_dropout_of_padded_samples_is_torchs_own() -> None:
    whole = dropping_model()
    batch = collate_multimodal([make_sample({"vision": [(2, 2)]}, 3, seed=0)])
    torch.manual_seed(1)
    loss = whole.loss(batch)
    for name, part in list(whole.named_modules()):
        if isinstance(part, SampleDropout):
            whole.set_submodule(name, nn.Dropout(part.p))
    torch.manual_seed(1)
    assert torch.equal(loss, whole.loss(batch))


@pytest.mark.parametrize(
    ("language", "vision", "reason"),
    [
        ({}, {}, None),
        (
            {"attention_dropout": 0.1},
            {},
            "llm has attention_dropout=0.1, which attention cannot draw for each sample alone",
        ),
        (
            {},
            {"attention_dropout": 0.2},
            "vision has attention_dropout=0.2, which attention cannot draw for each sample alone",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            {},
            "llm has rotary embeddings of type 'dynamic', which depend on the longest sequence beside a sample",
        ),
    ],
)
def test_what_cannot_be_packed_is_named(language: dict[str, Any], vision: dict[str, Any], reason: str | None) -> None:
    encoder = EncoderModule(SiglipVisionConfig(**VISION, **vision), placeholder_id=3)
    model = MultimodalModule(encoders={"vision": encoder}, language_model=Qwen2Config(**TEXT, **language))
    assert why_padded(model, Tokens()) == reason
    if reason is None:
        return
    message = f"model must allow its samples to be packed, got one whose {reason}; change that in its config, or pad: "
    with pytest.raises(ArgumentError, match=f"^{re.escape(message + 'collate(samples)')}$"):
        model.collate_unit("llm", [], [])


def test_images_without_values_are_packed_without() -> None:
    model = unit_model(whole_model("llama with clip"))
    sample = make_sample({"vision": [(1, 2)]}, 1, seed=0)
    sample["vision.pixels"] = [image.to("meta") for image in sample["vision.pixels"]]
    batch = model.collate_unit("vision", [sample], [1])
    assert (batch["vision.patches"].shape, batch["vision.patches"].is_meta) == ((2, 16), True)
    assert batch["vision.segments"].tolist() == [3]


def test_own_collates_and_other_models_keep_padding() -> None:
    class Own(Tokens):
        def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
            return collate_multimodal(samples)

    chain = Chain([nn.Linear(2, 2)], lambda output, _: output.sum())
    assert why_padded(whole_model("llama with vit").model, Own()) == "Own has a collate of its own"
    assert why_padded(chain, Tokens()) == "Chain has no collate_unit"


def test_units_say_what_they_read() -> None:
    model = unit_model(whole_model("llama with vit"))
    assert model.units == {"vision": (), "depth": (), "llm": ("vision", "depth")}
    assert model.lengths(make_sample({"vision": [(1, 2), (3, 3)]}, 4, seed=0)) == {
        "vision": [2, 9],
        "depth": [],
        "llm": [2 + 1 + 9 + 1 + 4],
    }
