"""How close planned templates come to the best that the simulation of 1F1B can find among all templates.

    python benchmarks/optimality.py [--cases 100]

The planner is exactly optimal for a closed form, ``sum(t) + sync + (N - 1) max(t)``; 1F1B is shorter where waiting for
the slowest stage overlaps with filling the pipeline. On small random jobs all templates can be simulated: the table has
the simulated step of the planned one in terms of the shortest. The cases are seeded: the table is always the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from rich.console import Console

from resilient.cli.shared.printing import plain_table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.templates.simulated_steps import KINDS, random_case, ratio_to_best


def ratios(kind: str, num_cases: int) -> list[float]:
    """Return the ratios of the jobs of a kind that have templates, ascending."""
    found = (ratio_to_best(random_case(kind, seed)) for seed in range(num_cases))
    return sorted(ratio for ratio in found if ratio is not None)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="jobs of each kind")
    num_cases = parser.parse_args().cases
    title = "simulated step of the plan / shortest of all templates"
    table = plain_table("jobs", "cases", "median", "90 %", "worst", left=("jobs",), title=title)
    measured = {kind: ratios(kind, num_cases) for kind in KINDS}
    measured["all"] = sorted(ratio for kind in KINDS for ratio in measured[kind])
    for kind, values in measured.items():
        numbers = (statistics.median(values), values[len(values) * 9 // 10], values[-1])
        table.add_row(kind, str(len(values)), *(f"{number:.4f}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
