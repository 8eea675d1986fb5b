from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from random import Random

import pytest

from resilient.agent import membership
from resilient.agent.membership.parts.events import Stimulus
from tests.agent.membership.checker.history import SUCCESSION, run
from tests.agent.membership.checker.liar import attack
from tests.agent.membership.checker.mutants.mistakes import MISTAKES, Mistake
from tests.agent.membership.checker.world import World

_NUM_SEEDS, _IN_ONE_TEST = 2000, 100


@pytest.mark.parametrize("first", range(0, _NUM_SEEDS, _IN_ONE_TEST))
def test_all_promises_hold_in_random_histories(first: int) -> None:
    for seed in range(first, first + _IN_ONE_TEST):
        history = run(seed)
        assert not history.violation, history.told()


@pytest.mark.parametrize("seed", [22337], ids=["stands by and fails"])
def test_all_promises_hold_in_a_history_that_was_judged_wrongly(seed: int) -> None:
    history = run(seed)
    assert not history.violation, history.told()


@pytest.mark.parametrize("seed", [1, 6, 8, 16, 17, 24, 26])
def test_all_promises_hold_wherever_the_leader_is_lost_in_a_history(seed: int) -> None:
    """Jobs that end with each exit code; whatever happens, happens with and without a change of leaders before it."""
    for lost_at in count():
        history = run(seed, (event == lost_at for event in count()))
        assert not history.violation, history.told()
        if not any(SUCCESSION in line for line in history.lines):
            assert lost_at > 20, "the job is over before so many events, and no other history is like it"
            return


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


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_no_lie_breaks_the_machine_and_visitors_change_nothing(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = World.feed
    random = Random(first)
    attacks = 0

    def feed_after_an_attack(world: World, stimulus: Stimulus) -> None:
        nonlocal attacks
        if random.random() < 0.7:
            attacks += 1
            attack(world.machine, world.now, random)
        feed(world, stimulus)

    monkeypatch.setattr(World, "feed", feed_after_an_attack)
    for seed in range(first, first + 40):
        history = run(seed)
        assert not history.violation, history.told()
    assert attacks > 1000
