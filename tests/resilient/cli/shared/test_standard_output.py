"""Commands print on whatever standard output is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app

SCHEDULE = ["schedule", "--stages", "2", "--microbatches", "2"]


def start(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    """Run a command with a standard output of one's own; rich is to see no terminal."""
    command = [sys.executable, "-c", "from resilient.cli.app import app; app()", *arguments]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # as it is for most people
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=buffered, timeout=100)


@pytest.mark.parametrize(("charset", "line", "dot"), [("utf-8", "─", "·"), ("latin-1", "-", "·"), ("ascii", "-", ".")])
def test_timelines_are_drawn_with_what_the_encoding_has(charset: str, line: str, dot: str) -> None:
    ended = CliRunner(charset=charset).invoke(app, SCHEDULE, env={"COLUMNS": "40"})
    assert ended.exit_code == 0
    rows = ended.stdout.splitlines()
    assert rows[0] == "1f1b: 9 ms, 33.3 % bubble"
    assert set(rows[1]) - set("01FB ") == {line, dot}


def test_texts_of_others_are_escaped() -> None:
    ended = CliRunner(charset="ascii").invoke(app, ["run", "prüfung.py"])
    assert ended.exit_code == 2
    assert r"pr\xfcfung.py" in ended.stderr


@pytest.mark.parametrize("arguments", [SCHEDULE, ["--help"]])
def test_full_disk_is_told(arguments: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    ended = start(arguments, full)
    os.close(full)
    assert ended.returncode == 2
    message = "the output cannot be written (No space left on device); make room where it goes, or send it elsewhere"
    assert ended.stderr == f"error: {message}\n"


def test_reader_that_has_gone_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = start(SCHEDULE, writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_closed_standard_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    with runner.isolation() as streams:
        monkeypatch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit, match=r"^2$"):
            app(SCHEDULE)
        message = streams[1].getvalue().decode()
    assert message == "error: standard output must be open, got a closed one; redirect it to a file or to /dev/null\n"


def test_processes_of_a_command_get_a_standard_output_where_it_has_none() -> None:
    script = "import os, sys; from resilient.cli.app import app; app(['--help'], standalone_mode=False)"
    script += "; sys.stderr.write(str([os.get_inheritable(number) for number in range(3)]))"
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, script]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "[True, True, True]")
