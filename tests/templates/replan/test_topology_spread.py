from __future__ import annotations

from functools import partial
from itertools import combinations, permutations

import numpy as np
import pytest

from resilient.templates.replan import topology_spread
from resilient.templates.replan.topology_spread import FailureDomains, Kinds


def lacking_domains(needs: np.ndarray, domains: np.ndarray, wanted: int) -> int:
    """Every place of a kind of its own."""
    return topology_spread.lacking_domains(needs, np.arange(len(needs)), domains, wanted)


def spread_domains(
    needs: np.ndarray, prices: np.ndarray, chosen: np.ndarray, domains: np.ndarray, wanted: int
) -> np.ndarray:
    """Every place and every node of a kind of its own."""
    every = np.arange(len(chosen))
    return topology_spread.spread_domains(Kinds(needs, prices, every, every), chosen, domains, wanted)


def needs_of(*pipelines: tuple[int, ...], num_states: int, left_out: int = 0) -> np.ndarray:
    """Each pipeline's stages end before these states; ``left_out`` places need nothing."""
    rows = [
        [first <= state < end for state in range(num_states)]
        for ends in pipelines
        for first, end in zip((0, *ends), ends, strict=False)
    ]
    return np.array(rows + [[False] * num_states] * left_out)


def test_lacking_counts_each_state_in_too_few_domains() -> None:
    needs = needs_of((1, 3), (1, 3), num_states=3)
    assert lacking_domains(needs, np.array([0, 0, 0, 0]), 2) == 3
    assert lacking_domains(needs, np.array([0, 0, 1, 0]), 2) == 2
    assert lacking_domains(needs, np.array([0, 1, 1, 0]), 2) == 0
    assert lacking_domains(needs, np.array([0, 1, 1, 0]), 3) == 3


def test_what_lacks_nothing_is_left_as_it_is_however_expensive() -> None:
    needs = needs_of((1, 2), (1, 2), num_states=2)
    chosen = np.array([3, 1, 0, 2])
    prices = 1 - np.eye(4, dtype=np.int64)
    assert spread_domains(needs, prices, chosen, np.array([0, 0, 1, 1]), 2) is chosen


def test_the_cheapest_exchange_that_spreads_is_made() -> None:
    needs = needs_of((1, 2), (1, 2), num_states=2)
    prices = np.full((4, 4), 5)
    np.fill_diagonal(prices, 0)
    prices[[0, 3], [3, 0]] = 4  # nodes 0 and 3 change places for less than others would
    chosen = spread_domains(needs, prices, np.arange(4), np.array([0, 1, 0, 1]), 2)
    assert chosen.tolist() == [3, 1, 2, 0]


def test_nodes_without_a_place_come_in_where_that_spreads() -> None:
    needs = needs_of((2,), (2,), num_states=2, left_out=1)
    prices = np.array([[0, 9, 9], [9, 0, 9], [0, 0, 0]])
    assert spread_domains(needs, prices, np.arange(3), np.array([0, 0, 1]), 2).tolist() in ([0, 2, 1], [2, 1, 0])


def test_what_cannot_be_spread_stays_cheap() -> None:
    # One node of domain 1: it can take the place that holds two of three states, no more.
    needs = needs_of((1, 3), (1, 3), num_states=3)
    prices = 1 - np.eye(4, dtype=np.int64)
    chosen = spread_domains(needs, prices, np.arange(4), np.array([1, 0, 0, 0]), 2)
    assert lacking_domains(needs, np.array([1, 0, 0, 0])[chosen], 2) == 1
    assert prices[np.arange(4), chosen].sum() == 2


