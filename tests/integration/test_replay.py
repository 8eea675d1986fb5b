"""A real run with a kill: its decisions can be taken again, and are those it took."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.integration.harness import command, started


def test_run_with_a_kill_is_replayed(tmp_path: Path) -> None:
    options = "--inject node=2,step=3,phase=backward"
    with started(tmp_path / "run", "--steps", 6, nodes=5, options=options) as job:
        run = job.wait()
    assert run.exit_code == 0, run.reason
    assert [event["node"] for event in run.of_kind("node_lost")] == [2]
    ended = subprocess.run(command("replay", run.directory), capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "equal to events.jsonl"
    assert ended.stdout.count("  detected  nodes=[2] ") == 1
