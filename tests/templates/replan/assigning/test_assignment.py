from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from resilient.templates.replan.assigning.assignment import FORBIDDEN, AmountBounds, assign


def ints(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def test_alike_nodes_are_taken_in_their_order() -> None:
    found = assign(np.zeros((1, 1), dtype=np.int64), ints(0, 0), ints(0, 0, 0))
    assert found is not None
    assert found.tolist() == [0, 1]


def test_nodes_that_cost_the_same_stay_in_their_group() -> None:
    found = assign(np.full((1, 2), 3), ints(0, 0), ints(0, 1, 1), ints(7, 5), ints(5, -2, 7))
    assert found is not None
    assert found.tolist() == [2, 0]


def test_a_group_does_not_count_where_another_node_is_cheaper() -> None:
    found = assign(ints(3, 2)[None], ints(0), ints(0, 1), ints(5), ints(5, 6))
    assert found is not None
    assert found.tolist() == [1]


def test_there_is_no_assignment_where_all_are_forbidden() -> None:
    assert assign(np.array([[1, FORBIDDEN], [2, FORBIDDEN]]), ints(0, 1), ints(0, 1)) is None


@pytest.mark.parametrize("seed", range(100))
def test_the_cheapest_of_all_assignments_in_which_most_stay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 7))
    num_places = int(rng.integers(1, num_nodes + 1))
    kinds = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    prices = rng.integers(FORBIDDEN if seed % 2 else 0, int(rng.choice([2, 5, 100])), kinds)
    place_kinds, node_kinds = rng.integers(0, kinds[0], num_places), rng.integers(0, kinds[1], num_nodes)
    place_groups, node_groups = rng.integers(-1, 3, num_places), rng.integers(0, 4, num_nodes)
    node_groups[node_groups == 3] = -2

    def worth(order: np.ndarray) -> tuple[int, int] | None:
        each = prices[place_kinds, node_kinds[order]]
        return None if FORBIDDEN in each else (int(each.sum()), int((place_groups != node_groups[order]).sum()))

    possible = [each for order in permutations(range(num_nodes), num_places) if (each := worth(np.array(order)))]
    found = assign(prices, place_kinds, node_kinds, place_groups, node_groups)
    if found is None:
        assert not possible
    else:
        assert len(set(found.tolist())) == num_places
        assert worth(found) == min(possible)
    plain = assign(prices, place_kinds, node_kinds)
    started = assign(prices, place_kinds, node_kinds, start=rng.permutation(num_nodes)[:num_places])
    assert (plain is None) == (started is None) == (not possible)
    for each in (plain, started):
        if each is not None:
            assert prices[place_kinds, node_kinds[each]].sum() == min(possible)[0]


@pytest.mark.parametrize("seed", range(100))
def test_nodes_do_not_receive_less_than_any_bound(seed: int) -> None:
    """The largest amount and the sum of assignments that differ in how many are of each kind."""
    rng = np.random.default_rng(seed)
    num_kinds = int(rng.integers(1, 4))
    bounds = AmountBounds()
    for _ in range(6):
        num_nodes = int(rng.integers(1, 7))
        num_places = int(rng.integers(1, num_nodes + 1))
        there, place_kinds = np.unique(rng.integers(0, 3, num_places), return_inverse=True)
        node_kinds = rng.integers(0, num_kinds, num_nodes)
        amounts = np.random.default_rng(seed).integers(0, 12, (3, num_kinds))[there]
        orders = permutations(range(num_nodes), num_places)
        every = [amounts[place_kinds, node_kinds[list(order)]] for order in orders]
        largest, total = min(int(each.max()) for each in every), min(int(each.sum()) for each in every)
        counts = np.bincount(place_kinds), np.bincount(node_kinds, minlength=num_kinds)
        for bound in (bounds.asked, bounds.learnt):
            of_largest, of_total = bound(amounts, *counts)
            assert of_largest <= largest
            assert of_total <= total
        assert bounds.least(amounts, *counts) == (largest, total)
        assert bounds.learnt(amounts, *counts) == (largest, total), "from itself"
        for each in (bounds, AmountBounds()):  # asked before, and not
            assert each.bottleneck(amounts, *counts, largest - 1) is None
            assert each.bottleneck(amounts, *counts, largest) == largest
            assert each.bottleneck(amounts, *counts, largest - 1) is None
            assert each.bottleneck(amounts, *counts, 12) == largest
