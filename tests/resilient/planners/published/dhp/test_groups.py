"""DHP's two stages and the group pool: optimal degrees, memory, and the same pool on every rank."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.published.dhp.group_kernels import min_max_degrees
from resilient.planners.published.dhp.groups import (
    Ranks,
    Sequences,
    pack,
    pack_ranks,
    plan_groups,
)
from resilient.templates.common.arrays import Floats, Ints
from tests.resilient.planners.published.dhp.group_times import group_ms

SEEDS = st.integers(0, 2**32 - 1)


def brute_force(times: Floats, least: Ints) -> float:
    ranks = times.shape[1]
    allowed = (range(fewest, ranks + 1) for fewest in least)
    return min(
        max(times[group, degree - 1] for group, degree in enumerate(degrees))
        for degrees in itertools.product(*allowed)
        if sum(degrees) <= ranks
    )


def dynamic_program(times: Floats, least: Ints) -> float:
    """The paper's: the slowest of the first groups on so many ranks."""
    reach = np.zeros(times.shape[1] + 1)
    for group, fewest in enumerate(least.tolist()):
        before, reach = reach, np.full_like(reach, np.inf)
        for j in range(len(reach)):
            for degree in range(fewest, j - int(least[:group].sum()) + 1):
                reach[j] = min(reach[j], max(before[j - degree], times[group, degree - 1]))
    return float(reach[-1])


def sequences(draw: np.random.Generator, count: int, scale: float = 1.0) -> Sequences:
    tokens = draw.lognormal(5, 1, count).astype(np.int64).astype(np.float64)
    return Sequences(attention_ms=1e-5 * tokens**2, other_ms=0.01 * tokens, tokens=tokens, kept=tokens * scale)


def ranks(count: int, ring: float = 0.004, start: float = 0.2) -> Ranks:
    starts = np.full(count, start)
    starts[0] = 0.0
    return Ranks(fixed_ms=0.5, ring_ms=np.full(count, ring), start_ms=starts)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, num_groups=st.integers(1, 4), falling=st.booleans())
def test_degrees_are_those_of_brute_force(seed: int, num_groups: int, falling: bool) -> None:
    draw = np.random.default_rng(seed)
    least = draw.integers(1, 3, num_groups)
    num_ranks = int(least.sum() + draw.integers(0, 4))
    times = draw.uniform(1, 9, (num_groups, num_ranks))
    if falling:
        times = np.ascontiguousarray(np.sort(times, axis=1)[:, ::-1])
    degrees = min_max_degrees(times, least)
    assert (degrees >= least).all()
    assert degrees.sum() <= num_ranks
    assert times[np.arange(num_groups), degrees - 1].max() == brute_force(times, least)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, num_groups=st.integers(1, 8), more=st.integers(0, 16), falling=st.booleans())
def test_degrees_are_those_of_the_dynamic_program(seed: int, num_groups: int, more: int, falling: bool) -> None:
    draw = np.random.default_rng(seed)
    least = draw.integers(1, 4, num_groups)
    times = draw.uniform(1, 9, (num_groups, int(least.sum()) + more))
    if falling:
        times = np.ascontiguousarray(np.sort(times, axis=1)[:, ::-1])
    degrees = min_max_degrees(times, least)
    assert times[np.arange(num_groups), degrees - 1].max() == dynamic_program(times, least)


def test_ranks_that_are_left_over_widen_the_slowest_group_that_gets_faster() -> None:
    times = np.array([[9.0, 9.0, 9.0, 9.0, 9.0], [6.0, 4.0, 3.0, 2.5, 2.0], [5.0, 4.5, 1.0, 1.0, 1.0]])
    assert min_max_degrees(times, np.array([1, 1, 1])).tolist() == [1, 2, 2]


def test_too_few_ranks_are_an_error() -> None:
    message = "least must sum to at most 2, the number of ranks, got 3; split the microbatch"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan_groups(sequences(np.random.default_rng(0), 3), ranks(2), np.array([0, 1, 1]), np.array([1, 2]))


def test_times_are_those_of_the_formula() -> None:
    two = Sequences(
        attention_ms=np.array([6.0, 2.0]),
        other_ms=np.array([1.0, 3.0]),
        tokens=np.array([10.0, 30.0]),
        kept=np.zeros(2),
    )
    times = group_ms(two, np.zeros(2, dtype=np.int64), 1, ranks(4, ring=0.1, start=0.25))
    # compute 12 / d + 0.5; ring 4 (d - 1) / d, hidden behind attention 8 / d up to its length; start 0.25
    assert times.tolist() == [[12.5, 6.75, 4.75, 4.75]]


