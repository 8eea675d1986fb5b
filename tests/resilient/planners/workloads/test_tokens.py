"""Token rules against the processors of transformers, which they must equal for every size."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import (
    WhisperFeatureExtractor,
)
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from resilient.planners.costs.encoder_models import ENCODERS
from resilient.planners.workloads.tokens import (
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    RULES,
    AnyRes,
    DynamicTiles,
    Frames,
    SmartResize,
    count_text,
    tokens_of_words,
)
from resilient.templates.common.arrays import Ints


def sizes(count: int = 3000) -> tuple[Ints, Ints]:
    """Widths and heights of all magnitudes, common ones and ratios up to 100 : 1."""
    draw = np.random.default_rng(0)
    area, ratio = 2 ** draw.uniform(5, 12.5, count), 10 ** draw.uniform(-1, 1, count)
    common = [(640, 480), (480, 640), (336, 336), (384, 384), (672, 336), (448, 896), (1, 1), (10, 1000), (6000, 5800)]
    widths = np.maximum(area * ratio, 1).astype(np.int64)
    heights = np.maximum(area / ratio, 1).astype(np.int64)
    return (
        np.concatenate([widths, [width for width, _ in common]]),
        np.concatenate([heights, [height for _, height in common]]),
    )


def pairs() -> list[tuple[int, int]]:
    widths, heights = sizes()
    return list(zip(widths.tolist(), heights.tolist(), strict=True))


@pytest.mark.parametrize("max_pixels", [1280 * 28 * 28, 16384 * 28 * 28, 256 * 28 * 28])
def test_smart_resize_is_that_of_qwen2_vl(max_pixels: int) -> None:
    encoded = SmartResize(max_pixels=max_pixels)(*sizes())
    theirs = [smart_resize(height, width, max_pixels=max_pixels) for width, height in pairs()]
    assert encoded.lengths.tokens.tolist() == [height * width // 14**2 for height, width in theirs]
    assert encoded.outputs.tolist() == [height * width // 28**2 for height, width in theirs]
    np.testing.assert_array_equal(encoded.lengths.squares, encoded.lengths.tokens**2)
    np.testing.assert_array_equal(encoded.lengths.longest, encoded.lengths.tokens)
    assert encoded.outputs.max() <= max_pixels // 28**2


@pytest.mark.parametrize(("width", "height"), [(640, 480), (14, 14), (20, 600), (3000, 1200), (333, 1000)])
def test_qwen2_vls_own_processor_makes_as_many_patches(width: int, height: int) -> None:
    found = Qwen2VLImageProcessorPil().preprocess(Image.new("RGB", (width, height)), return_tensors="np")
    rule = RULES["qwen2-vl"]
    assert isinstance(rule, SmartResize)
    encoded = rule(np.array([width]), np.array([height]))
    assert encoded.lengths.tokens.tolist() == [len(found["pixel_values"])] == found["image_grid_thw"].prod(1).tolist()
    assert encoded.outputs.tolist() == [len(found["pixel_values"]) // 4]


def test_smart_resize_keeps_to_the_ratio_of_sides() -> None:
    encoded = SmartResize()(np.array([200]), np.array([1]))
    height, width = smart_resize(1, 200)
    assert encoded.outputs.tolist() == [height * width // 28**2]
    message = "the sides of a picture must differ at most 200-fold, got 3 x 601 pixels; crop it, or leave it out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SmartResize()(np.array([640, 3]), np.array([480, 601]))


def llava_next(width: int, height: int) -> int:
    """Tokens by LLaVA-NeXT's processor, with the strategy that leaves out the class token."""
    processor: Any = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[(336 * a, 336 * b) for a, b in LLAVA_NEXT.canvases]),
        patch_size=14,
        num_additional_image_tokens=1,
    )
    processor._get_unpadded_features = MethodType(LlavaNextProcessor._get_unpadded_features, processor)
    return LlavaNextProcessor._get_number_of_features(processor, height, width, 336, 336) - 1


