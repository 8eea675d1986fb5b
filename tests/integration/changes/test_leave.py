"""Nodes that announce that they go: no step is lost, and what only they hold goes to the others first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from tests.integration.harness import (
    Event,
    Run,
    check_equal,
    check_recovered,
    check_survivors,
    command,
    run_job,
    started,
)

NODES = 5
STEP = 6
"""The departure is announced in it."""

ONE_PIPELINE = ("--max-failures", "0", "--min-pipeline-nodes", "1", "--microbatch", "28")
"""Each state is on one node only."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nobody leaves."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def run_and_leave(
    folder: Path, *arguments: str, leaving: dict[int, int], nodes: int = NODES, inject: Sequence[str] = ()
) -> Run:
    """Run a job in which nodes are asked to leave, each in a step, which waits for it: the change comes after it."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step":
            for node, step in leaving.items():
                if event["step"] == step - 1:
                    launcher.remove_node(node)

    options = [word for step in sorted(set(leaving.values())) for word in ("--change-after", str(step))]
    return run_job(folder / "run", *options, *arguments, nodes=nodes, inject=inject, act=act)


def check_left(run: Run, *nodes: int) -> None:
    """Check that these nodes left, without any work lost."""
    departures = run.report["departures"]
    assert sorted(node for departure in departures for node in departure["nodes"]) == sorted(nodes)
    assert all(departure["lost_steps"] == 0 for departure in departures)
    assert run.report["recoveries"] == []
    assert not set(nodes) & set(run.generations[-1]["nodes"])
    steps = [event["step"] for event in run.of_kind("step")]
    assert steps == sorted(set(steps)), "no step may be done twice"
    check_survivors(run)


def test_node_leaves_at_a_step_boundary(reference: Run, tmp_path: Path) -> None:
    run = run_and_leave(tmp_path, leaving={2: STEP})
    check_equal(run, reference)
    check_left(run, 2)
    (departure,) = run.report["departures"]
    assert departure["step"] == STEP + 1
    assert run.of_kind("node_lost") == []


def test_agent_told_to_terminate_leaves(reference: Run, tmp_path: Path) -> None:
    """SIGTERM announces a departure, as a spot notice does."""
    agents: dict[int, int] = {}

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "node_connected":
            agents[event["node"]] = event["pid"]
        elif event["kind"] == "step" and event["step"] == STEP - 1:
            os.kill(agents[2], signal.SIGTERM)

    run = run_job(tmp_path / "run", "--change-after", str(STEP), nodes=NODES, act=act)
    check_equal(run, reference)
    check_left(run, 2)
    assert run.of_kind("node_leaving")[0]["reason"] == "SIGTERM"


@pytest.mark.parametrize("leaving", [{0: 6}, {0: 6, 2: 6}, {1: 6, 0: 9}], ids=["one", "all but one", "one by one"])
def test_states_that_only_the_leaving_node_holds_are_handed_over(
    leaving: dict[int, int], reference: Run, tmp_path: Path
) -> None:
    run = run_and_leave(tmp_path, *ONE_PIPELINE, leaving=leaving, nodes=3)
    check_equal(run, reference)
    check_left(run, *leaving)
    assert {node for generation in run.generations for node in generation["senders"]} == set(leaving)
    held = {
        stage["node"]: (stage["first_layer"], stage["end_layer"])
        for stage in run.generations[0]["pipelines"][0]["stages"]
    }
    assert len(held) == 3, "each node had a part of the model"
    assert all(departure["bytes_copied"] > 0 for departure in run.report["departures"])


def test_leaving_node_dies_while_others_copy_from_it(reference: Run, tmp_path: Path) -> None:
    """Then it is a failure like any other: the others hold everything as well."""
    run = run_and_leave(tmp_path, leaving={2: STEP}, inject=[f"node=2,step={STEP + 1},phase=copy"])
    (fired,) = run.failures
    assert (fired["node"], fired["step"]) == (2, STEP + 1)
    check_recovered(run, reference)
    (recovery,) = run.report["recoveries"]
    assert recovery["nodes"] == [2]


def test_only_holder_dies_while_others_copy_from_it(tmp_path: Path) -> None:
    run = run_and_leave(
        tmp_path, *ONE_PIPELINE, leaving={0: STEP}, nodes=3, inject=[f"node=0,step={STEP + 1},phase=copy"]
    )
    assert run.exit_code == 4
    assert "no live node holds layer.0" in run.reason


def test_departure_that_leaves_too_few_nodes_stops_with_a_checkpoint(tmp_path: Path) -> None:
    run = run_and_leave(tmp_path, leaving={0: STEP, 3: STEP})
    assert run.exit_code == 3
    assert run.reason.startswith("3 nodes are live ([1, 2, 4]), 4 are needed; resume with: resilient run --nodes 4 ")
    assert run.report["exit"]["checkpoint"].endswith(f"step-{STEP:08d}")


def test_departure_asked_for_through_the_command_line(reference: Run, tmp_path: Path) -> None:
    options = "--domains east,west"
    with started(tmp_path / "run", "--change-after", STEP, nodes=NODES, options=options) as job:
        job.wait_for_step(STEP - 1)
        subprocess.run(command("drain", "--run", job.directory, 3), check=True, timeout=60)
        run = job.wait()
    check_equal(run, reference)
    check_left(run, 3)
    assert "node 3 left, training paused for" in job.output
    assert Counter(event["domain"] for event in run.of_kind("node_connected")) == {"east": 3, "west": 2}


def test_machine_that_joined_leaves_again_when_interrupted(reference: Run, tmp_path: Path) -> None:
    """Ctrl-C reaches the agent's whole process group."""
    gate = tmp_path / "gate"
    options = ("--hold-in", STEP, "--gate", gate, "--change-after", STEP, "--change-after", STEP + 1)
    with started(tmp_path / "run", *options, nodes=NODES) as job:
        job.wait_for_step(1)
        access = json.loads((job.directory / "job.json").read_text())
        agent = subprocess.Popen(
            command("agent", "--join", access["address"]),
            env={**os.environ, "RESILIENT_TOKEN": access["token"]},
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            job.wait_for(lambda event: event["kind"] == "boundary" and event["joining"] == [NODES])
            job.processes.take_in_children(agent.pid)
            gate.touch()
            job.wait_for(lambda event: event["kind"] == "generation" and NODES in event["nodes"])
            os.killpg(agent.pid, signal.SIGINT)
            run = job.wait()
            _, errors = agent.communicate(timeout=60)
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert agent.returncode == 0, errors
    check_equal(run, reference)
    check_left(run, NODES)
    assert run.of_kind("node_leaving")[0]["reason"] == "SIGINT"
