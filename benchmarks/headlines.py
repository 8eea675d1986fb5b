"""What papers on multimodal planners report, what the simulation finds in settings near theirs, and our planner there.

    python benchmarks/headlines.py [--batches 5] [--lengths FOLDER] [claim ...]
    python benchmarks/headlines.py --own [--batches 2]

Prints the tables of ``docs/planners.md``. Claims are named by their titles. Nothing is fitted to the published numbers.
``tried`` is the same two planners with something else about them or about the settings: what a gain comes from, and
what makes it more or less than the published one; its gains are in the order of the settings. ``--own`` prints the
settings instead, with our own planner and the fastest other one in each, with all nodes and after losses.
``--lengths`` takes pictures and captions from tables of real ones instead of generators.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from papers.claims import CLAIMS, Claim, Who, who
from papers.own import OURS, own_rows
from papers.settings import FILES, MEASURED, Case, Steps, least_ms, simulate

NO_PLAN = "no plan"


def claim_rows(names: Sequence[str], num_batches: int, lengths: Path | None, workers: int) -> Iterator[str]:
    """Yield the rows of the table of claims."""
    yield "| claim | published | simulated | times the bound: slower, faster, ours | tried |"
    yield "|---|---|---|---|---|"
    claims = [number for number, claim in enumerate(CLAIMS) if not names or claim.name in names]
    jobs = [(number, index) for number in claims for index in range(len(CLAIMS[number].cases))]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(_looked_for, *zip(*jobs, strict=True), [num_batches] * len(jobs), [lengths] * len(jobs))
        for number in claims:
            yield _row(CLAIMS[number], [next(found) for _ in CLAIMS[number].cases])


def _looked_for(number: int, index: int, num_batches: int, lengths: Path | None) -> tuple[list[str], str, float]:
    """Return a claim's gain in one of its cases and what is tried there, in words; times the bound; the gain."""
    claim = CLAIMS[number]
    case = claim.cases[index]
    known: dict[tuple[Case, int, int], Steps] = {}

    def steps(case: Case, by: Who) -> Steps:
        key = (case, id(by[0]), id(by[1]))
        if key not in known:
            known[key] = simulate(case, *by, num_batches, lengths)[0]
        return known[key]

    worse, better = steps(case, claim.worse), steps(case, claim.better)
    said, gain = _gain(claim, worse, better)
    tried = [
        _gain(claim, steps(other, each.worse or claim.worse), steps(other, each.better or claim.better))[0]
        for each in (claim.reasons if case.model != MEASURED else ())
        for other in (replace(case, **each.change),)
    ]
    bound = least_ms(case, num_batches, lengths)
    ours = steps(case, who(OURS))
    times = [
        f"{each.step_ms / bound:.2f}" if each.fits and each.step_ms < np.inf else "-" for each in (worse, better, ours)
    ]
    return [said, *tried], ", ".join(times), gain


def _gain(claim: Claim, worse: Steps, better: Steps) -> tuple[str, float]:
    """Return how many times less the better planner takes, in words and as a number, 0 where plans do not fit."""
    if np.inf in (worse.step_ms, better.step_ms):
        return NO_PLAN, 0.0
    more, less = claim.measure(worse), claim.measure(better)
    gain = more / less if less else np.inf
    beyond = "" if worse.fits and better.fits else " beyond memory"
    return f"{gain:.2f}x{beyond}", 0.0 if beyond else gain


def _row(claim: Claim, found: Sequence[tuple[list[str], str, float]]) -> str:
    names = [case.name for case in claim.cases]
    simulated = ", ".join(f"{name} {gains[0]}" for name, (gains, *_) in zip(names, found, strict=True))
    times = "; ".join(f"{name} {each}" for name, (_, each, _) in zip(names, found, strict=True))
    reasons = [
        f"{reason.what}: {', '.join(gains[number] for gains, *_ in found if len(gains) > 1)}"
        for number, reason in enumerate(claim.reasons, 1)
    ]
    verdicts = Counter(_verdict(claim, gain) for *_, gain in found)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    return f"| {claim.name} | {claim.published} | {counted}: {simulated} | {times} | {'; '.join(reasons)} |"


def _verdict(claim: Claim, gain: float) -> str:
    """Say what is left of a claim, two decimals being what is published."""
    gain = round(gain, 2)
    if not gain:
        return NO_PLAN
    if claim.low <= gain <= claim.high:
        return "as published"
    if gain > claim.high:
        return "more"
    return "less" if gain > 1 else "vanished"


def main() -> None:
    """Simulate and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--batches", type=int)
    parser.add_argument("--lengths", type=Path, help=f"folder of {' and '.join(FILES.values())}")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    if options.own:
        rows = own_rows(options.batches or 2, options.lengths, workers)
    else:
        rows = claim_rows(options.names, options.batches or 5, options.lengths, workers)
    for row in rows:
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
