"""Samples are spread evenly, and those that are padded beside others that are as long."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.own.spreading import by_length, evenly
from resilient.planners.packing.balance import loads, longest_first

_WEIGHTS = st.lists(st.floats(0, 100), max_size=40).map(np.array)
_SPEEDS = st.lists(st.sampled_from([0.5, 0.75, 1.0]), min_size=1, max_size=6).map(np.array)


@given(_WEIGHTS, _SPEEDS)
@settings(max_examples=200, deadline=None)
def test_exchanges_make_the_slowest_bin_no_slower(weights: np.ndarray, speeds: np.ndarray) -> None:
    slowest = [(loads(weights, deal(weights, speeds), len(speeds)) / speeds).max() for deal in (longest_first, evenly)]
    assert slowest[1] <= slowest[0] * (1 + 1e-9)


def test_exchanges_find_what_the_longest_first_miss() -> None:
    """3 + 3 and 2 + 2 + 2 instead of 3 + 2 + 2 and 3 + 2."""
    weights, speeds = np.array([3.0, 3.0, 2.0, 2.0, 2.0]), np.ones(2)
    assert loads(weights, longest_first(weights, speeds), 2).max() == 7
    assert loads(weights, evenly(weights, speeds), 2).tolist() == [6, 6]


def test_many_samples_are_even_to_a_thousandth() -> None:
    weights, speeds = np.random.default_rng(0).lognormal(5, 1, 2000), np.repeat([0.75, 1.0], 50)
    times = loads(weights, evenly(weights, speeds), 100) / speeds
    assert times.max() < 1.001 * weights.sum() / speeds.sum()
    np.testing.assert_array_equal(evenly(weights, speeds), evenly(weights, speeds))


def _padded(costs: np.ndarray, numbers: np.ndarray, bins: np.ndarray, speeds: np.ndarray) -> float:
    largest = np.zeros(len(speeds))
    np.maximum.at(largest, bins, costs * (numbers > 0))
    return float((largest * loads(numbers, bins, len(speeds)) / speeds).max(initial=0.0))


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 3), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_no_way_has_a_faster_slowest_bin_of_clips_that_are_padded(lengths: list[int], bins: int, seed: int) -> None:
    costs, speeds = np.array(lengths, dtype=np.float64), np.ones(bins)
    numbers = (np.random.default_rng(seed).random(len(costs)) < 0.7).astype(np.int64)
    best = min(
        _padded(costs, numbers, np.array(way, dtype=np.int64), speeds)
        for way in product(range(bins), repeat=len(lengths))
    )
    found = _padded(costs, numbers, by_length(costs, numbers, speeds), speeds)
    assert best <= found <= best * (1 + 1e-5)


def test_a_slow_bin_has_less_of_what_is_padded() -> None:
    """Two clips of each sample: what is twice as fast has twice as many."""
    costs, numbers, speeds = np.full(6, 10.0), np.full(6, 2), np.array([0.5, 1.0])
    assert by_length(costs, numbers, speeds).tolist() == [1, 1, 1, 1, 0, 0]
