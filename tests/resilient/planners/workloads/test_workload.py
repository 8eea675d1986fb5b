"""Generated workloads against the quantiles of the data sets they are made after, and files in their place."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.workloads.tokens import TOKENS_PER_WORD
from resilient.planners.workloads.workload import GENERATORS, judged_workload, workload
from resilient.templates.common.arrays import Ints

QWEN = "qwen2-vl-7b"
OMNI = "siglip-so400m+whisper-large-v3+qwen2.5-7b"
MANY = 20000


def outputs(samples: SampleTable) -> Ints:
    return samples.units["vision"].tokens // 4


def variation(values: Ints) -> float:
    return float(values.std() / values.mean())


def test_laion_has_its_quantiles() -> None:
    tokens = outputs(workload("laion", MANY, 0, QWEN))
    # Of the 8313 pictures themselves, by Qwen2-VL's rule.
    quantiles = np.quantile(tokens, [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
    np.testing.assert_allclose(quantiles, [9, 48, 108, 221, 520, 1230, 1254], rtol=0.06)
    assert variation(tokens) == pytest.approx(0.974, rel=0.05)


def test_coco_has_its_quantiles() -> None:
    samples = workload("coco", MANY, 0, QWEN)
    tokens = outputs(samples)
    np.testing.assert_allclose(
        np.quantile(tokens, [0.05, 0.25, 0.5, 0.75, 0.95, 0.99]), [216, 345, 345, 391, 460, 529], rtol=0.07
    )
    assert variation(tokens) == pytest.approx(0.198, rel=0.07)
    words = (samples.units["llm"].tokens - tokens) / TOKENS_PER_WORD
    np.testing.assert_allclose(np.quantile(words, [0.05, 0.5, 0.95, 0.99]), [8, 10, 14, 18], atol=1)


def test_librispeech_has_its_quantiles() -> None:
    samples = workload("librispeech", MANY, 0, "whisper-large-v3+llama3.2-3b")
    frames = samples.units["audio"].tokens
    np.testing.assert_allclose(
        np.quantile(frames / 50, [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]),
        [1.915, 2.286, 3.54, 5.485, 8.69, 16.27, 23.48],
        rtol=0.03,
    )
    assert variation(frames) == pytest.approx(0.678, rel=0.03)
    words = (samples.units["llm"].tokens - frames // 2) / TOKENS_PER_WORD
    np.testing.assert_allclose(np.quantile(words, [0.05, 0.25, 0.5, 0.75, 0.95]), [5, 9, 15, 25, 45], atol=1)
    assert np.corrcoef(frames, words)[0, 1] == pytest.approx(0.94, abs=0.02)


def equal(one: SampleTable, other: SampleTable) -> bool:
    def same(mine: Lengths, theirs: Lengths) -> bool:
        return mine.tokens.tolist() == theirs.tokens.tolist() and mine.squares.tolist() == theirs.squares.tolist()

    return one.names == other.names and all(same(one.units[unit], other.units[unit]) for unit in one.units)


@pytest.mark.parametrize("name", [*GENERATORS, "laion+librispeech"])
def test_the_seed_decides(name: str) -> None:
    samples = workload(name, 300, 7, OMNI, bad="drop")
    assert len(samples) == 300
    assert equal(samples, workload(name, 300, 7, OMNI, bad="drop"))
    assert not equal(samples, workload(name, 300, 8, OMNI, bad="drop"))
    assert samples.units["llm"].tokens.min() >= 1


@pytest.mark.parametrize("name", [*GENERATORS, "laion+librispeech"])
def test_asked_for_more_the_same_come_first(name: str) -> None:
    few, many = (workload(name, count, 7, OMNI, bad="drop") for count in (300, 1200))
    assert equal(few, many[:300])
    assert len(set(many.names)) == 1200


def test_composed_workloads_take_items_and_text_where_they_are() -> None:
    laion, speech = workload("laion", 500, 3, OMNI), workload("librispeech", 500, 3, OMNI)
    both = workload("laion+librispeech", 500, 3, OMNI)
    assert both.names == laion.names
    assert both.units["vision"].tokens.tolist() == laion.units["vision"].tokens.tolist()
    assert laion.units["audio"].tokens.max() == speech.units["vision"].tokens.max() == 0
    assert both.units["audio"].tokens.min() > 0
    # A model without ears has the same pictures, and the words all the same.
    seen = workload("laion+librispeech", 500, 3, "siglip-so400m+qwen2.5-7b")
    heard = both.units["llm"].tokens - seen.units["llm"].tokens
    np.testing.assert_array_equal(heard, both.units["audio"].tokens // 2)


def test_mixed_samples_are_of_one_kind_each() -> None:
    mixed = workload("mixed", 900, 0, OMNI)
    seen, heard = mixed.units["vision"].tokens > 0, mixed.units["audio"].tokens > 0
    assert (seen ^ heard).all()
    assert 0.6 < seen.mean() < 0.73
    kinds = {name.partition(":")[0] for name in mixed.names}
    assert kinds == {"laion", "coco", "librispeech"}
    assert all(name.startswith("librispeech") == bool(ear) for name, ear in zip(mixed.names, heard, strict=True))


def test_interleaved_samples_are_long() -> None:
    lengths = workload("interleaved", 2000, 0, QWEN).units["vision"]
    several = lengths.tokens > lengths.longest
    assert 0.7 < several.mean() < 0.8
    assert lengths.tokens.max() > 3 * lengths.longest.max()


def test_videos_are_pictures_of_one_size_a_second() -> None:
    samples = workload("video", MANY // 10, 0, QWEN)
    vision, text = samples.units["vision"], samples.units["llm"].tokens - outputs(samples)
    seconds = vision.tokens // vision.longest
    np.testing.assert_array_equal(vision.tokens, seconds * vision.longest)
    np.testing.assert_array_equal(vision.squares, seconds * vision.longest**2)
    assert (seconds.min(), np.median(seconds), seconds.max()) == (4, pytest.approx(25, abs=1.5), 120)
    # Frames have at most 768 tokens, and a video 16384, but for sides rounded to whole ones.
    assert vision.longest.max() // 4 == pytest.approx(768, rel=0.06)
    assert outputs(samples).max() == pytest.approx(16384, rel=0.12)
    assert np.median(text) == pytest.approx(100 * TOKENS_PER_WORD, rel=0.06)


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    rows = [f"p{index},{280 + 28 * index},280" for index in range(20)]
    path = tmp_path / "some+sizes.csv"
    path.write_text("\n".join(["image_name,width,height", *rows, "gone,1,1"]) + "\n")
    return path


def test_a_files_samples_are_drawn_without_repeating(sizes: Path, tmp_path: Path) -> None:
    plain = tmp_path / "sizes.csv"
    plain.write_text(sizes.read_text())
    samples = workload(f"{plain}+coco", 20, 0, QWEN, bad="drop")
    assert sorted(samples.names) == sorted(f"p{index}" for index in range(20))
    assert equal(samples, workload(f"{plain}+coco", 20, 0, QWEN, bad="drop"))
    more = workload(f"{plain}+coco", 50, 1, QWEN, bad="drop")
    assert len(more) == 50
    assert set(more.names) == set(samples.names)
    kept = workload(f"{plain}+coco", 21, 0, QWEN, bad="resize")
    assert "gone" in kept.names
    _, bad = judged_workload(f"{plain}+coco", 1, 0, QWEN, bad="drop")
    assert [(each.name, each.dropped) for each in bad] == [("gone", True)]
    with pytest.raises(ValueError, match=re.escape("got 1 of 21 that do not ('gone': a picture of 1 x 1 pixels")):
        workload(f"{plain}+coco", 1, 0, QWEN)


@pytest.mark.parametrize(("known", "different"), [(5, 5), (10, 10), (64, 10)])
def test_of_a_file_none_is_known_that_is_not(sizes: Path, tmp_path: Path, known: int, different: int) -> None:
    plain = tmp_path / "sizes.csv"
    plain.write_text(sizes.read_text())
    few, many = (workload(f"{plain}+coco", known + count, 0, QWEN, bad="drop", known=known).names for count in (7, 100))
    assert few == many[: known + 7]
    assert len(set(many[:known])) == different
    assert set(many[:known]) | set(many[known:]) == {f"p{index}" for index in range(20)}
    assert not set(many[:known]) & set(many[known:])


def test_a_file_of_one_sample_is_known(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("name,width,height,tokens\nonly,280,280,5\n")
    assert workload(path, 5, 0, QWEN, known=3).names == ("only",) * 5


def test_samples_of_two_files_are_joined_row_by_row(sizes: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(f'{{"id": {row}, "text": "{"word " * (row % 3)}"}}' for row in range(42)))
    (tmp_path / "sizes.csv").write_text(sizes.read_text())
    name = f"{tmp_path / 'sizes.csv'}+{texts}"
    samples, bad = judged_workload(name, 26, 0, QWEN, bad="drop", tokenizer=lambda text: [0] * len(text.split()))
    outputs = dict(zip(samples.names, (samples.units["vision"].tokens // 4).tolist(), strict=True))
    assert sorted({each.name for each in bad}) == sorted([*(f"p{row}" for row in range(0, 20, 3)), "gone"])
    assert set(outputs) == {f"p{row}" for row in range(20) if row % 3}
    text = samples.units["llm"].tokens - samples.units["vision"].tokens // 4
    assert text.tolist() == [int(each[1:]) % 3 for each in samples.names]


def test_what_a_workload_lacks_is_said(sizes: Path) -> None:
    for name, model, message in [
        (str(sizes), QWEN, f"samples of {sizes} must have text, got none; compose it with another: {sizes}+coco"),
        ("librispeech", QWEN, "samples of librispeech must have something for the encoders of 'qwen2-vl-7b' (vision), "
         "got audio; choose another model, or compose it with another workload"),
        ("imagenet", QWEN, "workload must be a file or one of laion, coco, librispeech, mixed, interleaved, "
         "video, got 'imagenet'; see its spelling"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            workload(name, 3, 0, model)
    with pytest.raises(ValueError, match=r"^num_samples must be >= 1, got 0; ask for one or more$"):
        workload("coco", 0, 0, QWEN)
