"""Replays the same traces with other numbers of nodes and survivable failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resilient.errors import ArgumentError
from resilient.simulation.availability.traces import MOST_TRACED_NODES, AvailabilityTrace
from resilient.simulation.replay.outcome import ReplayOutcome
from resilient.simulation.scenario import DoesNotFit, Scenario

KNOBS = ("nodes", "max-failures")


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The outcome of one policy with one combination of values.

    Args:
        values: Of the knobs.
        policy: Name of the policy.
        outcome: What came of it; None where the policy can never train.
        reason: Why it cannot.
    """

    values: Mapping[str, int]
    policy: str
    outcome: ReplayOutcome | None
    reason: str = ""


def parse_sweeps(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read ``nodes=16,24,32`` and the like.

    Raises:
        ValueError: One does not have this form, or names a knob twice or none.
    """
    sweeps: dict[str, tuple[int, ...]] = {}
    for text in texts:
        knob, _, numbers = text.partition("=")
        values = tuple(number.strip() for number in numbers.split(","))
        if knob not in KNOBS or knob in sweeps or not all(value.isdecimal() for value in values):
            raise ArgumentError(
                "sweep",
                'look like "nodes=16,24,32"',
                repr(text),
                f"give each of {' and '.join(KNOBS)} at most once",
            )
        if knob == "nodes" and not all(1 <= int(value) <= MOST_TRACED_NODES for value in values):
            raise ArgumentError("sweep", f"have nodes of 1 to {MOST_TRACED_NODES}", repr(text), "leave the others out")
        sweeps[knob] = tuple(dict.fromkeys(map(int, values)))
    return sweeps


def run_sweep(
    sweeps: Mapping[str, Sequence[int]],
    trace: Callable[[int | None], AvailabilityTrace],
    scenario: Callable[[int | None, int], Scenario],
    policies: Sequence[str],
    named: Callable[[str], str] = str,
) -> Iterator[SweepRow]:
    """Yield a row for every combination of the knobs' values and every policy.

    Args:
        sweeps: Values of the knobs; the number of failures only matters to the policy ``resilient``.
        trace: The trace for a number of nodes, or with its own where none is given.
        scenario: The scenario for a number of survivable failures, or the job's own, and the most nodes of the trace.
        policies: Names of policies.
        named: Says what arguments are called in the reasons why a policy can never train.
    """
    for values in itertools.product(*sweeps.values()):
        knobs = dict(zip(sweeps, values, strict=True))
        replayed = trace(knobs.get("nodes"))
        for policy in policies:
            try:
                job = scenario(knobs.get("max-failures"), replayed.max_nodes)
                yield SweepRow(values=knobs, policy=policy, outcome=job.run(replayed, policy))
            except DoesNotFit as error:
                yield SweepRow(values=knobs, policy=policy, outcome=None, reason=error.told(named))


def best(rows: Sequence[SweepRow], key: Callable[[ReplayOutcome], float | None], *, least: bool) -> int | None:
    """Return the index of the first row with the least or greatest value; rows without one do not count."""
    found = [
        (value, index) for index, row in enumerate(rows) if row.outcome and (value := key(row.outcome)) is not None
    ]
    if not found:
        return None
    return min(found)[1] if least else min(found, key=lambda each: (-each[0], each[1]))[1]
