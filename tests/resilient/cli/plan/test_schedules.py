"""``resilient plan --schedule``: what is planned for another schedule, and which one is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from resilient.observability.wording import duration
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.replan.replan import first_plan
from resilient.templates.schedules.kind import INTERLEAVED_KINDS, ScheduleKind
from tests.resilient.cli.plan.test_command import SMALL, planned, run, small_problem, step_ms


def test_schedule_is_chosen_by_simulation_and_it_is_said_by_how_much(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(derive_profile("gpt3-2.7b", "a40", microbatch=2).to_json())
    job = {"model": None, "device": None, "profile": str(tmp_path / "profile.json"), "min_pipeline_nodes": "3"}
    report = planned(tmp_path, schedule="auto", chunks="3", **job)
    chosen, others = report["choice"]["chosen"], report["choice"]["others"]
    assert (report["schedule"], report["num_chunks"]) == (chosen["schedule"], chosen["num_chunks"])
    assert {each["num_chunks"] for each in (chosen, *others)} == {1, 2, 3}
    assert all(chosen["step_ms"] < each["step_ms"] / 0.99 for each in others)
    takes_chunks = ScheduleKind(chosen["schedule"]) in INTERLEAVED_KINDS
    chunks = str(chosen["num_chunks"]) if takes_chunks else None
    same = planned(tmp_path, **job, schedule=chosen["schedule"], chunks=chunks)
    assert {**report, "choice": None} == same
    plain = next(each for each in others if each["schedule"] == "1f1b")
    options = {f"--{name.replace('_', '-')}": value for name, value in job.items()}
    told = run({**SMALL, **options, "--schedule": "auto", "--chunks": "3"}).output
    assert f"schedule {chosen['schedule']} with " in told
    assert f"1f1b {duration(plain['step_ms'])} ({plain['step_ms'] / chosen['step_ms'] - 1:+.1%})" in told


def test_schedule_for_accelerators_is_one_that_they_run(tmp_path: Path) -> None:
    choice = planned(tmp_path, schedule="auto", chunks="4", nodes="8", min_pipeline_nodes="4")["choice"]
    assert {each["num_chunks"] for each in (choice["chosen"], *choice["others"])} == {1}


def test_schedule_that_is_asked_for_is_planned(tmp_path: Path) -> None:
    report = planned(tmp_path, schedule="zb-h1")
    assert (report["schedule"], report["num_chunks"], report["choice"]) == ("zb-h1", 1, None)
    first = first_plan(replace(small_problem(), schedule=ScheduleKind.ZB_H1), range(7))
    assert report["step_ms"] == pytest.approx(step_ms(first))
    assert "schedule zb-h1, 1 stage on each device\n" in run({**SMALL, "--schedule": "zb-h1"}).output
    assert "schedule" not in run({**SMALL}).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"--schedule": "zb-"},
            "--schedule must be one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, split-1f1b, zb-h1, zb-h2, "
            "interleaved-zb, zb-v, auto, got 'zb-'; did you mean 'zb-h1' or 'zb-h2' or 'zb-v'?",
        ),
        (
            {"--chunks": "2"},
            "--chunks must stand beside --schedule interleaved-1f1b or interleaved-zb, or auto, got 2",
        ),
    ],
)
def test_schedules_that_cannot_be_are_refused(options: dict[str, str | None], message: str) -> None:
    ended = run({**SMALL, **options})
    assert ended.exit_code == 2
    assert message in ended.output
