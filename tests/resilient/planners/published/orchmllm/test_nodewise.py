"""Node-wise rearrangement: optimal on tiny cases, never worse than none, a true lower bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.published.orchmllm.nodewise import largest_volume, rearrange
from resilient.templates.common.arrays import Floats, Ints

SEEDS = st.integers(0, 2**32 - 1)


def case(seed: int, num_batches: int, num_nodes: int, num_kinds: int) -> tuple[Floats, Ints, Ints]:
    draw = np.random.default_rng(seed)
    volumes = draw.lognormal(0, 1.5, (num_batches, num_nodes)) * (draw.random((num_batches, num_nodes)) < 0.7)
    nodes = draw.integers(0, num_nodes, num_batches)
    return volumes, nodes, draw.integers(0, num_kinds, num_batches)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, num_batches=st.integers(1, 6), num_nodes=st.integers(1, 4), num_kinds=st.integers(1, 2))
def test_tiny_cases_are_those_of_brute_force(seed: int, num_batches: int, num_nodes: int, num_kinds: int) -> None:
    volumes, nodes, kinds = case(seed, num_batches, num_nodes, num_kinds)
    found = rearrange(volumes, nodes, kinds)
    best = min(
        largest_volume(volumes, nodes[np.array(each)])
        for each in itertools.permutations(range(num_batches))
        if (kinds[np.array(each)] == kinds).all()
    )
    assert found.volume == pytest.approx(best)
    assert found.lower_bound == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, num_batches=st.integers(9, 40), num_nodes=st.integers(8, 12), num_kinds=st.integers(1, 3))
def test_no_rearrangement_is_worse_than_none(seed: int, num_batches: int, num_nodes: int, num_kinds: int) -> None:
    volumes, nodes, kinds = case(seed, num_batches, num_nodes, num_kinds)
    found = rearrange(volumes, nodes, kinds)
    assert sorted(found.instance.tolist()) == list(range(num_batches))
    assert (kinds[found.instance] == kinds).all()
    assert found.identity_volume == largest_volume(volumes, nodes)
    assert found.volume == largest_volume(volumes, nodes[found.instance])
    assert found.lower_bound <= found.volume <= found.identity_volume
    assert found.gap >= 0
    np.testing.assert_array_equal(found.instance, rearrange(volumes, nodes, kinds).instance)


def test_what_is_known_of_the_best_may_be_less_than_what_was_found() -> None:
    # Nine batches, two of them for the first of eight nodes; an eighth of each batch lies on each node. Whatever goes
    # where, the first node receives 2 x 7 of 8 parts. Known is that the others send 8 of their 9 parts.
    nodes = np.array([0, 0, 1, 2, 3, 4, 5, 6, 7])
    found = rearrange(np.ones((9, 8)), nodes, np.zeros(9, dtype=np.int64))
    assert (found.volume, found.lower_bound, found.gap) == (14.0, 8.0, 0.75)


def test_volumes_are_what_is_sent_and_received() -> None:
    volumes = np.array([[5.0, 1.0], [2.0, 7.0]])
    assert largest_volume(volumes, np.array([0, 1])) == 2.0
    assert largest_volume(volumes, np.array([1, 0])) == 7.0


def test_batches_that_were_made_on_another_node_go_back() -> None:
    volumes = np.repeat(np.roll(np.eye(10), 3, axis=1), 2, axis=0)
    found = rearrange(volumes, np.repeat(np.arange(10), 2), np.zeros(20, dtype=np.int64))
    assert (found.volume, found.identity_volume, found.gap) == (0.0, 2.0, 0.0)


def test_batches_that_stay_on_their_node_stay_on_their_instance() -> None:
    volumes = np.array([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    assert rearrange(volumes, np.array([0, 0, 1]), np.zeros(3, dtype=np.int64)).instance.tolist() == [0, 1, 2]
