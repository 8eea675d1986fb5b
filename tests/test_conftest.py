"""Plain runs try fixed examples, the profile "search" tries others and more, and what it finds can be written down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).parents[1]

TESTS = """
from hypothesis import given, settings
from hypothesis import strategies as st

tried = []

@settings(max_examples=8)
@given(number=st.integers())
def test_few(number):
    tried.append(number)

@settings(max_examples=8)
@given(number=st.integers())
def test_small(number):
    assert number < 1000

def test_all_are_told():
    print("tried", tried)
"""


def run(folder: Path, *options: str) -> str:
    """Run the tests above with our settings, as one test process would."""
    (folder / "test_numbers.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", *options, str(folder)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return ended.stdout


def tried(told: str) -> list[int]:
    found = re.search(r"tried \[(.*)\]", told)
    assert found, told
    return [int(number) for number in found[1].split(", ")]


def test_plain_runs_try_the_same_examples(tmp_path: Path) -> None:
    first, second = tried(run(tmp_path)), tried(run(tmp_path))
    assert first == second
    assert 4 <= len(first) <= 8


def test_search_tries_other_examples_and_ten_times_as_many_as_a_test_asks_for(tmp_path: Path) -> None:
    first, second = (tried(run(tmp_path, "--hypothesis-profile=search")) for _ in range(2))
    assert first != second
    assert min(len(first), len(second)) > 40
    assert max(len(first), len(second)) <= 80


def test_what_search_finds_can_be_written_down(tmp_path: Path) -> None:
    told = run(tmp_path, "--hypothesis-profile=search")
    assert "test_small(\n" in told
    assert "number=1000," in told
    assert "@reproduce_failure(" in told


def test_this_run_does_not_depend_on_those_before() -> None:
    assert settings.get_profile("fixed").derandomize
    assert settings.get_profile("fixed").database is None
