"""Steps that planners share, against plain versions of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.balance import (
    cut_chain,
    deal_whole,
    fullest,
    give_out,
    loads,
    longest_first,
    slowest_stages,
)


def plain_longest_first(weights: list[float], speeds: list[float]) -> list[int]:
    load, chosen = [0.0] * len(speeds), [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        least = {speed: min((load[b], b) for b in range(len(speeds)) if speeds[b] == speed) for speed in speeds}
        of_speed = [((has + weights[item]) / speed, b) for speed, (has, b) in least.items()]
        chosen[item] = min(of_speed)[1]
        load[chosen[item]] += weights[item]
    return chosen


WEIGHTS = st.lists(st.integers(0, 5).map(float) | st.floats(0, 1e6) | st.just(-0.0), max_size=60)


@settings(max_examples=300, deadline=None)
@given(WEIGHTS, st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=20))
def test_longest_first_equals_the_plain_rule(weights: list[float], speeds: list[float]) -> None:
    assert longest_first(weights, speeds).tolist() == plain_longest_first(weights, speeds)


def test_longest_first_equals_the_plain_rule_with_many_items_and_bins() -> None:
    draw = np.random.default_rng(3)
    for weights in (draw.lognormal(6, 1, 900), draw.integers(0, 2**40, 900), draw.integers(0, 4, 900)):
        for speeds in (np.ones(70), draw.choice([1.0, 0.9], 33)):
            assert longest_first(weights, speeds).tolist() == plain_longest_first(
                weights.astype(np.float64).tolist(), speeds.tolist()
            )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 3).map(lambda count: [1.0] * count)
    | st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.7]), min_size=1, max_size=3),
)
def test_longest_first_is_within_its_bounds_of_the_best(weights: list[int], speeds: list[float]) -> None:
    count = len(speeds)
    every_way = np.array(list(itertools.product(range(count), repeat=len(weights))))
    held = np.stack([(every_way == each) @ np.array(weights) for each in range(count)])
    best = (held / np.array(speeds)[:, None]).max(axis=0).min()
    last = (loads(weights, longest_first(weights, speeds), count) / speeds).max()
    equal = len(set(speeds)) == 1
    bound = 4 / 3 - 1 / (3 * count) if equal else min(2 * count / (count + 1), 1 + 3**0.5 / 3)
    assert best * (1 - 1e-9) <= last <= best * bound * (1 + 1e-9)


def test_longest_first_reaches_grahams_bound() -> None:
    """Two bins: 7 instead of 6; three: 11 instead of 9."""
    for weights, count, most in (([3, 3, 2, 2, 2], 2, 7), ([5, 5, 4, 4, 3, 3, 3], 3, 11)):
        assert max(loads(weights, longest_first(weights, np.ones(count)), count)) == most
        assert most * 3 * count == (4 * count - 1) * sum(weights) // count


def test_give_out_goes_by_the_order_and_leaves_out_what_is_not_in_it() -> None:
    weights, order = [9.0, 1.0, 2.0, 2.0, 5.0], np.array([1, 3, 4, 2])
    assert give_out(weights, [1.0, 1.0], order).tolist() == [-1, 0, 1, 1, 0]
    assert give_out(weights, [1.0, 2.0], order).tolist() == [-1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("weights", "speeds", "got"),
    [
        ([1.0], [], "weights from 0.0 to 1.0 and 0 speeds from inf"),
        ([1.0, -1.0], [1.0], "weights from -1.0 to 1.0 and 1 speeds from 1.0"),
        ([1.0, np.inf], [1.0], "weights from 0.0 to inf and 1 speeds from 1.0"),
        ([np.nan], [1.0], "weights from nan to nan and 1 speeds from 1.0"),
        ([1.0], [2.0, 0.0], "weights from 0.0 to 1.0 and 2 speeds from 0.0"),
    ],
)
def test_longest_first_refuses_what_has_no_answer(weights: list[float], speeds: list[float], got: str) -> None:
    message = f"weights must be >= 0 and speeds of one bin or more > 0, got {got}; leave out bins that do no work"
    with pytest.raises(ValueError, match=f"^{message}$"):
        longest_first(weights, speeds)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_cut_chain_equals_trying_all_cuts(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    slowest = {tuple(np.diff(cut).tolist()): max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts}
    least = min(slowest.values())
    assert cut_chain(costs, num_stages) == max(counts for counts, cost in slowest.items() if cost == least)
    assert slowest_stages(costs, num_stages)[-1] == least
    assert slowest_stages(costs, len(costs)).shape == (len(costs),)


def test_cut_chain_refuses_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match=r"^num_stages must be 1 to 2, the number of layers, got 3; use fewer$"):
        cut_chain([1.0, 1.0], 3)


def test_heaps_of_a_turn_are_made_longest_first_and_the_larger_goes_to_the_bin_with_less() -> None:
    two, one = [0, 2], [2, 3]
    bins, turn = np.array([two, two, two, one, two, two]), np.array([0, 0, 0, 0, 1, 1])
    # 5 and 4 + 2; then 3 to where 5 is, and 1 to where 6 is
    assert deal_whole([2, 5, 4, 9, 3, 1], bins, turn).tolist() == [0, 1, 0, 2, 1, 0]


def test_the_fullest_lane_of_a_microbatch_does_not_depend_on_the_others() -> None:
    weights, sizes, microbatch = [2, 5, 4, 3, 1], [20, 50, 40, 30, 10], np.array([0, 0, 0, 1, 1])
    assert fullest(weights, sizes, microbatch, 3, 2).tolist() == [60, 30, 0]
    assert fullest(weights, sizes, 1 - microbatch, 3, 2).tolist() == [30, 60, 0]
    assert fullest(weights, sizes, microbatch, 3, 1).tolist() == [110, 40, 0]
