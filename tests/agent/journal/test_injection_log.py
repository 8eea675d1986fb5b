"""Of the failures that were wanted, those that no dying process wrote down are known at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.agent.journal.injection_log import InjectionLog
from resilient.protocol.messages import Injection

FIRST, SECOND = Injection(node=1, at_step=3, at_phase="commit"), Injection(node=9, at_step=5)


def died(path: Path, node: int, step: int | None, phase: str | None, *, worker_only: bool = False) -> None:
    line = {"time": 1.0, "node": node, "phase": phase, "step": step, "worker_only": worker_only}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_what_was_wanted_and_never_caused_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "injections.jsonl"
    log = InjectionLog(path, [FIRST, SECOND])
    log.want(Injection(node=2))
    assert log.read() == []
    died(path, 1, 3, "commit")
    died(path, 2, None, None)
    assert [caused["node"] for caused in log.read()] == [1, 2]
    assert log.read() == []
    assert log.missed() == [{"node": 9, "phase": None, "step": 5, "worker_only": False}]


@pytest.mark.parametrize(
    ("wanted", "is_missed"),
    [
        (Injection(node=1, at_phase="commit"), False),
        (Injection(node=1, at_phase="commit", at_step=4), True),
        (Injection(node=1, at_phase="reduce"), True),
        (Injection(node=1, at_phase="commit", worker_only=True), True),
        (Injection(node=1), True),
    ],
)
def test_a_failure_is_only_the_one_that_was_wanted(tmp_path: Path, wanted: Injection, is_missed: bool) -> None:
    log = InjectionLog(tmp_path / "injections.jsonl", [wanted])
    died(tmp_path / "injections.jsonl", 1, 3, "commit")
    log.read()
    assert bool(log.missed()) == is_missed