def test_packing_is_best_fit_decreasing_and_long_sequences_share_their_ranks() -> None:
    bins, least = pack(np.array([0.3, 2.5, 0.6, 0.5, 0.4, 0.1]))
    assert bins.tolist() == [2, 0, 1, 0, 1, 2]
    assert least.tolist() == [3, 1, 1]


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, count=st.integers(0, 60), scale=st.sampled_from([1e-4, 1e-3, 1e-2]), num_ranks=st.integers(1, 40))
def test_packing_leaves_at_most_half_of_the_room_unused(seed: int, count: int, scale: float, num_ranks: int) -> None:
    kept = sequences(np.random.default_rng(seed), count, scale).kept
    _, least = pack(kept)
    # No two groups of one rank are both half empty, and larger ones are of no more than twice their first sequence.
    assert kept.sum() - 1e-9 <= least.sum() <= 2 * kept.sum() + 1
    microbatch = pack_ranks(np.minimum(least, num_ranks), num_ranks)
    used = loads(np.minimum(least, num_ranks), microbatch, microbatch.max(initial=-1) + 1)
    assert (used <= num_ranks).all()
    assert len(used) <= 2 * used.sum() / num_ranks + 1


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, count=st.integers(0, 60), scale=st.sampled_from([0.0, 1e-3, 4e-3, 1e-2]))
def test_each_sequence_is_in_one_group_that_holds_it(seed: int, count: int, scale: float) -> None:
    draw = np.random.default_rng(seed)
    these = sequences(draw, count, scale)
    bins, least = pack(these.kept)
    num_ranks = max(int(least.sum()) + int(draw.integers(0, 6)), 1)
    groups = plan_groups(these, ranks(num_ranks), bins, least)
    assert groups.group.shape == (count,)
    assert groups.degrees.sum() <= num_ranks
    assert (np.diff(groups.degrees) <= 0).all()
    assert (loads(these.kept, groups.group, len(groups.degrees)) <= groups.degrees * (1 + 1e-9)).all()
    if not count:
        return
    active = np.unique(groups.group)
    times = group_ms(these, groups.group, len(groups.degrees), ranks(num_ranks))[active, groups.degrees[active] - 1]
    assert times.max() == pytest.approx(groups.slowest_ms)
    packed = group_ms(these, bins, len(least), ranks(num_ranks))
    of_paper = min_max_degrees(packed, least)
    assert groups.slowest_ms <= packed[np.arange(len(least)), of_paper - 1].max() * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(
    seed=SEEDS,
    count=st.integers(1, 40),
    num_ranks=st.integers(1, 24),
    scale=st.sampled_from([0.0, 1e-3, 2e-3]),
    ring=st.sampled_from([0.0, 0.004, 0.1]),
)
def test_no_slower_than_static_groups(seed: int, count: int, num_ranks: int, scale: float, ring: float) -> None:
    these, all_ranks = sequences(np.random.default_rng(seed), count, scale), ranks(num_ranks, ring=ring)
    bins, least = pack(these.kept)
    if least.sum() > num_ranks:
        with pytest.raises(ValueError, match=r"^least must sum to at most "):
            plan_groups(these, all_ranks, bins, least)
        return
    found = plan_groups(these, all_ranks, bins, least).slowest_ms
    degree = 1
    while degree <= num_ranks:
        groups = num_ranks // degree
        static = longest_first(these.work_ms, np.ones(groups))
        if (loads(these.kept, static, groups) <= degree).all():
            used = np.unique(static)
            assert found <= group_ms(these, static, groups, all_ranks)[used, degree - 1].max() * (1 + 1e-12)
        degree *= 2


def test_static_groups_are_tried_where_the_packing_has_as_many_groups() -> None:
    # The packing fills the two ranks of the long sequence with the middle ones: 16 ms of work on three ranks at best.
    these = Sequences(
        attention_ms=np.zeros(4),
        other_ms=np.array([6.0, 5.0, 5.0, 4.0]),
        tokens=np.ones(4),
        kept=np.array([1.2, 0.4, 0.4, 0.4]),
    )
    bins, least = pack(these.kept)
    groups = plan_groups(these, ranks(4, ring=0.0, start=0.0), bins, least)
    assert groups.slowest_ms == pytest.approx(5.5)


def test_static_groups_are_filled_by_room() -> None:
    # By work alone the sequences of 4 and 3 ms would be together that do not fit; the packing takes 8 ms and 6 ms.
    these = Sequences(
        attention_ms=np.zeros(4),
        other_ms=np.array([4.0, 4.0, 3.0, 3.0]),
        tokens=np.ones(4),
        kept=np.array([0.6, 0.3, 0.6, 0.3]),
    )
    assert plan_groups(these, ranks(2), *pack(these.kept)).slowest_ms == pytest.approx(7.5)


def test_wide_groups_are_given_more() -> None:
    # Two groups of as equal work as can be, 14 and 12 ms, would take 14 / 3 and 12 / 2 ms on five ranks.
    these = Sequences(
        attention_ms=np.zeros(6),
        other_ms=np.array([10.0, 4.0, 4.0, 4.0, 2.0, 2.0]),
        tokens=np.zeros(6),
        kept=np.zeros(6),
    )
    narrow = Ranks(fixed_ms=0.0, ring_ms=np.zeros(5), start_ms=np.array([0.0, 0.0, 0.0, 9.0, 9.0]))
    groups = plan_groups(these, narrow, *pack(these.kept))
    assert groups.degrees.tolist() == [3, 2]
    assert groups.slowest_ms == pytest.approx(16 / 3)


def test_plentiful_memory_does_not_put_all_sequences_into_one_group() -> None:
    these = sequences(np.random.default_rng(0), 64, 0.0)
    bins, least = pack(these.kept)
    assert least.tolist() == [1]
    groups = plan_groups(these, ranks(8), bins, least)
    assert len(groups.degrees) > 1
    assert groups.slowest_ms < group_ms(these, bins, 1, ranks(8)).min()
