"""The example's data, its sounds, and what it learns from both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resilient.data import IGNORED_LABEL
from resilient.data.lengths import SampleLengths
from resilient.examples import digits_vlm
from resilient.examples import sight_and_sound as example
from tests.examples.learning import trained


def test_samples_suit_the_model_and_are_what_is_said_of_them() -> None:
    model = example.build_model()
    dataset = example.ScenesDataset("train", 400)
    lengths = SampleLengths(dataset, model)
    for i in range(len(dataset)):
        sample = dataset[i]
        model.check(sample, f"sample {i}")
        lengths.check(i, model.lengths(sample), f"sample {i}", {})
        assert int((sample["labels"] != IGNORED_LABEL).sum()) == dataset.num_targets(i)


def test_samples_have_pictures_sound_or_both_and_few_have_most_of_them() -> None:
    dataset = example.ScenesDataset("train", 2000)
    lengths = [dataset.lengths(i) for i in range(2000)]
    kinds = [bool(each["vision"]) - bool(each["sound"]) for each in lengths]
    shares = {kind: kinds.count(number) / 2000 for kind, number in (("both", 0), ("sight", 1), ("sound", -1))}
    assert shares == pytest.approx(example.KINDS, abs=0.03)
    tones = sorted(length for each in lengths for length in each["sound"])
    assert (tones[0], tones[len(tones) // 2], tones[-1]) == (1, example.MEDIAN, example.MOST)
    assert sum(tones[-len(tones) // 10 :]) > sum(tones) / 3
    assert max(len(each["vision"]) for each in lengths) == example.MOST / example.DIGITS_A_PICTURE


def test_a_sample_is_a_function_of_split_seed_and_index() -> None:
    one, again = (example.ScenesDataset("train", 10, seed=3) for _ in range(2))
    others = example.ScenesDataset("train", 10, seed=4), example.ScenesDataset("held-out", 10, seed=3)
    for i in reversed(range(10)):
        assert one[i].keys() == again[i].keys()
        torch.testing.assert_close(dict(one[i]), dict(again[i]), rtol=0, atol=0)
    for other in others:
        assert any(not torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in range(10))


def test_what_is_said_follows_from_the_digit_and_where_its_tone_goes() -> None:
    """The tone is heard with a ruler: the loudest band of its first frames, and of its last."""
    dataset = example.ScenesDataset("train", 50)
    seen = {
        tuple(scan.flatten().tolist()): int(digit) for scan, digit in zip(dataset.pixels, dataset.digits, strict=True)
    }
    for i in range(len(dataset)):
        sample = dataset[i]
        said = sample["labels"][sample["labels"] != IGNORED_LABEL]
        digits = moves = None
        if "vision.pixels" in sample:
            scans = torch.cat(sample["vision.pixels"], dim=2)[0].unfold(1, digits_vlm.PIXELS, digits_vlm.PIXELS)
            digits = torch.tensor([seen[tuple(scan.flatten().tolist())] for scan in scans.unbind(1)])
        if "sound.pixels" in sample:
            loudest = sample["sound.pixels"][0].argmax(0).unflatten(0, (-1, example.FRAMES_A_TONE))
            moves = (loudest[:, -2] - loudest[:, 1]).sign()
        if digits is None:
            assert moves is not None
            assert torch.equal(said, example.STEADY + moves)
        else:
            assert torch.equal(said, example.ZERO + (digits + (0 if moves is None else moves)) % 10)


def mels(hertz: float) -> float:
    return 2595 * np.log10(1 + hertz / 700)


def test_a_steady_tone_is_loudest_in_the_band_of_its_pitch_all_the_time() -> None:
    turns = 1000 * np.arange(10 * example.FRAME) / example.HERTZ
    picture = example.spectrogram(torch.from_numpy(np.sin(2 * np.pi * turns)))
    assert picture.shape == (1, example.BANDS, 10)
    centers = np.linspace(mels(100), mels(example.HERTZ / 2), example.BANDS + 2)[1:-1]
    nearest = int(np.abs(centers - mels(1000)).argmin())
    assert picture[0].argmax(0).tolist() == [nearest] * 10


def test_few_steps_learn_what_takes_sight_and_sound() -> None:
    model = example.build_model()
    whole = trained(model, example.ScenesDataset("train", 50_000), steps=60)
    right = example.say_digits(whole, example.ScenesDataset("held-out", 200))
    assert right > 0.6, "a third can be had from pictures alone, a tenth from sound"