@pytest.mark.parametrize("seed", range(8))
def test_as_spread_as_the_best_of_all_placements_and_nearly_as_cheap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours = cheapest = cases = 0
    for _ in range(25):
        num_states, num_places = int(rng.integers(3, 8)), int(rng.integers(4, 7))
        pipelines = [random_ends(rng, size, num_states) for size in random_sizes(rng, num_places, num_states)]
        left_out = num_places - sum(map(len, pipelines))
        needs = needs_of(*pipelines, num_states=num_states, left_out=left_out)
        prices = rng.integers(0, 10, (num_places, num_places)) * needs.any(axis=1, keepdims=True)
        _, domains = np.unique(rng.integers(0, 3, num_places), return_inverse=True)
        wanted = min(int(rng.integers(2, 4)), int(domains.max()) + 1)
        worth = partial(worth_of, needs, prices, domains, wanted)
        best = min(worth(np.array(order)) for order in permutations(range(num_places)))
        start = rng.permutation(num_places)
        if lacking_domains(needs, domains[start], wanted):
            found = worth(spread_domains(needs, prices, start, domains, wanted))
            assert found[0] == best[0]
            cases, ours, cheapest = cases + 1, ours + found[1], cheapest + best[1]
    assert cases >= 5
    assert ours <= 1.1 * cheapest


def worth_of(
    needs: np.ndarray, prices: np.ndarray, domains: np.ndarray, wanted: int, chosen: np.ndarray
) -> tuple[int, float]:
    return lacking_domains(needs, domains[chosen], wanted), float(prices[np.arange(len(chosen)), chosen].sum())


def random_sizes(rng: np.random.Generator, num_places: int, largest: int) -> list[int]:
    first = int(rng.integers(1, min(num_places - 1, largest) + 1))
    rest = int(rng.integers(1, min(num_places - first, largest) + 1))
    return [first, rest]


def random_ends(rng: np.random.Generator, size: int, num_states: int) -> tuple[int, ...]:
    inner = rng.choice(np.arange(1, num_states), size - 1, replace=False)
    return (*sorted(map(int, inner)), num_states)


@pytest.mark.parametrize("seed", range(20))
def test_what_many_alike_nodes_hold_is_spread_without_another_exchange_that_saves(seed: int) -> None:
    """Places and nodes of few kinds, as in large jobs."""
    rng = np.random.default_rng(seed)
    size, num_pipelines, num_states = 3, int(rng.integers(4, 20)), 6
    needs = np.concatenate((needs_of((2, 4, 6), num_states=num_states), [[False] * num_states]))
    num_nodes = size * num_pipelines + int(rng.integers(0, 4))
    places = np.full(num_nodes, size)
    places[: size * num_pipelines] = np.tile(np.arange(size), num_pipelines)
    nodes = places[rng.permutation(num_nodes)] if seed % 2 else places
    held = needs[: size + 1]
    prices = (needs[:, None] & ~held).sum(axis=2)
    domains = np.minimum(places, 2) if seed % 4 < 2 else (rng.random(num_nodes) < 0.1) * 1
    found = topology_spread.spread_domains(Kinds(needs, prices, places, nodes), np.arange(num_nodes), domains, 2)
    assert sorted(found.tolist()) == list(range(num_nodes))

    def worth(chosen: np.ndarray) -> tuple[int, int]:
        lacking = topology_spread.lacking_domains(needs, places, domains[chosen], 2)
        return lacking, int(prices[places, nodes[chosen]].sum())

    best = worth(found)
    if not worth(np.arange(num_nodes))[0]:
        assert found.tolist() == list(range(num_nodes))
        return
    assert best[0] <= worth(np.arange(num_nodes))[0]
    for one in range(num_nodes):
        for other in range(one):
            exchanged = found.copy()
            exchanged[[one, other]] = exchanged[[other, one]]
            assert worth(exchanged) >= best


