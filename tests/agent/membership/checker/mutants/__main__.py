"""Mistakes that the membership machine could have, and after how many seeds the checker tells each.

    python -m tests.agent.membership.checker.mutants [--seeds N] [NAME ...]

Each is a piece of source that is replaced in a copy of the package, which is then checked as the package is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.agent.membership.checker.mutants.mistakes import MISTAKES, Mistake

_ROOT = Path(__file__).parents[5]
_CHECKER = "tests.agent.membership.checker"
_VERDICT = re.compile(r"^seed (\d+): (.*)$")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a mistake; ``num_seeds``: after which it was told, None if it was not."""

    num_seeds: int | None
    violation: str


def check(mistake: Mistake, num_seeds: int) -> Verdict:
    """Check a copy of the package with a mistake.

    Raises:
        ValueError: What is to be replaced is not there, or not once.
        RuntimeError: The checker itself failed.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        package = copy / "resilient"
        package.mkdir()
        for entry in (_ROOT / "resilient").iterdir():
            if entry.name not in ("agent", "__pycache__"):
                (package / entry.name).symlink_to(entry.resolve())
        shutil.copytree(_ROOT / "agent", package / "agent", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "tests").symlink_to(_ROOT / "tests")
        mistake.make(package / "agent" / "membership")
        command = [sys.executable, "-m", _CHECKER, "--seeds", str(num_seeds)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Verdict(num_seeds=None, violation="")
    told = [match for line in done.stdout.splitlines() if (match := _VERDICT.match(line))]
    if not told:
        raise RuntimeError(f"the checker failed with {mistake.name!r}:\n{done.stderr}")
    return Verdict(num_seeds=int(told[-1][1]) + 1, violation=told[-1][2])


def main() -> int:
    """Check all mistakes, or those that are named; print a line for each."""
    parser = argparse.ArgumentParser(prog=f"python -m {_CHECKER}.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="try so many of each (2000)")
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if mistake.name in (arguments.names or [mistake.name])]
    num_killed = 0
    for mistake in chosen:
        verdict = check(mistake, arguments.seeds)
        num_killed += verdict.num_seeds is not None
        after = "survives" if verdict.num_seeds is None else f"seed {verdict.num_seeds - 1}"
        sys.stdout.write(f"{mistake.name:<50} {after:<10} {verdict.violation[:110]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{num_killed} of {len(chosen)} are told\n")
    return 0 if num_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
