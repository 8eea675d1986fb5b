"""Microbatches and deferral: against plain versions, and the optimum against trying everything."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.packing.balance import loads
from resilient.planners.published.entrain.deferral import defer, encoder_microbatches


def plain_microbatches(encoder: list[float], llm: list[float], most: int, fewest: int) -> list[int]:
    count = len(encoder)
    busy = [i for i in range(count) if encoder[i] > 0]
    number = most
    if busy:
        number = min(most, max(fewest, *(int(sum(work) / max(work)) for work in (encoder, llm) if max(work) > 0)))
    median = float(np.median(llm)) if llm else 0.0
    microbatch, encoder_load, llm_load = [0] * count, [0.0] * number, [0.0] * most
    for i in sorted(busy, key=lambda i: (llm[i] <= median, -encoder[i])):
        microbatch[i] = min(range(number), key=lambda m: encoder_load[m])
        encoder_load[microbatch[i]] += encoder[i]
        llm_load[microbatch[i]] += llm[i]
    for i in sorted((i for i in range(count) if encoder[i] == 0), key=lambda i: -llm[i]):
        microbatch[i] = min(range(most), key=lambda m: llm_load[m])
        llm_load[microbatch[i]] += llm[i]
    return microbatch


SAMPLES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(SAMPLES, st.integers(1, 8), st.integers(1, 9))
def test_microbatches_equal_the_plain_rule(samples: list[tuple[int, int]], most: int, fewest: int) -> None:
    encoder, llm = ([float(each[part]) for each in samples] for part in (0, 1))
    found = encoder_microbatches(np.array(encoder), np.array(llm), most, fewest).tolist()
    assert found == plain_microbatches(encoder, llm, most, fewest)


@pytest.mark.parametrize(
    ("encoder", "llm", "used"),
    [
        ([4, 1, 1, 1, 1], [4, 1, 1, 1, 1], 2),  # both could be two equal microbatches
        ([4, 1, 1, 1, 1], [1, 1, 1, 1, 1], 4),  # the language model could be more
        ([1, 1, 1, 1, 1], [9, 0, 0, 0, 0], 4),  # no more than there are
        ([0, 0, 0, 0, 0], [9, 1, 1, 1, 1], 4),  # the encoder has nothing to do
        ([9, 0, 0, 0, 0], [9, 1, 1, 1, 1], 4),  # one sample for it, the others go where there is room
    ],
)
def test_microbatches_are_as_many_as_can_be_equal(encoder: list[float], llm: list[float], used: int) -> None:
    assert len(set(encoder_microbatches(np.array(encoder), np.array(llm), 4).tolist())) == used


def least_by_trying(llm: np.ndarray, microbatch: np.ndarray) -> float:
    """The least possible largest load when each of the larger half of microbatches may give to one of the others."""
    members = [np.flatnonzero(microbatch == each) for each in np.unique(microbatch)]
    load = [float(llm[each].sum()) for each in members]
    order = sorted(range(len(load)), key=lambda each: -load[each])
    half = (len(order) + 1) // 2
    heavy, light = order[:half], order[half:]
    together = {
        (one, other): min(
            max(load[one] - moved, load[other] + moved)
            for chosen in range(2 ** len(members[one]))
            for moved in [float(sum(llm[each] for bit, each in enumerate(members[one]) if chosen >> bit & 1))]
        )
        for one in heavy
        for other in light
    }
    choices = light + [-1] * len(heavy)
    return min(
        max(
            *(together[one, other] if other >= 0 else load[one] for one, other in zip(heavy, way, strict=True)),
            *(load[other] for other in light if other not in way),
            0.0,
        )
        for way in set(permutations(choices, len(heavy)))
    )


@settings(max_examples=250, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=5))
def test_deferral_equals_trying_all_pairs_and_subsets(microbatches: list[list[int]]) -> None:
    llm = np.array([weight for each in microbatches for weight in each], dtype=np.float64)
    microbatch = np.repeat(np.arange(len(microbatches)), [len(each) for each in microbatches])
    _, late = defer(np.ones(len(llm)), llm, microbatch, len(microbatches))
    assert loads(llm, late, len(microbatches)).max() == least_by_trying(llm, microbatch)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.floats(0, 100), st.floats(0, 100)), max_size=40),
    st.integers(8, 10),
)
def test_deferral_moves_samples_to_the_next_microbatch_only(
    samples: list[tuple[int, float, float]], number: int
) -> None:
    microbatch = np.array([each[0] for each in samples], dtype=np.int64)
    encoder, llm = (np.array([each[part] for each in samples]) for part in (1, 2))
    early, late = defer(encoder, llm, microbatch, number)
    used = len(set(microbatch.tolist()))
    assert sorted(set(early.tolist())) == list(range(used))
    assert len(set(zip(microbatch.tolist(), early.tolist(), strict=True))) == used
    assert set((late - early).tolist()) <= {0, 1}
    assert late.max(initial=0) < max(used, 1)
    largest = loads(llm, microbatch, number).max()
    assert loads(llm, late, number).max() <= largest * (1 + 1e-9)
    if len(samples):  # no microbatch both gives and gets
        assert not set(early[late > early].tolist()) & set(late[late > early].tolist())


def test_deferral_pairs_the_largest_with_the_smallest_and_leaves_the_others_in_order() -> None:
    llm = np.array([6.0, 4.0, 1.0, 1.0, 5.0, 5.0])
    microbatch = np.array([0, 0, 1, 1, 2, 3])
    early, late = defer(np.ones(6), llm, microbatch, 5)
    assert early.tolist() == [0, 0, 1, 1, 2, 3]
    assert late.tolist() == [0, 1, 1, 1, 2, 3]


def test_deferral_keeps_whole_samples_in_order_of_size() -> None:
    llm = np.array([1.0, 9.0, 4.0, 4.0])
    early, late = defer(np.ones(4), llm, np.arange(4), 4)
    assert early.tolist() == late.tolist() == [3, 0, 1, 2]


def test_deferral_begins_with_what_need_not_wait_for_the_encoder() -> None:
    early, late = defer(np.array([1.0, 0.0, 1.0]), np.array([5.0, 4.0, 4.5]), np.arange(3), 3)
    assert early.tolist() == late.tolist() == [1, 0, 2]
