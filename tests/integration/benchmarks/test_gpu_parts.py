"""The benchmark of a GPU keeps its time, ends what it starts, and says what it left out and why."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from benchmarks import gpu
from benchmarks.parts.gpu.part import LOG, Outcome, Part, Row, Setting, reason_to_skip, run_all, run_apart
from benchmarks.parts.gpu.report import machine, report_of, table_of
from tests.integration.benchmarks import parts_to_run
from tests.processes import has_ended


def part(name: str = "one", *, needs_s: float = 10.0, num_devices: int = 1) -> Part:
    return Part(name=name, measure=parts_to_run.good, needs_s=needs_s, num_devices=num_devices)


def setting(folder: Path, limit_s: float = 60.0) -> Setting:
    return Setting(device="cpu", num_devices=3, folder=folder, limit_s=limit_s, is_rehearsal=True)


@pytest.mark.parametrize(
    ("needed", "left_s", "reason"),
    [
        (1, 10.0, ""),
        (1, 9.4, "needs 10 s, 9 s are left"),
        (1, -5.0, "needs 10 s, 0 s are left"),
        (2, 99.0, "needs 2 devices, got 1"),
    ],
)
def test_parts_are_skipped_for_want_of_devices_or_time(needed: int, left_s: float, reason: str) -> None:
    assert reason_to_skip(part(num_devices=needed), 1, left_s) == reason


@pytest.mark.parametrize(
    ("budget_s", "took_s", "limits"),
    [
        (90.0, {}, {"first": 30.0, "second": 50.0, "third": 10.0}),
        (90.0, {"first": 5.0, "second": 40.0}, {"first": 30.0, "second": 75.0, "third": 45.0}),
        (65.0, {}, {"first": 10.0, "second": 50.0}),
    ],
    ids=["all take all", "some take less", "too little for all"],
)
def test_parts_have_what_later_ones_do_not_need(
    budget_s: float, took_s: dict[str, float], limits: dict[str, float], tmp_path: Path
) -> None:
    now_s = 1000.0
    found: dict[str, float] = {}

    def run(each: Part, where: Setting) -> Outcome:
        nonlocal now_s
        found[each.name] = where.limit_s
        now_s += took_s.get(each.name, where.limit_s)
        return Outcome(part=each.name, rows=[Row(what="x", value=1.0)])

    told: list[str] = []
    outcomes = run_all(
        [part("first"), part("two devices", num_devices=2), part("second", needs_s=50.0), part("third")],
        device="cpu",
        num_devices=1,
        folder=tmp_path,
        budget_s=budget_s,
        clock=lambda: now_s,
        run=run,
        tell=told.append,
    )
    assert found == limits
    assert told == [f"{name} (at most {limit_s:.0f} s)" for name, limit_s in limits.items()]
    skipped = {outcome.part: outcome.skipped for outcome in outcomes if outcome.skipped}
    too_late = {} if "third" in limits else {"third": "needs 10 s, 5 s are left"}
    assert skipped == {"two devices": "needs 2 devices, got 1", **too_late}
    assert not any(outcome.is_wrong for outcome in outcomes)


def test_what_one_device_needs_is_there() -> None:
    assert len({each.name for each in gpu.PARTS}) == len(gpu.PARTS)
    assert sum(each.needs_s for each in gpu.PARTS if each.num_devices == 1) <= 60 * gpu.MINUTES


@pytest.mark.parametrize(
    ("measure", "rows", "skipped", "failed"),
    [
        (parts_to_run.good, [Row(what="devices", value=3)], "", ""),
        (parts_to_run.wanting, [], "a library is missing", ""),
        (parts_to_run.failing, [], "", "ValueError: first line; see {log}"),
        (parts_to_run.dying, [], "", "its process ended with exit code 7, see {log}"),
    ],
)
def test_part_runs_in_a_process_of_its_own(
    measure: Callable[[Setting], list[Row]], rows: list[Row], skipped: str, failed: str, tmp_path: Path
) -> None:
    outcome = run_apart(Part(name="one", measure=measure, needs_s=1), setting(tmp_path))
    assert (outcome.rows, outcome.skipped) == (rows, skipped)
    assert outcome.failed == failed.format(log=tmp_path / LOG)
    assert outcome.is_wrong == bool(failed)
    if rows:
        assert (tmp_path / LOG).read_text() == "of the part\n"


def test_part_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    endless = Part(name="one", measure=parts_to_run.hanging, needs_s=1)
    outcome = run_apart(endless, setting(tmp_path, limit_s=5.0))
    assert outcome.failed == f"killed after 5 s, see {tmp_path / LOG}"
    assert outcome.rows == [Row(what="devices", value=3)], "what it had measured before is told"
    assert "parts_to_run.py" in (tmp_path / LOG).read_text(), "and where it hung"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or has_ended(psutil.Process(pid))


def test_report_says_what_was_skipped_failed_and_is_wrong() -> None:
    outcomes = [
        Outcome(
            part="a",
            rows=[
                Row(what="rate", value=12345.6, unit="GB/s", beside="gloo"),
                Row(what="loss", value=0.25, wrong="it grows"),
            ],
        ),
        Outcome(part="b", skipped="needs 2 devices, got 1"),
        Outcome(part="c", failed="killed after 5 s"),
        Outcome(part="d"),
    ]
    assert [outcome.is_wrong for outcome in outcomes] == [True, False, True, True]
    printed = io.StringIO()
    Console(width=100, file=printed).print(table_of(outcomes, "title"))
    lines = [" ".join(line.split()) for line in printed.getvalue().splitlines()]
    assert lines == [
        "title",
        "part what value beside",
        "a rate 12,346 GB/s gloo",
        "loss 0.25 WRONG: it grows",
        "b skipped needs 2 devices, got 1",
        "c FAILED killed after 5 s",
        "d FAILED it measured nothing",
    ]
    written = json.loads(json.dumps(report_of(outcomes, machine=machine("cpu"), is_rehearsal=True, took_s=1.5)))
    assert [each["skipped"] for each in written["parts"]] == ["", "needs 2 devices, got 1", "", ""]
    assert written["parts"][0]["rows"][1]["wrong"] == "it grows"
    assert written["machine"]["devices"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.NO_GPU == 3
    assert "finds no CUDA device" in capsys.readouterr().out


def test_rehearsal_prints_a_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--rehearse", "--only", "copies", "--json", str(tmp_path / "gpu.json")]) == 0
    assert "rehearsal on the CPU" in capsys.readouterr().out
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["is_rehearsal"] is True
    ((copied,),) = [each["rows"] for each in written["parts"]]
    assert copied["what"] == "state copy between workers of one device"
    assert copied["value"] > 0
