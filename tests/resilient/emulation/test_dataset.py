"""Lengths come from a seed and a mix; samples have them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import resilient as rs
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.unit import CostCurve, EmulatedUnit

UNITS = [EmulatedUnit(name=name, num_layers=1, cost=CostCurve()) for name in ("vision", "llm")]


def test_sample_has_as_many_tokens_as_its_lengths_say() -> None:
    dataset = EmulatedDataset(UNITS, "heavy", num_samples=50)
    for index in range(50):
        sample = dataset[index]
        for name, lengths in dataset.lengths(index).items():
            assert sample[f"{name}_lengths"].tolist() == lengths
            assert sum(lengths) == len(sample[name])


def test_lengths_are_those_of_the_seed() -> None:
    one, same, other = (EmulatedDataset(UNITS, seed=seed) for seed in (1, 1, 2))
    assert [one.lengths(index) for index in range(20)] == [same.lengths(index) for index in range(20)]
    assert [one.lengths(index) for index in range(20)] != [other.lengths(index) for index in range(20)]


def held_by_the_longest_tenth(mix: str) -> float:
    dataset = EmulatedDataset(UNITS, mix, num_samples=1000)
    tokens = sorted(sum(dataset.lengths(index)["llm"]) for index in range(1000))
    return sum(tokens[-100:]) / sum(tokens)


def test_mixes_differ_in_their_tails() -> None:
    shares = [held_by_the_longest_tenth(mix) for mix in ("short", "mixed", "heavy")]
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[2] > 0.4


def test_some_samples_have_nothing_for_an_encoder_and_all_have_text() -> None:
    dataset = EmulatedDataset(UNITS, "heavy", num_samples=200)
    counts = {len(dataset.lengths(index)["vision"]) for index in range(200)}
    assert counts == {0, 1, 2, 3, 4}
    assert {len(dataset.lengths(index)["llm"]) for index in range(200)} == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix": "long"}, "mix must be one of short, mixed, heavy, got 'long'; choose one"),
        ({"num_samples": 0}, "num_samples must be >= 1, got 0; train on some"),
        ({"seed": -1}, "seed must be >= 0, got -1; give another"),
        ({"units": UNITS[:1] * 2},
         "units must be at least one, each with a name of its own, got ['vision', 'vision']; name them apart"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.ArgumentError, match=f"^{re.escape(message)}$"):
        EmulatedDataset(**{"units": UNITS, **changes})
