"""An option's old name ends the command with one line that says the new one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app


@pytest.mark.parametrize(
    ("command", "value", "new"),
    [
        (("run", "--trace", "10-12", "train.py"), "10-12", "--trace-steps"),
        (("schedule", "--trace", "t.json"), "t.json", "--trace-json"),
        (("simulate", "--model", "gpt2-medium", "--trace", "g4dn"), "g4dn", "--availability"),
    ],
)
def test_the_old_name_is_refused_with_the_new_one(command: tuple[str, ...], value: str, new: str) -> None:
    ended = CliRunner().invoke(app, command)
    message = f"--trace is called {new} now, got --trace {value}; write {new} {value}"
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("command", ["run", "schedule", "simulate"])
def test_the_old_name_is_not_in_the_help(command: str) -> None:
    assert "--trace " not in CliRunner().invoke(app, [command, "--help"]).stdout


@pytest.mark.parametrize(
    ("command", "new"),
    [
        (("run", "--nodes", "2", "--trace"), "--trace-steps"),
        (("schedule", "--trace"), "--trace-json"),
        (("simulate", "--trace"), "--availability"),
    ],
)
def test_the_old_name_without_a_value_is_refused_with_the_new_one(command: tuple[str, ...], new: str) -> None:
    ended = CliRunner().invoke(app, command)
    message = f"--trace is called {new} now, got --trace without a value; write {new}"
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"error: {message}\n")


def test_other_options_without_a_value_are_as_they_were() -> None:
    ended = CliRunner().invoke(app, ("schedule", "--png"))
    assert ended.exit_code == 2
    assert "--png" in ended.stderr
    assert "called" not in ended.stderr
