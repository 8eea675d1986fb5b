"""A coordinator alone: agents of other machines come when they come, more than may train stand by."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.harness import Run, check_recovered, command, run_job, started

NODES = 2
SMALL = ("--min-pipeline-nodes", "1")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nobody comes or goes."""
    run = run_job(tmp_path_factory.mktemp("reference"), *SMALL, nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def test_one_of_three_that_train_is_killed_and_one_that_stood_by_takes_its_place(
    reference: Run, tmp_path: Path
) -> None:
    token, gate = tmp_path / "token", tmp_path / "gate"
    token.write_text("a secret of this test\n")
    options = f"--no-local-nodes --token-file {token} --inject node=0,step=8,phase=backward"
    agents: list[subprocess.Popen[bytes]] = []
    with started(tmp_path / "run", *SMALL, "--hold-in", 5, "--gate", gate, nodes="2:3", options=options) as job:
        job.wait_for(lambda event: event["kind"] == "waiting")
        address = json.loads((job.directory / "job.json").read_text())["address"]
        line = command("agent", "--join", address, "--token-file", token)
        try:
            with (tmp_path / "agents.log").open("wb") as log:
                for _ in range(4):
                    agents.append(subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True))
            for node in range(4):
                job.wait_for(lambda event, node=node: event["kind"] == "node_ready" and event["node"] == node)
            gate.touch()
            run = job.wait()
            codes = sorted(each.wait(60) for each in agents)
        finally:
            for each in agents:
                each.kill()
    assert codes == [-signal.SIGKILL, 0, 0, 0], (tmp_path / "agents.log").read_text()
    check_recovered(run, reference)
    assert max(len(generation["nodes"]) for generation in run.generations) == 3
    assert run.generations[-1]["nodes"] == [1, 2, 3]
