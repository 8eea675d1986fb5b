"""Lengths of samples: said by the data set or learnt, kept in the cache, and compared with what is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.data import Lazy, Sample
from resilient.data.lengths import LengthSums, SampleLengths
from resilient.errors import ArgumentError, SampleError

TEXT = {"llm": [3]}


class Pictures:
    """Sample i has i pictures of one to i patches, and three words; counts what is loaded."""

    def __init__(self, folder: Path = Path("pictures")) -> None:
        self.folder = folder
        self._loaded: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Sample:
        self._loaded.append(index)
        return {"input_ids": torch.zeros(3), "vision.pixels": [self._picture(i) for i in range(index)]}

    def _picture(self, index: int) -> Lazy:
        def load() -> torch.Tensor:
            raise AssertionError("shapes are known without it")

        return Lazy(load, (1, 4, 4 * (1 + index)), torch.float32)


class Model:
    """Measures what :class:`Pictures` gives; cannot be trained on sample 4."""

    units: Mapping[str, tuple[str, ...]] = {"vision": (), "llm": ("vision",)}

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        if len(sample["vision.pixels"]) == 4:
            raise SampleError(f"{name}: must have fewer pictures, got 4; leave one out")

    def lengths(self, sample: Mapping[str, Any]) -> dict[str, list[int]]:
        return {
            "vision": [image.shape[2] // 4 for image in sample["vision.pixels"]],
            "llm": [len(sample["input_ids"])],
        }

    def digest(self) -> str:
        return "a model"


class Said(Pictures):
    """Says its lengths itself; those of sample 2 are wrong, those of sample 3 no lengths."""

    def lengths(self, index: int) -> Any:
        return {0: {"vision": [], **TEXT}, 1: {"vision": [1], **TEXT}, 2: {"vision": [1, 1], **TEXT}, 3: 7}[index]


class SaidOther(Pictures):
    def lengths(self, index: int) -> Any:
        return {"image": [1], **TEXT}


class SaidZero(Pictures):
    def lengths(self, index: int) -> Any:
        return {"vision": [0], "llm": [3]}


def test_samples_are_loaded_once_and_remembered_by_the_next_run() -> None:
    first, second = Pictures(), Pictures()
    lengths = SampleLengths(first, Model())
    assert lengths.of([2, 0, 2]) == [{"vision": [1, 2], **TEXT}, TEXT, {"vision": [1, 2], **TEXT}]
    assert lengths.of([0, 1]) == [TEXT, {"vision": [1], **TEXT}]
    assert first._loaded == [2, 0, 1]
    assert SampleLengths(second, Model()).of([0, 1, 2, 3])[1:3] == [{"vision": [1], **TEXT}, {"vision": [1, 2], **TEXT}]
    assert second._loaded == [3]


def test_other_data_is_not_mistaken_for_it() -> None:
    SampleLengths(Pictures(), Model()).of([1])
    other = Pictures(Path("others"))
    SampleLengths(other, Model()).of([1])
    assert other._loaded == [1]


def test_a_line_that_was_cut_off_is_learnt_again() -> None:
    lengths = SampleLengths(Pictures(Path("cut")), Model())
    lengths.of([1, 2])
    lengths.file.write_bytes(lengths.file.read_bytes()[:-3])
    again = Pictures(Path("cut"))
    assert SampleLengths(again, Model()).of([1, 2]) == [{"vision": [1], **TEXT}, {"vision": [1, 2], **TEXT}]
    assert again._loaded == [2]
    last = Pictures(Path("cut"))
    assert SampleLengths(last, Model()).of([1, 2]) == [{"vision": [1], **TEXT}, {"vision": [1, 2], **TEXT}]
    assert last._loaded == []


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "resilient").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert SampleLengths(Pictures(), Model()).of([1]) == [{"vision": [1], **TEXT}]
    assert "the lengths of samples are not kept, the next run loads them again" in caplog.text


def test_what_the_data_set_says_needs_no_loading() -> None:
    dataset = Said()
    assert SampleLengths(dataset, Model()).of([0, 1]) == [TEXT, {"vision": [1], **TEXT}]
    assert dataset._loaded == []


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    SampleLengths(Pictures(Path("seeded")), Model()).of([1])
    assert torch.equal(torch.rand(1), expected)


def test_a_sample_that_cannot_be_trained_on_is_named() -> None:
    with pytest.raises(SampleError, match=r"^sample 4 of Pictures: must have fewer pictures, got 4; leave one out$"):
        SampleLengths(Pictures(), Model()).of([4])


def test_wrong_lengths_are_named_when_the_sample_is_loaded() -> None:
    dataset = Said()
    lengths = SampleLengths(dataset, Model())
    lengths.check(1, {"vision": [1], **TEXT}, "sample 1 of Said", {})
    message = (
        "sample 2 of Said: lengths(2) must be {'llm': [3], 'vision': [1, 2]}, those of the sample, got {'llm': [3], "
        "'vision': [1, 1]}; have Said.lengths return {'llm': [3], 'vision': [1, 2]} for it"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        lengths.check(2, {"vision": [1, 2], **TEXT}, "sample 2 of Said", {})


def test_a_sample_that_has_changed_is_named() -> None:
    lengths = SampleLengths(Pictures(Path("changed")), Model())
    lengths.of([1])
    message = (
        "sample 1 of Pictures: must have the lengths {'llm': [3], 'vision': [1]}, as when it was first loaded, got "
        "{'llm': [3]}; have its sizes depend on the index alone, or, if it was changed on purpose, delete "
        f"{lengths.file}"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        lengths.check(1, {"vision": [], **TEXT}, "sample 1 of Pictures", {})


@pytest.mark.parametrize(
    ("dataset", "index", "message"),
    [
        (
            Said(),
            3,
            "lengths(3) of Said must map units to lists of whole numbers, got 7; return {'vision': [tokens of each "
            "image], 'llm': [tokens of its text]}",
        ),
        (SaidZero(), 0, "lengths(0) of SaidZero must be >= 1, got 0; leave out sequences without tokens"),
        (
            SaidOther(),
            0,
            "lengths(0) of SaidOther must be of the model's units, vision, llm, got image; rename or leave out",
        ),
    ],
)
def test_what_is_no_lengths_is_refused(dataset: Pictures, index: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        SampleLengths(dataset, Model()).of([index])


def test_lengths_that_others_know_are_compared_without_loading_the_sample_again() -> None:
    dataset = Pictures(Path("elsewhere"))
    lengths, name = SampleLengths(dataset, Model()), "sample 1 of Pictures"
    found = {"vision": [1, 2], **TEXT}
    lengths.check(1, found, name, {"vision": LengthSums(3, 5), "audio": LengthSums(0, 0)})
    for wrong in (LengthSums(4, 5), LengthSums(3, 9)):
        message = (
            f"{name}: must have {wrong.tokens} tokens for vision (squares: {wrong.squares}), by which its step was "
            "planned, got [1, 2]; have its sizes depend on the index alone, or, if it was changed on purpose, delete "
            f"{lengths.file} on all nodes"
        )
        with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
            lengths.check(1, found, name, {"llm": LengthSums(3, 9), "vision": wrong})
    assert not dataset._loaded
