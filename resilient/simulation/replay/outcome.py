"""Sums a replay up: samples, where the nodes' time went, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.simulation.replay.job import Stretch

_HOUR_NS = 3_600_000_000_000

TIME_PARTS = ("training", "redundant", "redone", "recovery", "checkpointing", "idle")
"""Where the time of nodes goes; every live node is in one of them at any time.

``training``: steps that were kept, and the one under way at the end. ``redundant``: computing in these what other
nodes compute, too. ``redone``: steps that were lost. ``recovery``: from a change to the next step. ``checkpointing``:
waiting for checkpoints to be saved. ``idle``: nodes without work, all of them while the job stands still.
"""

_NODE_TIME: dict[str, Callable[[Stretch], int]] = {
    "training": lambda s: s.working * (s.training_ns - s.redundant_ns),
    "redundant": lambda s: s.working * s.redundant_ns,
    "redone": lambda s: s.working * s.redone_ns,
    "recovery": lambda s: s.working * s.recovery_ns,
    "checkpointing": lambda s: s.working * s.checkpointing_ns,
    "idle": lambda s: (s.live - s.working) * (s.end_ns - s.start_ns),
}

PRICES = {
    "a40": 0.40,
    "a100-40gb": 1.20,
    "a100-80gb": 1.50,
    "h100": 2.50,
    "h200": 3.00,
    "v100-32gb": 0.90,
    "l4": 0.25,
}
"""Dollars for an hour of one device, about what spot or community markets asked in 2024 and 2025. They differ by
provider and day: a rounded start, to be replaced by one's own."""


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """The result of a policy on a trace.

    Args:
        policy: Name of the policy.
        trace: Name of the trace.
        stretches: The run; at least one.
        batch: Samples of a step.
        node_hour_dollars: Price of a node for an hour, whether it works or not.
    """

    policy: str
    trace: str
    stretches: Sequence[Stretch]
    batch: int
    node_hour_dollars: float

    @property
    def duration_ns(self) -> int:
        """From the first node's joining to the end."""
        return self.stretches[-1].end_ns - self.stretches[0].start_ns

    @property
    def samples(self) -> int:
        """Samples of all steps that were finished and kept."""
        return self.batch * sum(stretch.steps for stretch in self.stretches)

    @property
    def samples_per_s(self) -> float:
        """Mean over the whole duration."""
        return self.samples / self.duration_ns * 1e9

    @property
    def node_ns(self) -> int:
        """Time of all live nodes together."""
        return sum(stretch.live * (stretch.end_ns - stretch.start_ns) for stretch in self.stretches)

    @property
    def split_ns(self) -> dict[str, int]:
        """Time of nodes by :data:`TIME_PARTS`; the sum is :attr:`node_ns`."""
        return {part: sum(map(_NODE_TIME[part], self.stretches)) for part in TIME_PARTS}

    @property
    def dollars(self) -> float:
        """Price of all nodes."""
        return self.node_ns / _HOUR_NS * self.node_hour_dollars

    @property
    def dollars_per_million(self) -> float | None:
        """Price of a million samples; None where there are none."""
        return self.dollars / self.samples * 1e6 if self.samples else None

    def throughput(self, window_s: float) -> Iterator[tuple[float, float]]:
        """Yield (hours since the trace's beginning, samples/s) of each window, lost samples not counted.

        Within a stretch, samples are spread evenly over the time that was not recovery, which comes first.

        Args:
            window_s: Length of a window; the last one may be shorter.
        """
        window_ns = round(window_s * 1e9)
        start, done = self.stretches[0].start_ns, 0.0
        for stretch in self.stretches:
            first = stretch.start_ns + stretch.recovery_ns
            rate = stretch.steps * self.batch / (stretch.end_ns - first) if stretch.end_ns > first else 0.0
            while start + window_ns <= stretch.end_ns:
                end = start + window_ns
                done += rate * max(0, end - max(first, start))
                yield (start + end) / 2 / _HOUR_NS, done / window_ns * 1e9
                start, done = end, 0.0
                first = max(first, end)
            done += rate * (stretch.end_ns - max(first, start))
        last = self.stretches[-1].end_ns
        if last > start:
            yield (start + last) / 2 / _HOUR_NS, done / (last - start) * 1e9

    def to_dict(self) -> dict[str, Any]:
        """Return everything that is reported, for JSON."""
        total = self.node_ns
        return {
            "policy": self.policy,
            "trace": self.trace,
            "hours": self.duration_ns / _HOUR_NS,
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "node_hours": total / _HOUR_NS,
            "node_hours_by_part": {part: part_ns / _HOUR_NS for part, part_ns in self.split_ns.items()},
            "share_by_part": {part: part_ns / total for part, part_ns in self.split_ns.items()},
            "stopped_hours": sum(stretch.stopped_ns for stretch in self.stretches) / _HOUR_NS,
            "dollars": self.dollars,
            "dollars_per_million_samples": self.dollars_per_million,
            "stretches": [
                {
                    "start_h": stretch.start_ns / _HOUR_NS,
                    "end_h": stretch.end_ns / _HOUR_NS,
                    "live": stretch.live,
                    "working": stretch.working,
                    "steps": stretch.steps,
                }
                for stretch in self.stretches
            ],
        }
