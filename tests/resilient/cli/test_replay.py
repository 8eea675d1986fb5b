"""`resilient replay`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.agent.membership.regrouping import Regrouping
from resilient.cli.app import app
from tests.agent.logged_job import eventful


def replayed(folder: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["replay", str(folder)])
    return result.exit_code, result.output.splitlines()


def test_decisions_are_printed_and_equal(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 0
    assert len(lines) == len(written) + 2
    assert '     5.000 s  generation 1  node_lost  node=2 cause="node lost"' in lines
    assert lines[-2].startswith(f"{len(written)} decisions of ")
    assert lines[-1] == "equal to events.jsonl"


def test_difference_is_named_with_exit_code_1(tmp_path: Path) -> None:
    eventful(tmp_path).leave()
    log = tmp_path / "events.jsonl"
    log.write_text(log.read_text().replace('"cause": "node lost"', '"cause": "unplugged"'))
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 1
    assert lines[-1].endswith('is node_lost with cause "node lost" in the replay; events.jsonl says "unplugged"')


def test_fault_of_the_machine_is_told_with_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful(tmp_path).leave()
    monkeypatch.setattr(Regrouping, "begin_failure", lambda *_: None)
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 1
    assert "error: the membership is inconsistent: nodes [2] take part in generation 1 and are gone" in lines


@pytest.mark.parametrize("missing", ["stimuli.jsonl", "events.jsonl"])
def test_folder_without_a_log_is_refused(tmp_path: Path, missing: str) -> None:
    eventful(tmp_path).leave()
    (tmp_path / missing).unlink()
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 2
    assert lines == [
        f"error: RUN must be the folder of a run with its stimuli.jsonl and events.jsonl, got {tmp_path} "
        f"([Errno 2] No such file or directory: '{tmp_path}/{missing}'); choose one from ./runs"
    ]


@pytest.mark.parametrize("line", ["[1,2]", "3", "[" * 100_000])
def test_line_that_is_no_event_is_named_and_the_path_is_left_as_it_is(tmp_path: Path, line: str) -> None:
    folder = tmp_path / ":x:"  # no picture is made of a path
    folder.mkdir()
    eventful(folder).leave()
    log = folder / "events.jsonl"
    log.write_text(f"{line}\n{log.read_text()}")
    exit_code, lines = replayed(folder)
    assert exit_code == 2
    assert lines == [f"error: line 1 of {log} must be a JSON object, got {line.encode()[:80]!r}"]


def test_logs_in_which_nothing_was_recorded_are_not_equal(tmp_path: Path) -> None:
    eventful(tmp_path).leave()
    log = tmp_path / "stimuli.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    (tmp_path / "events.jsonl").write_text("")
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 2
    assert lines == [f"error: {log} must hold what a coordinator was told, got nothing recorded; choose another run"]
    log.write_text("")
    exit_code, lines = replayed(tmp_path)
    assert exit_code == 2
    assert lines == [
        f"error: line 1 of {log} must hold a job's settings, version 2, got nothing recorded; choose another run"
    ]
