"""A generator behind the language model: packed, padded and in stages it trains alike; its loss; what is refused."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, SiglipVisionConfig, ViTConfig, ViTModel

from resilient.data import collate_multimodal
from resilient.errors import SampleError
from resilient.models.layer import Activations, WholeModel
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.generator import GeneratorModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.pipeline.stage import Stage, StageLayer
from tests.resilient.models.test_multimodal import TEXT, VISION, VISION_MODELS, saved
from tests.resilient.models.test_packing import check_equal, gradients, packed, unit_model
from tests.resilient.small import CPU, assemble

SEEN, DRAWN = 3, 4


def make_sample(seen: list[tuple[int, int]], drawn: list[tuple[int, int]], num_words: int, seed: int) -> dict[str, Any]:
    """Return images to read, words, then images to draw, and a word behind them."""
    generator = torch.Generator().manual_seed(seed)

    def pictures(grids: list[tuple[int, int]]) -> list[Tensor]:
        return [torch.randn(1, 4 * r, 4 * c, generator=generator, dtype=torch.float64) for r, c in grids]

    num_seen, num_drawn = (sum(r * c for r, c in grids) for grids in (seen, drawn))
    words = torch.randint(5, 20, (num_words + 1,), generator=generator)
    ids = torch.cat((torch.full((num_seen,), SEEN), words[:-1], torch.full((num_drawn,), DRAWN), words[-1:]))
    labels = torch.randint(5, 20, ids.shape, generator=generator)
    labels[ids == SEEN] = labels[ids == DRAWN] = -100
    images = {"vision.pixels": pictures(seen), "image.pixels": pictures(drawn)}
    return {"input_ids": ids, "labels": labels, **{entry: each for entry, each in images.items() if each}}


GRIDS = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3)), max_size=2)
SAMPLES = st.lists(
    st.builds(make_sample, seen=GRIDS, drawn=GRIDS, num_words=st.integers(1, 4), seed=st.integers(0, 99)),
    min_size=1,
    max_size=4,
)


def drawing_model(family: str = "siglip", **options: Any) -> MultimodalModule:
    return MultimodalModule(
        encoders={"vision": EncoderModule(ViTConfig(**VISION), placeholder_id=SEEN)},
        language_model=LlamaConfig(**{**TEXT, "max_position_embeddings": 64}),
        generators={"image": GeneratorModule(VISION_MODELS[family][1], placeholder_id=DRAWN, **options)},
        labels="shifted",
    )


@cache
def whole_model(family: str = "siglip", **options: Any) -> WholeModel:
    return assemble(drawing_model(family, **options), seed=0, dtype=torch.float64)


@pytest.mark.parametrize("family", VISION_MODELS)
@given(samples=SAMPLES)
@settings(max_examples=12)
def test_packed_loss_and_gradients_are_those_of_padded_samples(family: str, samples: list[dict[str, Any]]) -> None:
    whole = whole_model(family)
    check_equal(whole, whole.loss(packed(unit_model(whole), samples)), whole.loss(collate_multimodal(samples)))


def test_loss_is_the_weighted_sum_of_what_text_and_pictures_add_alone() -> None:
    samples = [make_sample([], drawn, 3, seed) for seed, drawn in enumerate(([(2, 3)], [], [(1, 1), (1, 2)]))]
    whole, heavy = whole_model(), whole_model(loss_weight=2.5)
    batch = collate_multimodal(samples)
    made = whole(batch)
    words = batch["labels"] != -100
    text = torch.nn.functional.cross_entropy(made["logits"][words], batch["labels"][words], reduction="sum")
    errors = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        if "image.pixels" not in sample:
            continue
        drawn = whole(collate_multimodal([sample]))["image.drawn"]
        for image, patches in zip(sample["image.pixels"], drawn, strict=True):
            for row in range(image.shape[1] // 4):
                for column in range(image.shape[2] // 4):
                    patch = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                    width = max(each.shape[2] // 4 for each in sample["image.pixels"])
                    errors += (patches[row * width + column] - patch.flatten()).square().mean()
    assert errors > 1
    torch.testing.assert_close(whole.loss(batch), text + errors)
    torch.testing.assert_close(heavy.loss(batch), text + 2.5 * errors)
    model = unit_model(whole)
    assert [model.num_targets(sample) for sample in samples] == [4 + 6, 4, 4 + 3]
    assert model.lengths(samples[2]) == {"vision": [], "llm": [7], "image": [1, 2]}
    assert model.units == {"vision": (), "llm": ("vision",), "image": ("llm",)}


def test_microbatch_without_pictures_gives_every_parameter_of_the_generator_a_gradient_of_zero() -> None:
    whole, samples = whole_model(), [make_sample([(1, 1)], [], 3, seed=0)]
    for batch in (collate_multimodal(samples), packed(unit_model(whole), samples)):
        found = {name: each for name, each in gradients(whole, whole.loss(batch)).items() if _layer(whole, name) > 7}
        assert len(found) > 10
        assert not any(each.any() for each in found.values())


def _layer(whole: WholeModel, parameter: str) -> int:
    return int(parameter.split(".")[1])


def test_what_is_drawn_depends_on_what_is_read_and_written_before_alone() -> None:
    whole, one = whole_model(), make_sample([(1, 2)], [(2, 2)], 3, seed=0)
    behind, before, seen = ({**one, "input_ids": one["input_ids"].clone()} for _ in range(3))
    for other, place in ((behind, -1), (before, 2)):
        other["input_ids"][place] = 24 - other["input_ids"][place]
    seen["vision.pixels"] = [-one["vision.pixels"][0]]
    drawn, *others = (whole(collate_multimodal([each]))["image.drawn"] for each in (one, behind, before, seen))
    assert [torch.equal(drawn, each) for each in others] == [True, False, False]


@pytest.mark.parametrize("frozen", ["nothing", "decoder", "language model", "all but the projections"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_stages_train_as_the_whole_model_wherever_they_are_cut(
    frozen: str, is_packed: bool, checkpointing: bool
) -> None:
    parts = {"nothing": (), "decoder": ("image",), "language model": ("llm",)}.get(frozen, ("vision", "llm", "image"))
    model = MultimodalModule(
        encoders={"vision": EncoderModule(ViTConfig(**VISION), placeholder_id=SEEN, frozen="vision" in parts)},
        language_model=LlamaConfig(**{**TEXT, "max_position_embeddings": 64}),
        frozen_language_model="llm" in parts,
        generators={
            "image": GeneratorModule(SiglipVisionConfig(**VISION), placeholder_id=DRAWN, frozen="image" in parts)
        },
    )
    samples = [make_sample([(1, 2)], drawn, 3, seed) for seed, drawn in enumerate(([(2, 3)], [], [(1, 2)]))]
    expected = assemble(model, seed=0, dtype=torch.float64)
    batch = packed(model, samples) if is_packed else collate_multimodal(samples)
    (expected.loss(batch) / 7).backward()
    names = [spec.name for spec in model.layers]
    head = names.index("llm.head")
    for borders in ((head,), (head + 1,), (head + 2,), (3, head, head + 1)):
        whole = assemble(model, seed=0, dtype=torch.float64)
        loss = _through_stages(whole, batch, (0, *borders, len(names)), checkpointing=checkpointing)
        torch.testing.assert_close(loss, expected.loss(batch).detach(), rtol=1e-12, atol=1e-12)
        for name, parameter in whole.named_parameters():
            other = expected.get_parameter(name).grad
            assert (parameter.grad is None) == (other is None), name
            if other is not None:
                torch.testing.assert_close(parameter.grad, other, rtol=1e-11, atol=1e-12)


def _through_stages(
    whole: WholeModel, batch: dict[str, Tensor], cut: tuple[int, ...], *, checkpointing: bool
) -> Tensor:
    """Train one microbatch, whose loss is divided by 7, and return its loss."""
    stages = [
        Stage(
            whole.model,
            [StageLayer(index=index, module=whole.stack[index]) for index in range(first, end)],
            device=CPU,
            autocast=None,
            seed=0,
            recomputed_layers=(end - first) * checkpointing,
        )
        for first, end in pairwise(cut)
    ]
    sent: Activations = {}
    total = torch.zeros((), dtype=torch.float64)
    for stage in stages:
        assert "logits" not in sent, "what the loss alone reads goes no further"
        received = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in sent.items()}
        sent, loss = stage.forward(0, received, batch, step=1, position=0, num_targets=7)
        total = total if loss is None else total + loss.sum()
    back: dict[str, Tensor] = {}
    for stage in reversed(stages):
        back = stage.backward(0, back)
    return total


def test_decoder_of_a_checkpoint_gives_blocks_positions_and_norm(tmp_path: Path) -> None:
    reference = saved(ViTModel, ViTConfig(**VISION), tmp_path)
    model = MultimodalModule(
        encoders={},
        language_model=LlamaConfig(**TEXT),
        generators={"image": GeneratorModule(tmp_path, placeholder_id=DRAWN)},
    )
    whole = assemble(model, seed=0)
    table = whole.layer("image.embed").get_parameter("positions")
    torch.testing.assert_close(table, reference.embeddings.position_embeddings[0, 1:])
    torch.testing.assert_close(whole.layer("image.head").get_parameter("norm.weight"), reference.layernorm.weight)
    hidden = torch.randn(1, 4, 12)
    batch = {"image.positions": torch.arange(4), "image.segments": torch.tensor([4])}
    ours = whole.layer("image.block.1")({"image.hidden": hidden}, batch)["image.hidden"]
    block = reference.encoder.layer[1] if hasattr(reference, "encoder") else reference.layers[1]
    with torch.no_grad():
        theirs = block(hidden)
    torch.testing.assert_close(ours, theirs if isinstance(theirs, Tensor) else theirs[0])
    assert list(model.contents()) == ["image/model.safetensors"]


GOOD = make_sample([(1, 2)], [(1, 2)], 2, seed=0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {key: value for key, value in GOOD.items() if key != "image.pixels"},
            "sample 0: image is to make 0 patches but input_ids holds 2 placeholder tokens (id 4); put its images into "
            "the entry 'image.pixels', of which there is none beside ['input_ids', 'labels', 'vision.pixels']",
        ),
        (
            {**GOOD, "image.pixels": [torch.zeros(1, 4, 12)]},
            "sample 0: image is to make 3 patches but input_ids holds 2 placeholder tokens (id 4); make both equal",
        ),
        (
            {**GOOD, "image.pixels": torch.zeros(1, 4, 7)},
            "sample 0: image image must be a multiple of 4 x 4 pixels, got 4 x 7; pad it",
        ),
    ],
)
def test_pictures_that_do_not_fit_the_text_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        drawing_model().check(bad, "sample 0")


def test_sample_of_pictures_alone_has_targets_and_one_of_nothing_has_none() -> None:
    model = drawing_model()
    alone = {**GOOD, "labels": torch.full_like(GOOD["labels"], -100)}
    model.check(alone, "sample 0")
    assert model.num_targets(alone) == 2
    nothing = make_sample([(1, 2)], [], 2, seed=0)
    nothing["labels"] = torch.full_like(nothing["labels"], -100)
    with pytest.raises(SampleError, match=r"^sample 0: must have at least one target, got labels of -100 only; "):
        model.check(nothing, "sample 0")


def test_pictures_to_make_must_be_normalised_too() -> None:
    bright = {**GOOD, "image.pixels": [255.0 * torch.ones(1, 4, 8)]}
    with pytest.raises(SampleError, match=r"^sample 0: image image must be normalised, got values up to 255; "):
        drawing_model().check_first({"sample 0": bright})


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ([], 'generators must map names to GeneratorModules, got a list; write {"vision": resilient.GeneratorModule'),
        (
            {"image": ViTConfig(**VISION)},
            "generators['image'] must be a GeneratorModule, got a ViTConfig; write {\"image\": resilient.Generator",
        ),
        (
            {"vision": GeneratorModule(ViTConfig(**VISION), placeholder_id=DRAWN)},
            "names of generators must differ from those of encoders, got 'vision'; ",
        ),
        (
            {"llm": GeneratorModule(ViTConfig(**VISION), placeholder_id=DRAWN)},
            "generator names must hold no dot and not be 'llm', got 'llm'; rename it",
        ),
        (
            {"image": GeneratorModule(ViTConfig(**VISION), placeholder_id=SEEN)},
            "placeholder_id of image must differ from that of vision, got 3; choose another",
        ),
        (
            {name: GeneratorModule(ViTConfig(**VISION), placeholder_id=DRAWN) for name in ("image", "sound")},
            "generators must be one at most, got image, sound; have one make all images",
        ),
    ],
)
def test_generators_that_do_not_fit_are_refused(generators: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        MultimodalModule(
            encoders={"vision": EncoderModule(ViTConfig(**VISION), placeholder_id=SEEN)},
            language_model=LlamaConfig(**TEXT),
            generators=generators,
        )


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), "heavy"])
def test_weight_that_is_no_number_above_zero_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"^loss_weight must "):
        GeneratorModule(ViTConfig(**VISION), placeholder_id=DRAWN, loss_weight=weight)


def test_digest_tells_generators_and_their_options_apart() -> None:
    models = [drawing_model(), drawing_model("vit"), drawing_model(loss_weight=2.0), drawing_model(frozen=True)]
    assert len({model.digest() for model in models}) == 4
