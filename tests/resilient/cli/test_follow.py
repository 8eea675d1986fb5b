"""``resilient events`` and ``resilient logs``, of files that grow."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.common.printable import printable

STARTED = {"time": 1.0, "generation": 0, "kind": "node_connected", "node": 0, "host": "h", "pid": 7, "domain": ""}
STOPPED = {"time": 9.0, "generation": 1, "kind": "stopped", "exit_code": 0, "reason": "it is done", "path": None}


def _said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def _write(folder: Path, *events: object, end: str = "\n") -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + end for event in events))


def _log(folder: Path, node: int, local_rank: int, text: str) -> None:
    path = folder / "logs" / f"node-{node}" / f"worker-{local_rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())


def test_events_are_told_as_they_are_or_in_words(tmp_path: Path) -> None:
    listening = {"time": 2.0, "generation": 0, "kind": "listening", "address": "10.0.0.1:5"}
    _write(tmp_path, STARTED, listening)
    _write(tmp_path, STOPPED, end="")  # a line that is being written
    exit_code, text = _said("events", "--json", "--run", str(tmp_path))
    assert (exit_code, [json.loads(line) for line in text.splitlines()]) == (0, [STARTED, listening])
    exit_code, text = _said("events", "--run", str(tmp_path))
    assert exit_code == 0
    assert "another machine joins with: resilient agent --join 10.0.0.1:5" in text


def test_events_move_no_cursor_as_they_are(tmp_path: Path) -> None:
    """JSON may hold some of a terminal's codes as they are."""
    event = {**STARTED, "host": "\x9b2J\x7f\x1b ä"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event, ensure_ascii=False) + "\n")
    exit_code, text = _said("events", "--json", "--run", str(tmp_path))
    assert (exit_code, json.loads(text)) == (0, event)
    assert printable(text) == text


def test_events_in_words_end_with_why_a_job_stopped_and_not_with_why_it_finished(tmp_path: Path) -> None:
    _write(tmp_path, STARTED, {**STOPPED, "exit_code": 3, "reason": "too few"})
    assert _said("events", "--run", str(tmp_path))[1].splitlines()[-1] == "stopped with exit code 3: too few"
    (tmp_path / "events.jsonl").unlink()
    _write(tmp_path, STARTED, {"time": 8.0, "generation": 1, "kind": "finished", "step": 4, "path": "p"}, STOPPED)
    assert _said("events", "--run", str(tmp_path))[1].splitlines()[-1].endswith("finished after 4 steps")


def test_followed_events_end_with_the_job(tmp_path: Path) -> None:
    _write(tmp_path, STARTED)
    later = threading.Timer(0.3, lambda: _write(tmp_path, STOPPED, STARTED))
    later.start()
    exit_code, text = _said("events", "--follow", "--json", "--run", str(tmp_path))
    later.join()
    assert (exit_code, [json.loads(line) for line in text.splitlines()]) == (0, [STARTED, STOPPED])


def test_logs_tell_who_wrote_and_move_no_cursor(tmp_path: Path) -> None:
    _log(tmp_path, 10, 0, "one\ntwo\tand\nnot who")
    _log(tmp_path, 2, 1, "\x1b]0;title\x07\x9b2J\n\xe4\n")
    lines = ["[node 2 worker 1]: \\x1b]0;title\\x07\\x9b2J", "[node 2 worker 1]: ä"]
    others = ["[node 10 worker 0]: one", "[node 10 worker 0]: two\tand"]
    for words, expected in (
        ((), [*lines, *others]),
        (("--node", "10"), others),
        (("--local-ranks-filter", "1"), lines),
        (("--tail", "1"), [lines[-1], others[-1]]),
    ):
        exit_code, text = _said("logs", "--run", str(tmp_path), *words)
        assert (exit_code, text.splitlines()) == (0, expected)


def test_followed_logs_have_those_who_come_later_and_the_last_words(tmp_path: Path) -> None:
    _write(tmp_path, STARTED)
    _log(tmp_path, 0, 0, "first\n")

    def end() -> None:
        _log(tmp_path, 1, 0, "joined\n")
        _write(tmp_path, STOPPED)

    later = threading.Timer(0.3, end)
    later.start()
    exit_code, text = _said("logs", "--follow", "--run", str(tmp_path))
    later.join()
    assert (exit_code, text.splitlines()) == (0, ["[node 0 worker 0]: first", "[node 1 worker 0]: joined"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("events",), "no run in ./runs; name the folder of the run with --run"),
        (("logs", "--run", "none"), "--run must be the folder of a run, got none; choose one from ./runs"),
        (("logs", "--run", "."), "no worker of those asked for has a log in ./logs; leave options out, or --follow"),
    ],
)
def test_runs_that_are_not_there_are_told(
    words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, text = _said(*words)
    assert (exit_code, text) == (2, f"error: {told}\n")
