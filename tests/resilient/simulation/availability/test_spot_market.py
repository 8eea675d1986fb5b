"""Made-up spot markets have the statistics of the traces they stand for."""

from __future__ import annotations

import re
import statistics
from itertools import pairwise

import pytest

from resilient.simulation.availability.spot_market import MARKETS, spot_trace
from resilient.simulation.availability.traces import AvailabilityTrace

SEEDS = range(40)


def numbers(trace: AvailabilityTrace) -> dict[str, float]:
    """Gaps between the times of losses and of joins (min), sizes, and the mean of live nodes."""
    found: dict[str, float] = {}
    for kind in ("lost", "joined"):
        events = [(c.time_ms / 60_000, len(getattr(c, kind))) for c in trace.changes[1:] if getattr(c, kind)]
        times = [time for time, _ in events]
        gaps = [later - time for time, later in pairwise(times)]
        found[f"{kind} gap"] = statistics.fmean(gaps)
        found[f"{kind} spread"] = statistics.pstdev(gaps) / statistics.fmean(gaps)
        found[f"{kind} size"] = statistics.fmean(size for _, size in events)
    counts = [*trace.counts(), (trace.end_ms, 0)]
    live = sum((end - start) * count for (start, count), (end, _) in pairwise(counts))
    found["live"] = live / (trace.end_ms - trace.changes[0].time_ms)
    return found


# What the same function finds for the traces: EC2 P3 (32 nodes, 11.37 h) and EC2 G4dn (scaled to 30, 10.77 h).
REAL = {
    "ec2-p3": (
        32,
        11.37,
        {
            "lost gap": 8.31, "lost spread": 1.15, "lost size": 2.11,
            "joined gap": 7.24, "joined spread": 1.25, "joined size": 1.92, "live": 24.0,
        },
    ),
    "g4dn": (
        30,
        10.77,
        {
            "lost gap": 10.27, "lost spread": 0.98, "lost size": 1.14,
            "joined gap": 10.64, "joined spread": 1.39, "joined size": 1.25, "live": 22.2,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("market", REAL)
def test_means_over_seeds_are_near_those_of_the_real_trace(market: str) -> None:
    num_nodes, hours, real = REAL[market]
    found = [numbers(spot_trace(market, num_nodes, hours, seed=seed)) for seed in SEEDS]
    means = {name: statistics.fmean(each[name] for each in found) for name in real}
    assert means == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("market", sorted(MARKETS))
@pytest.mark.parametrize("num_nodes", [1, 7, 300])
def test_nodes_join_once_are_lost_while_there_and_never_more_than_wanted(market: str, num_nodes: int) -> None:
    trace = spot_trace(market, num_nodes, 24, seed=3)
    live: set[int] = set()
    seen: set[int] = set()
    for change in trace.changes:
        assert live.issuperset(change.lost)
        assert seen.isdisjoint(change.joined)
        seen.update(change.joined)
        live = live - set(change.lost) | set(change.joined)
        assert len(live) <= num_nodes
    assert trace.changes[-1].time_ms <= trace.end_ms == 86_400_000
    assert len(trace.changes) > 50


def test_large_clusters_lose_and_get_the_same_parts() -> None:
    small, large = (
        [numbers(spot_trace("ec2-p3", num_nodes, 12, seed=seed)) for seed in SEEDS] for num_nodes in (32, 1000)
    )
    for name, scale in (("lost gap", 1), ("lost size", 1000 / 32), ("live", 1000 / 32)):
        means = [statistics.fmean(each[name] for each in found) for found in (small, large)]
        assert means[1] / means[0] == pytest.approx(scale, rel=0.15), name


def test_seeds_decide() -> None:
    assert spot_trace("g4dn", 20, 3, seed=5) == spot_trace("g4dn", 20, 3, seed=5)
    assert spot_trace("g4dn", 20, 3, seed=5) != spot_trace("g4dn", 20, 3, seed=6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("azure", 9, 1.0), "market must be one of ec2-p3, g4dn, got 'azure'; choose one of these"),
        (("g4dn", 0, 1.0), "num_nodes must be >= 1 and hours > 0, got 0 and 1.0; ask for more"),
        (("g4dn", 9, 0.0), "num_nodes must be >= 1 and hours > 0, got 9 and 0.0; ask for more"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        spot_trace(*arguments)
