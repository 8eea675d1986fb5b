"""Nodes come and go while the job trains; planned changes cost no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from tests.integration.harness import (
    CHAIN,
    Event,
    Run,
    check_equal,
    check_recovered,
    check_survivors,
    command,
    run_job,
    started,
)

NODES = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nobody comes or goes."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def check_joined(run: Run, node: int) -> None:
    """Check that a node got a place, without any work lost."""
    assert [(join["nodes"], join["lost_steps"]) for join in run.report["joins"]] == [([node], 0)]
    assert node in run.generations[-1]["nodes"]
    steps = [event["step"] for event in run.of_kind("step")]
    assert steps == sorted(set(steps)), "no step may be done twice"


def test_node_joins_at_a_step_boundary(reference: Run, tmp_path: Path) -> None:
    """Step 6 waits until its workers hear of the joiner, and is then trained by the old members."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 5:
            launcher.add_node()

    run = run_job(tmp_path / "run", "--change-after", "6", nodes=NODES, act=act)
    check_equal(run, reference)
    check_survivors(run)
    check_joined(run, NODES)
    (join,) = run.report["joins"]
    assert (join["step"], run.report["recoveries"]) == (7, [])
    assert join["bytes_copied"] > 0


def test_node_joins_through_the_command_line(reference: Run, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 6, "--gate", gate, "--change-after", 6, nodes=NODES) as job:
        job.wait_for_step(5)
        access = json.loads((job.directory / "job.json").read_text())
        agent = subprocess.Popen(
            command("agent", "--join", access["address"]),
            env={**os.environ, "RESILIENT_TOKEN": access["token"]},
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            job.wait_for(lambda event: event["kind"] == "boundary")
            job.processes.take_in_children(agent.pid)
            gate.touch()
            run = job.wait()
            _, errors = agent.communicate(timeout=60)
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert agent.returncode == 0, errors
    check_equal(run, reference)
    check_survivors(run)
    check_joined(run, NODES)


def test_agent_without_the_token_is_turned_away(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with started(tmp_path / "run", "--hold-in", 3, "--gate", gate, nodes=NODES) as job:
        job.wait_for_step(2)
        address = json.loads((job.directory / "job.json").read_text())["address"]
        done = subprocess.run(
            command("agent", "--join", address),
            env={**os.environ, "RESILIENT_TOKEN": "guessed"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        gate.touch()
        run = job.wait()
    assert done.returncode == 1
    expected = (
        f"token must be the job's token, got one that the coordinator at {address} does not have; take it from the"
    )
    assert expected in done.stderr
    assert run.exit_code == 0
    assert run.report["joins"] == []


# A node agent that loses patience with its coordinator sooner than those of the command line.
IMPATIENT = """
import asyncio, logging, os
from resilient.agent.node import NodeAgent, NodeOptions
logging.basicConfig()
options = NodeOptions(coordinator=os.environ["ADDRESS"], token=os.environ["RESILIENT_TOKEN"], connect_timeout_s=2.0)
raise SystemExit(asyncio.run(NodeAgent(options).run()))
"""


def test_joiner_whose_coordinator_is_killed_while_it_imports_the_script_ends(tmp_path: Path) -> None:
    """With the job that nobody takes over."""
    gate, importing = tmp_path / "gate", tmp_path / "importing"
    script = tmp_path / "chain.py"
    script.write_text(CHAIN.read_text().replace("import argparse\n", "import argparse\nimport held\n", 1))
    (tmp_path / "held.py").write_text(
        "import os, pathlib, time\n"
        "while 'HOLD' in os.environ:\n"
        "    pathlib.Path(os.environ['HOLD']).touch()\n"
        "    time.sleep(0.01)\n"
    )
    options = "--heartbeat-s 2 --orphan-s 2 --grace-s 4"
    held = ("--hold-in", 3, "--gate", gate)
    with started(tmp_path / "run", *held, nodes=NODES, script=script, options=options) as job:
        job.wait_for_step(2)
        access = json.loads((job.directory / "job.json").read_text())
        environment = {"ADDRESS": access["address"], "RESILIENT_TOKEN": access["token"], "HOLD": str(importing)}
        agent = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT],
            env={**os.environ, **environment},
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            job.wait_for(lambda event: event["kind"] == "node_connected" and event["node"] == NODES)
            while not importing.exists():
                assert agent.poll() is None
                time.sleep(0.02)
            job.processes.take_in_children(agent.pid)
            job.kill()
            agent.communicate(timeout=100)
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
        assert agent.returncode == 3
        assert job.processes.left() == []


@pytest.mark.parametrize("phase", ["forward", "commit", "regroup", "copy"])
def test_node_dies_while_another_joins(phase: str, reference: Run, tmp_path: Path) -> None:
    """The boundary of step 6 was asked for; a member dies in that step, or in the change it leads to."""
    joined = tmp_path / "joined"
    at = 6 if phase in ("forward", "commit") else 7

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 5:
            launcher.add_node()
        elif event["kind"] == "generation" and NODES in event["nodes"]:
            joined.touch()  # also where step 6 is done again

    run = run_job(
        tmp_path / "run",
        *("--change-after", "6", "--unless", str(joined)),
        nodes=NODES,
        inject=[f"node=1,step={at},phase={phase}"],
        act=act,
    )
    # A kill in the forward pass of step 6 comes before the step waits for the joiner.
    assert [(fired["node"], fired["phase"], fired["step"]) for fired in run.failures] == [(1, phase, at)]
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 2, 3, 4]


def test_joiner_dies_while_it_joins(reference: Run, tmp_path: Path) -> None:
    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 5:
            launcher.add_node()

    run = run_job(
        tmp_path / "run",
        *("--change-after", "6"),
        nodes=NODES,
        inject=[f"node={NODES},phase=copy"],
        act=act,
    )
    assert [(fired["node"], fired["phase"]) for fired in run.failures] == [(NODES, "copy")]
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 1, 2, 3]
