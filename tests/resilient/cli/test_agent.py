"""``resilient agent``: what it refuses before it asks anybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "head"], "--join must be HOST:PORT, got 'head'; take the address from the run's job.json"),
        (
            ["--join", "http://h:1"],
            "--join must be HOST:PORT, got 'http://h:1'; take the address from the run's job.json",
        ),
        (
            ["--join", "etcd://h:1"],
            "--join must look like etcd://HOST[:PORT],.../PREFIX[?ca=FILE&certificate=FILE&key=FILE], got "
            "'etcd://h:1'; give each job a prefix of its own",
        ),
        (
            ["--join", "h:1", "--tee", "4"],
            "--tee must be 0, 1, 2, 3 or RANK:N,..., got '4'; 0 is for none, 1 for stdout, 2 for stderr, 3 for both",
        ),
        (
            ["--join", "h:1", "--local-ranks-filter", "a"],
            "--local-ranks-filter must be local ranks with commas between, got 'a'; as in 0,1",
        ),
        (["--join", "h:1", "--heartbeat-s", "0"], "--heartbeat-s must be > 0, got 0; leave it out for the default"),
    ],
)
def test_agent_that_could_never_join_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["agent", *arguments], env={"RESILIENT_TOKEN": "t"})
    assert (result.exit_code, result.output) == (2, f"error: {message}\n")


def test_agent_without_a_token_is_told_how_to_give_it_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["agent", "--join", "h:1"], env={"RESILIENT_TOKEN": ""})
    fix = "give the job's token with --token-file or RESILIENT_TOKEN, or the folder of the run with --run"
    assert (result.exit_code, result.output) == (2, f"error: no run in ./runs; {fix}\n")
