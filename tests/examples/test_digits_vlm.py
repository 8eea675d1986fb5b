"""The example's data, its scoring, and what it learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from resilient.data import IGNORED_LABEL
from resilient.data.lengths import SampleLengths
from resilient.examples import digits_vlm as example
from tests.examples.learning import trained


def test_samples_suit_the_model_and_are_what_is_said_of_them() -> None:
    model = example.build_model()
    dataset = example.DigitsDataset("train", 400)
    lengths = SampleLengths(dataset, model)
    for i in range(len(dataset)):
        sample = dataset[i]
        model.check(sample, f"sample {i}")
        lengths.check(i, model.lengths(sample), f"sample {i}", {})
        assert int((sample["labels"] != IGNORED_LABEL).sum()) == dataset.num_targets(i)


def test_few_pages_hold_most_of_the_digits() -> None:
    dataset = example.DigitsDataset("train", 2000)
    pictured = [rows for i in range(2000) if (rows := dataset.lengths(i)["vision"])]
    digits = sorted(map(sum, pictured))
    assert (digits[0], digits[len(digits) // 2], digits[-1]) == (1, example.MEDIAN_DIGITS, example.MOST_DIGITS)
    assert sum(digits[-len(digits) // 10 :]) > sum(digits) / 3
    assert {length for rows in pictured for length in rows} == set(range(1, example.LONGEST_ROW + 1))
    assert max(map(len, pictured)) > 10
    assert 1 - len(pictured) / 2000 == pytest.approx(example.TYPED, abs=0.02)


def test_a_sample_is_a_function_of_split_seed_and_index() -> None:
    one, again = (example.DigitsDataset("train", 10, seed=3) for _ in range(2))
    other_seed, other_split = example.DigitsDataset("train", 10, seed=4), example.DigitsDataset("held-out", 10, seed=3)
    for i in reversed(range(10)):
        assert one[i].keys() == again[i].keys()
        torch.testing.assert_close(dict(one[i]), dict(again[i]), rtol=0, atol=0)
    for other in (other_seed, other_split):
        assert any(not torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in range(10))


def test_no_held_out_scan_is_trained_on() -> None:
    train, held_out = (example.DigitsDataset(split, 1) for split in ("train", "held-out"))
    assert len(train.digits) + len(held_out.digits) == 1797
    assert len(held_out.digits) == 1797 // 5
    distances = torch.cdist(held_out.pixels.flatten(1), train.pixels.flatten(1))
    assert distances.min() > 0


class Oracle(torch.nn.Module):
    """Knows what follows what it has read, except that it takes every nine for an eight."""

    def __init__(self) -> None:
        super().__init__()
        self.anything = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        following = batch["labels"].clamp(0, example.ZERO + 8)
        return {"logits": torch.nn.functional.one_hot(following, example.ZERO + 10).float()}


def test_accuracy_is_the_share_of_pictured_digits_read_right() -> None:
    dataset = example.DigitsDataset("held-out", 40)
    pictured = [dataset[i]["labels"] for i in range(40) if dataset.lengths(i)["vision"]]
    assert 20 < len(pictured) < 40
    digits = torch.cat(pictured)
    digits = digits[digits >= example.ZERO] - example.ZERO
    expected = float((digits != 9).double().mean())
    assert 0.5 < expected < 1
    assert example.read_digits(Oracle(), dataset) == pytest.approx(expected)


def test_few_steps_read_digits_that_were_never_seen() -> None:
    model = example.build_model()
    whole = trained(model, example.DigitsDataset("train", 50_000), steps=80)
    assert example.read_digits(whole, example.DigitsDataset("held-out", 200)) > 0.3, "guessing is a tenth"
