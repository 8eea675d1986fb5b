from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resilient.agent import membership
from tests.agent.membership.checker.history import run
from tests.agent.membership.checker.mutants.mistakes import MISTAKES, Mistake

_NUM_SEEDS, _IN_ONE_TEST = 2000, 100


@pytest.mark.parametrize("first", range(0, _NUM_SEEDS, _IN_ONE_TEST))
def test_all_promises_hold_in_random_histories(first: int) -> None:
    for seed in range(first, first + _IN_ONE_TEST):
        history = run(seed)
        assert not history.violation, history.told()


def test_a_seed_is_one_history() -> None:
    first, again = run(4711), run(4711)
    assert first == again
    assert len(first.lines) > 20


def test_histories_differ_in_how_their_jobs_end() -> None:
    assert {run(seed).exit_code for seed in range(200)} >= {0, 1, 3, 130}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_can_still_be_made(mistake: Mistake, tmp_path: Path) -> None:
    copy = tmp_path / "membership"
    shutil.copytree(membership.__path__[0], copy)
    mistake.make(copy)
    assert mistake.wrong in (copy / mistake.file).read_text()
