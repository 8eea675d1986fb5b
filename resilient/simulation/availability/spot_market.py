"""Makes up traces of spot nodes with the statistics of real markets, for any cluster and length, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from resilient.errors import ArgumentError
from resilient.simulation.availability.traces import AvailabilityChange, AvailabilityTrace
from resilient.templates.common.words import look_up

_MINUTE_MS = 60_000


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Minutes between two events: a mixture of two geometric distributions, for events that come in waves.

    Args:
        short_share: Part of the gaps that are within a wave.
        short_min: Mean of these.
        long_min: Mean of the others.
    """

    short_share: float
    short_min: float
    long_min: float

    def draw(self, rng: random.Random) -> int:
        """Return a number of minutes, at least 1."""
        return _geometric(rng, self.short_min if rng.random() < self.short_share else self.long_min)


@dataclass(frozen=True, kw_only=True)
class Market:
    """How a provider takes and gives nodes. Sizes are parts of the cluster: an event concerns one pool of machines.

    Args:
        first: Part of the wanted nodes that are there at the start.
        losses: Between two times at which nodes are taken.
        loss: Mean part of the live nodes that are taken at once; sizes are geometric.
        gains: Between two times at which nodes are offered.
        gain: Mean part of the wanted nodes that are offered at once, likewise; no more than are missing join.
        source: Which trace the numbers were fitted to, and what they fit.
    """

    first: float
    losses: Gaps
    loss: float
    gains: Gaps
    gain: float
    source: str


MARKETS = {
    "ec2-p3": Market(
        first=0.6,
        losses=Gaps(short_share=0.40, short_min=2.42, long_min=12.27),
        loss=0.088,
        gains=Gaps(short_share=0.35, short_min=1.5, long_min=8.3),
        gain=0.065,
        source="EC2 P3 in Bamboo (NSDI'23), 32 nodes wanted, 11.4 h: 24.0 live on average, nodes lost every 8.3 min, "
        "2.1 at a time",
    ),
    "g4dn": Market(
        first=0.9,
        losses=Gaps(short_share=0.14, short_min=3.64, long_min=11.31),
        loss=0.051,
        gains=Gaps(short_share=0.43, short_min=3.30, long_min=16.95),
        gain=0.04,
        source="EC2 G4dn in Bamboo (NSDI'23), scaled to 30 nodes, 10.8 h: 22.2 live on average, nodes lost every "
        "10.3 min, 1.1 at a time",
    ),
}
"""Fitted by expectation maximisation (gaps) and means (sizes); the gains also so that as many nodes are live."""


def spot_trace(market: str, num_nodes: int, hours: float, *, seed: int = 0) -> AvailabilityTrace:
    """Make up a trace.

    Args:
        market: A name in :data:`MARKETS`.
        num_nodes: Nodes that are wanted, the most there are at a time.
        hours: Length.
        seed: The same seed, the same trace.

    Raises:
        ValueError: The market is not known, or a number not positive.
    """
    if num_nodes < 1 or not hours > 0:
        raise ArgumentError("num_nodes", "be >= 1 and hours > 0", f"{num_nodes} and {hours}", "ask for more")
    rules, rng = look_up("market", market, MARKETS), random.Random(f"{market} {num_nodes} {seed}")
    live = list(range(max(1, round(rules.first * num_nodes))))
    next_node = len(live)
    changes = [AvailabilityChange(time_ms=0, joined=tuple(live))]
    next_loss, next_gain = rules.losses.draw(rng), rules.gains.draw(rng)
    end_ms = round(hours * 60 * _MINUTE_MS)
    while (minute := min(next_loss, next_gain)) * _MINUTE_MS < end_ms:
        lost: list[int] = []
        joined: list[int] = []
        if minute == next_loss:
            next_loss += rules.losses.draw(rng)
            for _ in range(min(len(live), _geometric(rng, max(1.0, rules.loss * len(live))))):
                lost.append(live.pop(rng.randrange(len(live))))
        if minute == next_gain:
            next_gain += rules.gains.draw(rng)
            offered = _geometric(rng, max(1.0, rules.gain * num_nodes))
            joined += range(next_node, next_node + min(num_nodes - len(live), offered))
            next_node += len(joined)
            live += joined
        if joined or lost:
            changes.append(AvailabilityChange(time_ms=minute * _MINUTE_MS, joined=tuple(joined), lost=tuple(lost)))
    return AvailabilityTrace(name=f"{market}-{num_nodes}", changes=tuple(changes), end_ms=end_ms)


def _geometric(rng: random.Random, mean: float) -> int:
    """Return 1, 2, ..., geometrically distributed."""
    count = 1
    while rng.random() >= 1 / mean:
        count += 1
    return count
