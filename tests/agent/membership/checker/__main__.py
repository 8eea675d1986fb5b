"""Looks for seeds whose histories break a promise; prints the first such history."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.agent.membership.checker.history import run


def main() -> int:
    """Run seeds one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.agent.membership.checker", description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many; without it, one, whose history is printed")
    arguments = parser.parse_args()
    ends: Counter[int | None] = Counter()
    for seed in range(arguments.start, arguments.start + (arguments.seeds or 1)):
        history = run(seed)
        if history.violation or arguments.seeds is None:
            sys.stdout.write(f"{history.told()}\n")
        if history.violation:
            return 1
        ends[history.exit_code] += 1
    sys.stdout.write(f"all holds; exit codes: {dict(sorted(ends.items(), key=str))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
