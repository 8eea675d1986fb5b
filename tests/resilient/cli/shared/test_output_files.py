"""What a command cannot write, it refuses before it computes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.cli.shared.output_files import check_outputs

PLAN = ("plan", "--model", "gpt2-medium", "--device", "a40", "--nodes", "4")
SIMULATE = ("simulate", *PLAN[1:5], "--availability", "g4dn")
SCHEDULE = ("schedule", "--stages", "2", "--microbatches", "2")
COMPARE = ("compare", "--model", "qwen2-vl-7b", "--device", "h100", "--workload", "coco")
WRITERS = [
    (PLAN, "resilient.cli.plan.report.build_plan_report", ("--json", "--png", "--templates")),
    (SIMULATE, "resilient.simulation.scenario.Scenario.run", ("--json", "--png")),
    (SCHEDULE, "resilient.cli.schedule.report.schedule_report", ("--png", "--trace-json")),
    (COMPARE, "resilient.cli.compare.report.compare_planners", ("--json", "--png")),
    (("profile", __file__), "resilient.cli.profile.progress_bar", ("--json",)),
    (("demo",), "resilient.cli.demo._train", ("--json",)),
]


def test_what_is_there_stays_and_what_is_not_is_not_made(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "a" / "b" / "new.png"
    old.write_text("old")
    os.utime(old, ns=(1, 1))
    check_outputs([("--json", old), ("--png", new), ("--trace-json", None)], [tmp_path / "other", None])
    assert (old.read_text(), old.stat().st_mtime_ns) == ("old", 1)
    assert list(new.parent.iterdir()) == []


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_outputs([(option, tmp_path / "pipe") for option in ("--json", "--trace-json")])  # would wait for a reader
    check_outputs([("--json", Path("/dev/null")), ("--trace-json", Path("/dev/null"))])
    assert [path.is_fifo() for path in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize(("command", "computing", "options"), WRITERS)
def test_commands_refuse_before_they_compute(
    command: tuple[str, ...],
    computing: str,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, lambda *_, **__: sys.exit("computed"))
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x.png"
    for option in options:
        ended = CliRunner().invoke(app, [command[0], option, str(path), *command[1:]])
        assert (ended.exit_code, ended.output) == (
            2,
            f"error: {option} must be a file that can be written, got {path} ({path.parent} is no folder); choose "
            "another, or make this one writable\n",
        )


def refused(message: str) -> AbstractContextManager[object]:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    reason = "Is a directory); choose another, or make this one writable"
    with refused(f"--json must be a file that can be written, got {tmp_path} ({reason}"):
        check_outputs([("--json", tmp_path)])


def test_pictures_end_in_png() -> None:
    with refused("--png must be a file that ends in .png, got plan.jpg; choose another"):
        check_outputs([("--png", Path("plan.jpg"))])


def test_no_file_is_written_over_another_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("measured")
    (tmp_path / "link.json").symlink_to("profile.json")
    for path in (tmp_path / "profile.json", tmp_path / "link.json"):
        with refused(f"--json must be another file than what is read, got {path} for both; choose another"):
            check_outputs([("--json", path)], [tmp_path / "profile.json"])
    new = tmp_path / "new.json"
    with refused(f"--templates must be another file than --json, got {new} for both; choose another"):
        check_outputs([("--json", new), ("--templates", new)])
