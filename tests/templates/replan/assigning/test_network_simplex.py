from __future__ import annotations

import numpy as np
import pytest

from resilient.templates.replan.assigning.network_simplex import cheapest_flow


def ints(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def test_all_goes_the_cheapest_way() -> None:
    # From 0 to 3 by 1 or by 2.
    costs = np.array([[1, 0], [1, 0], [1, 0], [2, 0]])
    flow = cheapest_flow(ints(0, 0, 1, 2), ints(1, 2, 3, 3), costs, ints(5, 0, 0, -5))
    assert flow.is_whole
    assert flow.sent.tolist() == [5, 0, 5, 0]


def test_the_second_part_of_a_cost_decides_between_equals_only() -> None:
    costs = np.array([[1, 9], [1, 0], [1, 9], [2, 0]])
    flow = cheapest_flow(ints(0, 0, 1, 2), ints(1, 2, 3, 3), costs, ints(5, 0, 0, -5))
    assert flow.is_whole
    assert flow.sent.tolist() == [5, 0, 5, 0]
    costs[3, 0] = 1
    flow = cheapest_flow(ints(0, 0, 1, 2), ints(1, 2, 3, 3), costs, ints(5, 0, 0, -5))
    assert flow.is_whole
    assert flow.sent.tolist() == [0, 5, 0, 5]


def test_there_is_no_flow_where_no_arc_leads_on() -> None:
    costs = np.zeros((2, 2), dtype=np.int64)
    assert not cheapest_flow(ints(0, 1), ints(2, 2), costs, ints(2, 1, -2, -1)).is_whole


def test_nothing_flows_through_a_network_without_arcs_or_supply() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert cheapest_flow(nothing, nothing, np.zeros((0, 2), dtype=np.int64), ints(0, 0)).is_whole
    flow = cheapest_flow(ints(0), ints(1), np.array([[3, 3]]), ints(0, 0))
    assert flow.is_whole
    assert flow.sent.tolist() == [0]


def drawn_basis(rng: np.random.Generator, tails: np.ndarray, heads: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """Some nodes hang on later ones of a random order, by arcs that lead the way that they need."""
    basis, left = np.full(len(supply), -1), supply.copy()
    rank = rng.permutation(len(supply))
    for node in np.argsort(rank):
        out, into = ((ends == node) & (rank[others] > rank[node]) for ends, others in ((tails, heads), (heads, tails)))
        arcs = np.flatnonzero(out if left[node] >= 0 else into)
        if len(arcs) and rng.random() < 0.7:
            basis[node] = rng.choice(arcs)
            left[(heads if left[node] >= 0 else tails)[basis[node]]] += left[node]
    return basis


def test_no_flow_is_cheaper_than_what_a_linear_program_finds() -> None:
    from scipy.optimize import linprog

    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        num_nodes, num_arcs = int(rng.integers(2, 10)), int(rng.integers(4, 60))
        tails, heads = rng.integers(0, num_nodes, (2, num_arcs))
        heads = np.where(tails == heads, (heads + 1) % num_nodes, heads)
        costs = rng.integers(0, int(rng.choice([2, 4, 30])), (len(tails), 2))
        supply = rng.integers(-4, 5, num_nodes)
        supply[0] -= supply.sum()
        flow = cheapest_flow(tails, heads, costs, supply, drawn_basis(rng, tails, heads, supply) if seed % 3 else None)
        ends = np.zeros((num_nodes, len(tails)))
        np.add.at(ends, (tails, np.arange(len(tails))), 1)
        np.subtract.at(ends, (heads, np.arange(len(tails))), 1)
        weights = costs @ [1e4, 1.0]
        best = linprog(weights, A_eq=ends, b_eq=supply)
        assert flow.is_whole == (best.status == 0)
        assert (flow.sent >= 0).all()
        for arc in range(num_arcs):
            before, after = flow.prices[tails[arc]].tolist(), flow.prices[heads[arc]].tolist()
            ahead = [before[0], before[1] + costs[arc, 0], before[2] + costs[arc, 1]]
            assert ahead == after if flow.sent[arc] else ahead >= after
        if flow.is_whole:
            found += 1
            assert (ends @ flow.sent == supply).all()
            assert weights @ flow.sent == pytest.approx(best.fun, rel=1e-9, abs=1e-6)
    assert found >= 50
