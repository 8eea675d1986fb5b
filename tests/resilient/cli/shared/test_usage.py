"""What is wrong with a command line is told in one line, with the value and what to do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app

PLAN = ["plan", "--model", "gpt3-2.7b", "--device", "a40", "--nodes", "8"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*PLAN, "--slow", "5=10"], "--slow must be a number, got '5=10'; give one such as 2.5"),
        ([*PLAN, "--nodes", "1e3"], "--nodes must be a whole number, got '1e3'; give one such as 4"),
        ([*PLAN, "--shard", "maybe"], "--shard must be one of 'off', 'auto', 'on', got 'maybe'; choose one of these"),
        (["plan"], "--nodes must be given, got none; see `resilient plan --help`"),
        ([*PLAN, "--nodez", "3"], "no such option: --nodez; did you mean --model or --nodes?"),
        ([*PLAN, "--slow"], "option '--slow' requires an argument; see `resilient plan --help`"),
        ([*PLAN, "more"], "got unexpected extra argument(s) (more); see `resilient plan --help`"),
        (["simulat"], "no such command 'simulat'; did you mean 'simulate'?"),
        (["simulate", "--availability", "ec2-p3", "--seed", "-1"], "--seed must be >= 0, got -1; give more"),
    ],
)
def test_unreadable_command_line_is_refused_in_one_line(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="resilient", terminal_width=300)

    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {told}\n")


def test_command_without_arguments_shows_its_help() -> None:
    result = CliRunner().invoke(app, ["inject"])

    assert "Usage:" in result.output
    assert "error:" not in result.output
