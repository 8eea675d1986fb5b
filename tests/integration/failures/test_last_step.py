"""Exit 0 means that the last step is saved and that one script ran its end as the main one, whoever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.observability.event_log import read_events
from resilient.protocol.messages import Injection
from resilient.state.manifest import read_manifest
from tests.integration.harness import Event, Run, check_equal, command, run_job

NODES = 4
STEPS = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run."""
    run = run_job(tmp_path_factory.mktemp("reference"), "--steps", str(STEPS), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


@pytest.mark.parametrize("phase", ["commit", "prepare"])
@pytest.mark.parametrize("nodes", [NODES, NODES + 1], ids=["none to spare", "one to spare"])
def test_main_node_killed_in_the_last_step(nodes: int, phase: str, reference: Run, tmp_path: Path) -> None:
    """It has passed the last barrier, or not, and told nobody; the step before was saved on the way."""
    main = reference.generations[0]["pipelines"][0]["nodes"][0]
    inject = [f"node={main},step={STEPS},phase={phase}"]
    run = run_job(tmp_path, "--steps", str(STEPS), "--checkpoint-every", "5", nodes=nodes, inject=inject)
    if run.exit_code == 3:  # nobody had passed the barrier: the step is to be done again, by more nodes
        assert nodes == NODES
        assert run.reason.startswith("3 nodes are live")
        return
    check_equal(run, reference)
    assert read_manifest(tmp_path / "checkpoints" / f"step-{STEPS:08d}").step == STEPS
    assert [event["text"] for event in run.of_kind("output")] == [f"trained {STEPS} steps"]


def test_main_worker_killed_in_the_end_of_its_script_is_told_with_the_command_that_runs_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def kill(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "output" and event["text"] == f"trained {STEPS} steps":
            launcher.inject(Injection(node=0, worker_only=True))

    run = run_job(tmp_path / "run", "--steps", str(STEPS), "--stay-until", str(gate), nodes=NODES, act=kill)
    assert run.exit_code == 1
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    reason, _, words = run.reason.partition("; run the end of the script with: ")
    assert reason == (
        "node 0, which speaks for the job, was lost before its script ended (worker killed by SIGKILL); all steps are "
        f"done and saved in {checkpoint}"
    )
    gate.touch()
    again = tmp_path / "again"
    again.mkdir()
    done = subprocess.run(command(*words.split()[1:]), cwd=again, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (resumed,) = (again / "runs").iterdir()
    events = read_events(resumed / "events.jsonl")
    assert [event["text"] for event in events if event["kind"] in ("step", "output")] == [f"trained {STEPS} steps"]


@pytest.mark.parametrize("at", ["checkpoint", "finished"])
def test_all_nodes_killed_between_the_last_manifest_and_the_end_of_the_script(at: str, tmp_path: Path) -> None:
    """Whether the scripts were told to go on before their nodes were seen to be gone: the steps are saved."""
    agents: list[int] = []

    def kill(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "node_connected":
            agents.append(event["pid"])
        elif event["kind"] == at:
            for pid in agents:
                os.killpg(pid, signal.SIGKILL)

    gate = tmp_path / "gate"
    run = run_job(tmp_path / "run", "--steps", str(STEPS), "--stay-until", str(gate), nodes=NODES, act=kill)
    assert run.exit_code == 1
    assert max(run.losses) == STEPS
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    assert read_manifest(checkpoint).step == STEPS
    assert re.fullmatch(
        r"(all nodes were lost before the script ended|node \d, which speaks for the job, was lost before its script "
        rf"ended \(node lost\)); all steps are done and saved in {checkpoint}; run the end of the script with: "
        rf"resilient run --nodes {NODES} .*--resume {checkpoint} .*",
        run.reason,
    ), run.reason
    assert f"trained {STEPS} steps" not in [event["text"] for event in run.of_kind("output")]
