"""The text example: its data, its model, and what it learns."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from resilient.data import collate_of
from resilient.examples import text_chain as example
from tests.resilient.small import assemble

TEXT = example.read_text(Path(__file__))


def test_samples_suit_the_model_and_weigh_what_they_say() -> None:
    model = example.build_model(window=16)
    dataset = example.TextDataset(TEXT, "train", 5, window=16)
    for i in range(len(dataset)):
        sample = dataset[i]
        model.check(sample, f"sample {i}")
        assert sample["input"].shape == sample["target"].shape == (dataset.num_targets(i),)
        assert torch.equal(sample["input"][1:], sample["target"][:-1])


def test_a_sample_is_a_function_of_split_and_index() -> None:
    one, again = (example.TextDataset(TEXT, "train", 9, window=16) for _ in range(2))
    for i in reversed(range(9)):
        assert torch.equal(one[i]["input"], again[i]["input"])
    assert any(not torch.equal(one[i]["input"], one[j]["input"]) for i, j in itertools.combinations(range(9), 2))


def test_no_window_of_training_touches_the_end_of_the_text() -> None:
    text = torch.tensor([0] * 90 + [1] * 10, dtype=torch.uint8)
    train, held_out = (example.TextDataset(text, split, 200, window=4) for split in ("train", "held-out"))
    assert {int(value) for i in range(200) for part in train[i].values() for value in part} == {0}
    assert {int(value) for i in range(200) for part in held_out[i].values() for value in part} == {1}


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^text must be longer than 10 windows, got 100 bytes and windows of 10; "
    ) as e:
        example.TextDataset(torch.zeros(100, dtype=torch.uint8), "held-out", 1, window=10)
    assert str(e.value).endswith("; give a longer one, or a smaller --window")


def test_what_comes_later_does_not_show() -> None:
    model = assemble(example.build_model(window=8, width=16, num_blocks=2), seed=0, dtype=torch.float64)
    seen = torch.randint(example.NUM_BYTES, (2, 8), generator=torch.Generator().manual_seed(0))
    other = seen.clone()
    other[:, 5:] = 255 - other[:, 5:]
    one, two = (model({"input": tokens})["hidden"] for tokens in (seen, other))
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5:], two[:, 5:])


def test_the_reported_loss_is_the_mean_over_bytes() -> None:
    model = assemble(example.build_model(window=8, width=16, num_blocks=1), seed=0)
    with torch.no_grad():
        model.layer("head").get_submodule("module.1").get_parameter("weight").zero_()
        model.layer("head").get_submodule("module.1").get_parameter("bias").zero_()
    dataset = example.TextDataset(TEXT, "held-out", 7, window=8)
    assert example.held_out_loss(model, dataset) == pytest.approx(math.log(example.NUM_BYTES))


def test_sources_of_the_standard_library_are_text_enough() -> None:
    assert len(example.read_text(None)) > 1_000_000


def test_few_steps_beat_guessing_by_frequency() -> None:
    torch.manual_seed(0)
    text = example.read_text(None)
    model = assemble(example.build_model(window=32, width=32, num_blocks=1), seed=0)
    dataset = example.TextDataset(text, "train", 2400, window=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(80):
        batch = collate_of(dataset)([dataset[i] for i in range(30 * step, 30 * step + 30)])
        optimizer.zero_grad()
        (model.loss(batch) / batch["target"].numel()).backward()
        optimizer.step()
    shares = torch.bincount(text.long()) / len(text)
    entropy = -float((shares * shares.clamp(min=1e-12).log()).sum())
    assert example.held_out_loss(model, example.TextDataset(text, "held-out", 100, window=32)) < entropy - 0.2
