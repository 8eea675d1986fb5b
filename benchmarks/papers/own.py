"""Our own planner beside the fastest other one, in every setting, with all nodes and after losses.

:mod:`headlines` prints it. With all nodes there plans are as published; where nodes are lost, one after the other, they
are plans that lose no state with one, and stay configured as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

from papers.settings import CASES, Case, least_ms, simulate

from resilient.planners.registry import PLANNERS, planner

OURS = "resilient"
LOST = (0, 1, 2, 4)
"""Nodes."""
NONE = float("inf")
"""Where there is no plan, or not so many nodes."""


def own_rows(num_batches: int, lengths: Path | None, workers: int) -> Iterator[str]:
    """Yield the rows of the table: how many times the bound ours takes, then who else takes least, and how much."""
    yield f"| setting | | bound | {' | '.join(f'{lost} lost' if lost else 'all nodes' for lost in LOST)} |"
    yield f"|{'---|' * (3 + len(LOST))}"
    jobs = list(product(CASES, PLANNERS))
    with ProcessPoolExecutor(workers) as pool:
        answers = pool.map(_of_bound, *zip(*jobs, strict=True), [num_batches] * len(jobs), [lengths] * len(jobs))
        found: dict[str, list[float]] = {}
        for (case, name), numbers in zip(jobs, answers, strict=True):
            found[name] = numbers
            if len(found) == len(PLANNERS):
                yield _row(case, found, least_ms(case, num_batches, lengths))
                found = {}


def _of_bound(case: Case, name: str, num_batches: int, lengths: Path | None) -> list[float]:
    """Return how many times the bound a planner's steps take for each of :data:`LOST`; endless where it cannot."""
    who = planner(name)
    left = [lost for lost in LOST[1:] if lost < case.nodes]
    safe = replace(case, max_failures=1)
    steps = simulate(case, who, who, num_batches, lengths) + simulate(safe, who, who, num_batches, lengths, left)
    least = [least_ms(case, num_batches, lengths, lost) for lost in (0, *left)]
    found = [each.step_ms / bound if each.fits else NONE for each, bound in zip(steps, least, strict=True)]
    return found + [NONE] * (len(LOST) - len(found))


def _row(case: Case, found: dict[str, list[float]], bound: float) -> str:
    cells: list[str] = []
    for index in range(len(LOST)):
        ours = found[OURS][index]
        name, theirs = min(
            ((name, each[index]) for name, each in found.items() if name != OURS), key=lambda pair: pair[1]
        )
        if ours == theirs == NONE:
            cells.append("-")
        else:
            cells.append(f"{_said(ours)}, {name} {_said(theirs)}")
    return f"| {case.name} | {case} | {bound:.0f} ms | {' | '.join(cells)} |"


def _said(times: float) -> str:
    return "none" if times == NONE else f"{times:.2f}x"