def llava_onevision(width: int, height: int) -> int:
    processor: Any = SimpleNamespace(
        image_processor=SimpleNamespace(
            image_grid_pinpoints=[(384 * a, 384 * b) for a in range(1, 7) for b in range(1, 7)]
        ),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    processor._get_unpadded_features = MethodType(LlavaOnevisionProcessor._get_unpadded_features, processor)
    return LlavaOnevisionProcessor._get_number_of_features(processor, height, width, 384, 384)


@pytest.mark.parametrize(
    ("rule", "theirs", "patches"), [(LLAVA_NEXT, llava_next, 577), (LLAVA_ONEVISION, llava_onevision, 729)]
)
def test_any_resolution_is_that_of_llava(rule: AnyRes, theirs: Callable[[int, int], int], patches: int) -> None:
    encoded = rule(*sizes())
    assert encoded.outputs.tolist() == [theirs(width, height) for width, height in pairs()]
    canvases = [(rule.side * down, rule.side * across) for down, across in rule.canvases]
    chosen = [select_best_resolution((height, width), canvases) for width, height in pairs()]
    tiles = np.array([height * width // rule.side**2 for height, width in chosen])
    np.testing.assert_array_equal(encoded.lengths.tokens, (tiles + 1) * patches)
    np.testing.assert_array_equal(encoded.lengths.squares, (tiles + 1) * patches**2)
    assert set(encoded.lengths.longest.tolist()) == {patches}


def test_dynamic_tiles_are_those_of_internvl() -> None:
    encoded = DynamicTiles()(*sizes())
    grids = [get_optimal_tiled_canvas((height, width), (448, 448), 1, 12) for width, height in pairs()]
    sequences = np.array([1 if a * b == 1 else a * b + 1 for a, b in grids])
    np.testing.assert_array_equal(encoded.outputs, sequences * 256)
    np.testing.assert_array_equal(encoded.lengths.tokens, sequences * 1025)
    np.testing.assert_array_equal(encoded.lengths.squares, sequences * 1025**2)


@pytest.mark.parametrize("seconds", [0.025, 0.5, 1.065, 3.333, 12.485, 29.99, 30.0])
def test_frames_of_a_window_are_those_of_qwen2_audio(seconds: float) -> None:
    extractor = WhisperFeatureExtractor(feature_size=128)
    samples = np.zeros(round(seconds * 16000), dtype=np.float32)
    mask = extractor(samples, sampling_rate=16000, padding="max_length", return_attention_mask=True).attention_mask
    without_weights: Any = None
    frames, outputs = Qwen2AudioEncoder._get_feat_extract_output_lengths(without_weights, mask.sum())
    encoded = Frames()(np.array([seconds]))
    assert encoded.lengths.tokens.tolist() == [frames]
    assert encoded.outputs.tolist() == [outputs]


def test_long_clips_become_windows() -> None:
    encoded = Frames()(np.array([0.0, 60.0, 71.0]))
    assert encoded.lengths.tokens.tolist() == [0, 3000, 3550]
    assert encoded.lengths.squares.tolist() == [0, 2 * 1500**2, 2 * 1500**2 + 550**2]
    assert encoded.lengths.longest.tolist() == [0, 1500, 1500]
    assert encoded.outputs.tolist() == [0, 1500, 1775]


def test_every_encoder_has_a_rule_of_its_kind() -> None:
    assert RULES.keys() == ENCODERS.keys()
    assert [name for name, rule in RULES.items() if isinstance(rule, Frames)] == ["whisper-large-v3"]


def test_text_is_counted_by_its_tokenizer_or_by_words() -> None:
    texts = ["a cat sits on a mat", ""]
    assert count_text(texts).tolist() == [8, 0]
    assert count_text(texts, lambda text: list(text.encode())).tolist() == [19, 0]
    assert tokens_of_words([0, 1, 75]).tolist() == [0, 2, 100]
