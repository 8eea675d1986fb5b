"""Injected failures strike once, at their moment, and leave a record."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import Injection

STEP = ("step", "forward", "forward", "backward", "reduce", "prepare", "commit")


def strikes(tmp_path: Path, *injections: Injection) -> list[tuple[int, str]]:
    """Go through steps 1 to 3; return when a failure was due."""
    killed: list[Injection] = []
    faults = Faults(str(tmp_path), kill=killed.append)
    for injection in injections:
        faults.arm(injection)
    moments: list[tuple[int, str]] = []
    for step in (1, 2, 3):
        for phase in STEP:
            before = len(killed)
            faults.reach(phase, step)
            moments += [(step, phase)] * (len(killed) - before)
    return moments


@pytest.mark.parametrize(
    ("at_step", "at_phase", "moment"),
    [
        (2, None, (2, "step")),
        (2, "forward", (2, "forward")),
        (3, "commit", (3, "commit")),
        (None, "reduce", (1, "reduce")),
    ],
)
def test_failure_strikes_once_at_its_moment(
    at_step: int | None, at_phase: str | None, moment: tuple[int, str], tmp_path: Path
) -> None:
    assert strikes(tmp_path, Injection(node=1, at_step=at_step, at_phase=at_phase)) == [moment]


@pytest.mark.parametrize(("at_phase", "moments"), [("send", ["audio"]), ("llm.send", ["llm"]), ("vision.send", [])])
def test_failure_in_a_phase_of_a_unit_waits_for_that_unit(at_phase: str, moments: list[str], tmp_path: Path) -> None:
    killed: list[Injection] = []
    faults, seen = Faults(str(tmp_path), kill=killed.append), list[str]()
    faults.arm(Injection(node=1, at_phase=at_phase))
    for unit in ("audio", "llm", "audio"):
        before = len(killed)
        faults.reach("send", 1, unit)
        faults.reach("forward", 1, unit)
        seen += [unit] * (len(killed) - before)
    assert seen == moments


def test_failures_are_independent_and_a_passed_step_never_comes(tmp_path: Path) -> None:
    twice = Injection(node=1, at_step=2, at_phase="backward")
    assert strikes(tmp_path, twice, twice, Injection(node=1, at_step=9)) == [(2, "backward")] * 2


def test_failure_is_recorded_before_it_strikes(tmp_path: Path) -> None:
    def check(_: Injection) -> None:
        line = json.loads((tmp_path / "injections.jsonl").read_text())
        assert {key: line[key] for key in ("node", "phase", "step", "worker_only", "worker")} == {
            "node": 4, "phase": "prepare", "step": 7, "worker_only": True, "worker": 2,
        }  # fmt: skip
        seen.append(line["time"])

    seen: list[float] = []
    faults = Faults(str(tmp_path), kill=check)
    faults.arm(Injection(node=4, at_step=7, at_phase="prepare", worker_only=True, worker=2))
    faults.reach("prepare", 7)
    assert len(seen) == 1


@pytest.mark.parametrize("worker_only", [True, False])
def test_strike_kills_the_worker_or_its_whole_node(worker_only: bool) -> None:
    """The node is a session: here this process's child, and a grandchild in place of the worker."""
    script = (
        "import os, sys\n"
        "from resilient.protocol.fault_injection import strike\n"
        "from resilient.protocol.messages import Injection\n"
        "child = os.fork()\n"
        f"if child == 0: strike(Injection(node=0, worker_only={worker_only}))\n"
        "os._exit(os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)
    assert ended.returncode == (signal.SIGKILL if worker_only else -signal.SIGKILL)


def test_failure_of_a_node_is_recorded_once_though_all_its_workers_reach_it(tmp_path: Path) -> None:
    script = (
        "import os, time\n"
        "from resilient.protocol.fault_injection import Faults, strike\n"
        "from resilient.protocol.messages import Injection\n"
        "os.fork() and os.fork()\n"
        "def late(injection):\n"
        "    time.sleep(0.3)\n"
        "    strike(injection)\n"
        f"faults = Faults({str(tmp_path)!r}, kill=late)\n"
        "faults.arm(Injection(node=0, at_phase='copy'))\n"
        "faults.reach('copy', 7)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len((tmp_path / "injections.jsonl").read_text().splitlines()) == 1
