"""A number out of an option's range is refused in the words of all other errors."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("run", ("--port", "65536"), "--port must be 0 to 65535, got 65536; give less"),
        ("run", ("--port", "-1"), "--port must be 0 to 65535, got -1; give more"),
        ("agent", ("--workers", "0"), "--workers must be >= 1, got 0; give more"),
        ("inject kill", ("--node", "-1"), "--node must be >= 0, got -1; give more"),
        ("inject kill", ("--node", "1", "--at-step", "0"), "--at-step must be >= 1, got 0; give more"),
        ("plan", ("--nodes", "100001"), "--nodes must be 1 to 100000, got 100001; give less"),
        ("plan", ("--nodes", "4", "--gpus-per-node", "0"), "--gpus-per-node must be 1 to 100000, got 0; give more"),
        ("plan", ("--nodes", "4", "--max-failures", "-1"), "--max-failures must be >= 0, got -1; give more"),
        ("compare", ("--microbatch", "0"), "--microbatch must be >= 1, got 0; give more"),
        (
            "compare",
            ("--nodes", "10001"),
            "--nodes must be 1 to 10000, got 10001; give less: published planners try every way to divide devices "
            "among units",
        ),
        ("compare", ("--seed", "-1"), "--seed must be >= 0, got -1; give more"),
        ("schedule", ("--stages", "1025"), "--stages must be 1 to 1024, got 1025; give less"),
        ("simulate", ("--restart-nodes", "0"), "--restart-nodes must be >= 1, got 0; give more"),
        ("demo", ("--steps", "3"), "--steps must be >= 20, got 3; give more"),
    ],
)
def test_number_out_of_range_is_refused_with_the_fix(command: str, options: tuple[str, ...], message: str) -> None:
    ended = CliRunner().invoke(app, [*command.split(), *options])
    assert (ended.exit_code, ended.output) == (2, f"error: {message}\n")
