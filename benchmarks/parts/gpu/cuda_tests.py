"""The repository's own tests that need a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.parts.gpu.part import Row, Setting, SkippedError

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "integration" / "gpu"
_MARGIN_S = 5.0


def measure(setting: Setting) -> list[Row]:
    """Run the tests that are marked ``gpu``; in a rehearsal the same tests on the CPU."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("xdist") is None:
        raise SkippedError("pytest is not installed; pip install -e '.[test]'")
    marker = "not gpu" if setting.is_rehearsal else "gpu"
    return run_tests(TESTS, marker, setting.folder, setting.limit_s - _MARGIN_S)


def run_tests(path: Path, marker: str, folder: Path, limit_s: float) -> list[Row]:
    """Run tests that a marker selects; return how many passed, one row for each that did not, and why some skipped.

    Args:
        path: A file or folder of tests.
        marker: An expression of pytest's ``-m``.
        folder: For what pytest writes.
        limit_s: After which it is killed.
    """
    told = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", marker, f"--junitxml={told}"]
    command += [f"--basetemp={folder / 'tests'}", str(path)]
    subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False)
    if not told.exists():
        raise RuntimeError("pytest has written no results")
    return rows_of(told)


def rows_of(told: Path) -> list[Row]:
    """Return the rows of a file of JUnit's kind."""
    cases = list(ET.parse(told).getroot().iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(wrong) - len(skipped)
    rows = [Row(what="tests passed", value=passed, wrong="" if passed else "none has passed")]
    rows += [Row(what=_name(case), value="failed", wrong=_reason(case, "failure", "error")) for case in wrong]
    reasons = sorted({_reason(case, "skipped") for case in skipped})
    if skipped:
        rows.append(Row(what="tests skipped", value=len(skipped), beside="; ".join(reasons)))
    return rows


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}"


def _reason(case: ET.Element, *kinds: str) -> str:
    found = next(each for each in map(case.find, kinds) if each is not None)
    return (found.get("message") or found.text or "no reason given").strip().splitlines()[0]
