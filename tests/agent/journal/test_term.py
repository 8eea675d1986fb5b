"""Whose term it is: one coordinator's at a time, whoever was stopped meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import re
from pathlib import Path

import pytest

from resilient.agent.journal import term as terms
from resilient.agent.journal.term import DeposedError, Term, newest_term, shows_life
from resilient.errors import ResilientError


def test_later_term_ends_the_one_before(tmp_path: Path) -> None:
    assert newest_term(tmp_path) == 0
    first = Term.claim(tmp_path)
    with first.in_office():
        pass
    second = Term.claim(tmp_path)
    assert newest_term(tmp_path) == 2
    assert (first.number, second.number) == (1, 2)
    with second.in_office():
        pass
    with pytest.raises(DeposedError) as error, first.in_office():
        pytest.fail("nothing is done by who was deposed")
    assert str(error.value) == (
        f"another coordinator has taken this job over (term 2 in {tmp_path}/term, this one's is 1); follow it with: "
        f"resilient status --run {tmp_path}"
    )
    first.close()
    second.close()


def test_life_is_seen_while_somebody_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "_LIFE_S", 0.1)
    assert not asyncio.run(shows_life(tmp_path)), "there never was one"
    term = Term.claim(tmp_path)
    assert not asyncio.run(shows_life(tmp_path))

    async def lead() -> bool:
        looking = asyncio.create_task(shows_life(tmp_path))
        await asyncio.sleep(0)  # it has looked once
        term.show_life()
        return await looking

    assert asyncio.run(lead())
    term.close()


def test_of_several_who_follow_the_same_one_does(tmp_path: Path) -> None:
    Term.claim(tmp_path).close()
    Term.claim(tmp_path, after=1).close()
    with pytest.raises(DeposedError, match=r"^another coordinator is about to take this job over \(term 2 in "):
        Term.claim(tmp_path, after=1)


def test_lock_that_is_held_by_who_does_not_go_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "_LOCK_TIMEOUT_S", 0.1)
    with (tmp_path / "term").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ResilientError) as error:
            Term.claim(tmp_path)
    told = rf"{tmp_path}/term must not be locked for long, got a lock held for 0.1 s: .* {tmp_path}/job.json names"
    assert re.fullmatch(told, str(error.value))


def test_nobody_begins_a_term_while_another_acts_in_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "_LOCK_TIMEOUT_S", 0.1)
    first = Term.claim(tmp_path)
    with first.in_office(), pytest.raises(ResilientError, match="must not be locked for long"):
        Term.claim(tmp_path)
    Term.claim(tmp_path).close()
    first.close()
