"""The example's data and its scoring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from resilient.data import IGNORED_LABEL
from resilient.examples import digits_vlm as example


@pytest.mark.parametrize("patch", [4, 8])
def test_samples_suit_the_model_and_weigh_what_they_say(patch: int) -> None:
    model = example.build_model(patch)
    dataset = example.DigitsDataset("train", 50, (example.PIXELS // patch) ** 2)
    for i in range(len(dataset)):
        sample = dataset[i]
        model.check(sample, f"sample {i}")
        assert int((sample["labels"] != IGNORED_LABEL).sum()) == dataset.num_targets(i)
    assert {dataset.num_targets(i) for i in range(50)} == set(range(2, 10))


def test_a_sample_is_a_function_of_split_seed_and_index() -> None:
    one, again = (example.DigitsDataset("train", 10, 1, seed=3) for _ in range(2))
    other_seed, other_split = (
        example.DigitsDataset("train", 10, 1, seed=4),
        example.DigitsDataset("held-out", 10, 1, seed=3),
    )
    for i in reversed(range(10)):
        assert all(torch.equal(one[i][key], again[i][key]) for key in one[i])
    for other in (other_seed, other_split):
        assert any(not torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in range(10))


def test_no_held_out_scan_is_trained_on() -> None:
    train, held_out = (example.DigitsDataset(split, 1, 1) for split in ("train", "held-out"))
    assert len(train.digits) + len(held_out.digits) == 1797
    assert len(held_out.digits) == 1797 // 5
    distances = torch.cdist(held_out.pixels.flatten(1), train.pixels.flatten(1))
    assert distances.min() > 0


class Oracle(torch.nn.Module):
    """Reads the right digits off the images, except that it takes every nine for an eight."""

    def __init__(self, dataset: example.DigitsDataset) -> None:
        super().__init__()
        self.anything = torch.nn.Parameter(torch.zeros(1))
        self.answers = dict(zip(map(_key, dataset.pixels), dataset.digits.tolist(), strict=True))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        num_digits = batch["vision.pixels"].shape[-1] // example.PIXELS
        position = batch["input_ids"].shape[1] - 1 - num_digits
        logits = torch.zeros(*batch["input_ids"].shape, example.ZERO + 10)
        for row, image in enumerate(batch["vision.pixels"]):
            scan = image[0, :, position * example.PIXELS :][:, : example.PIXELS]
            logits[row, -1, example.ZERO + min(8, self.answers[_key(scan)])] = 1
        return {"logits": logits}


def _key(scan: Tensor) -> tuple[float, ...]:
    return tuple(scan.flatten().tolist())


def test_accuracy_is_the_share_of_digits_read_right() -> None:
    dataset = example.DigitsDataset("held-out", 40, 1)
    digits = torch.cat([dataset[i]["labels"][dataset[i]["labels"] > example.EOS] for i in range(40)]) - example.ZERO
    expected = float((digits != 9).double().mean())
    assert 0.5 < expected < 1
    assert example.read_digits(Oracle(dataset), dataset) == pytest.approx(expected)
