"""Of the failures that were wanted, those that no dying process wrote down are known at the end."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from resilient.agent.journal.injection_log import InjectionLog
from resilient.protocol.fault_injection import recorded
from resilient.protocol.messages import Injection

FIRST, SECOND = Injection(node=1, at_step=3, at_phase="commit"), Injection(node=9, at_step=5)


def died(path: Path, node: int, step: int | None, phase: str | None, worker: int | None = None) -> None:
    injection = Injection(node=node, worker_only=worker is not None, worker=worker or 0)
    with recorded(injection, str(path.parent), step, phase):
        pass


def test_what_was_wanted_and_never_caused_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "injections.jsonl"
    log = InjectionLog(path, [FIRST, SECOND])
    log.want(Injection(node=2))
    assert log.read() == []
    died(path, 1, 3, "commit")
    died(path, 2, None, None)
    assert [caused["node"] for caused in log.read()] == [1, 2]
    assert log.read() == []
    assert log.missed() == [{"node": 9, "phase": None, "step": 5, "worker_only": False, "worker": None}]


def test_workers_of_a_node_that_are_to_die_at_once_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "injections.jsonl"
    wanted = [Injection(node=1, at_step=3, at_phase="commit", worker_only=True, worker=worker) for worker in (0, 1)]
    log = InjectionLog(path, [FIRST, *wanted])
    died(path, 1, 3, "commit", worker=1)
    log.read()
    place = {"node": 1, "phase": "commit", "step": 3}
    assert log.missed() == [
        {**place, "worker_only": False, "worker": None},
        {**place, "worker_only": True, "worker": 0},
    ]


def test_one_failure_is_one_of_those_that_were_wanted(tmp_path: Path) -> None:
    path = tmp_path / "injections.jsonl"
    in_any_step = Injection(node=1, at_phase="commit")
    log = InjectionLog(path, [in_any_step, FIRST, FIRST])
    died(path, 1, 3, "commit")
    log.read()
    assert [each["step"] for each in log.missed()] == [None, 3]
    died(path, 1, 7, "commit")
    log.read()
    assert [each["step"] for each in log.missed()] == [3]


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


@pytest.mark.parametrize("worker_only", [False, True])
def test_records_of_versions_that_killed_first_workers_only_are_read(tmp_path: Path, worker_only: bool) -> None:
    path = tmp_path / "injections.jsonl"
    path.write_text(json.dumps({"node": 1, "phase": "commit", "step": 3, "worker_only": worker_only}) + "\n")
    log = InjectionLog(path, [FIRST, msgspec.structs.replace(FIRST, worker_only=True)])
    log.read()
    assert [each["worker_only"] for each in log.missed()] == [not worker_only]