@pytest.mark.parametrize("seed", range(6))
def test_of_many_states_no_exchange_makes_it_better(seed: int) -> None:
    """More states than bits of a word, and of two."""
    rng = np.random.default_rng(seed)
    num_states, num_domains = int(rng.integers(60, 140)), int(rng.integers(3, 7))
    sizes = rng.integers(2, 7, int(rng.integers(4, 9))).tolist()
    needs = needs_of(*(random_ends(rng, size, num_states) for size in sizes), num_states=num_states, left_out=2)
    domains = rng.permutation(np.arange(len(needs)) % num_domains)
    prices = rng.integers(0, 10, (len(needs), len(needs))) * needs.any(axis=1, keepdims=True)
    worth, start = partial(worth_of, needs, prices, domains, num_domains), np.argsort(domains)
    assert worth(start)[0] > 0

    best = worth(found := spread_domains(needs, prices, start, domains, num_domains))

    for one, other in combinations(range(len(needs)), 2):
        exchanged = found.copy()
        exchanged[[one, other]] = exchanged[[other, one]]
        assert worth(exchanged) >= best


def test_settled_places_keep_their_nodes_where_others_can_make_up_what_is_lacking() -> None:
    needs = needs_of((1, 2), (1, 2), num_states=2)
    places, prices = np.arange(4), np.full((4, 4), 5)
    np.fill_diagonal(prices, 0)
    prices[[0, 3], [3, 0]] = 1  # nodes 0 and 3 would change places
    kinds, domains = Kinds(needs, prices, places, places), np.array([0, 1, 0, 1])

    spread = partial(topology_spread.spread_domains, kinds, places, domains, 2)

    assert spread().tolist() == [3, 1, 2, 0]
    assert spread(np.array([0])).tolist() == [0, 2, 1, 3]
    assert lacking_domains(needs, domains[spread(np.array([0, 1, 3]))], 2) == 0, "no place can make up for three"
    assert spread(places).tolist() == spread().tolist(), "where all are settled none is"


@pytest.mark.parametrize("seed", range(100))
def test_settled_places_get_others_only_where_less_is_lacking_then(seed: int) -> None:
    """And these are of other domains than their own nodes, which would be as good there."""
    rng = np.random.default_rng(seed)
    num_states, num_nodes = int(rng.integers(2, 6)), int(rng.integers(4, 8))
    sizes = random_sizes(rng, num_nodes, num_states)
    needs = needs_of(
        *(random_ends(rng, size, num_states) for size in sizes),
        num_states=num_states,
        left_out=num_nodes - sum(sizes),
    )
    places, prices = np.arange(num_nodes), rng.integers(0, 10, (num_nodes, num_nodes))
    kinds, domains = Kinds(needs, prices, places, places), rng.integers(0, 3, num_nodes)
    settled = np.flatnonzero(rng.random(num_nodes) < 0.4)

    free, found = (topology_spread.spread_domains(kinds, places, domains, 2, each) for each in (settled[:0], settled))

    lacking_of_free, lacking = (lacking_domains(needs, domains[each], 2) for each in (free, found))
    assert sorted(found.tolist()) == places.tolist()
    assert lacking <= lacking_of_free
    moved = settled[found[settled] != settled]
    if len(moved) and len(settled) < num_nodes:
        assert (domains[found[moved]] != domains[moved]).all()
        movable = np.setdiff1d(places, settled)
        for order in permutations(movable.tolist()):
            held = places.copy()
            held[movable] = order
            assert lacking_domains(needs, domains[held], 2) > lacking


def test_failure_domains_are_told_by_labels_and_nodes_without_one_are_one_each() -> None:
    needs, places, nodes = needs_of((1, 2), (1, 2), num_states=2), np.arange(4), [7, 8, 9, 10]
    chosen = np.arange(4)
    assert FailureDomains(nodes, {}, 2).wanted == 0
    zones = FailureDomains(nodes, {7: "a", 8: "a", 9: "a"}, 3)
    assert (zones.wanted, zones.lacking(needs, places, chosen)) == (2, 1)
    prices = 1 - np.eye(4, dtype=np.int64)
    moved = zones.spread(Kinds(needs, prices, places, places), chosen)
    assert zones.lacking(needs, places, moved) == 1, "one node holds one state"
