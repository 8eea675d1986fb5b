"""Nodes and workers die with SIGKILL at every instant a step has; the result is that of the failure-free run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_runs
from resilient.testing import fail_at
from tests.integration.harness import (
    DIGITS,
    Event,
    Run,
    check_recovered,
    check_survivors,
    command,
    run_job,
    spare_nodes,
    started,
)

NODES = 6
STEP = 5
IN_STEP = ("forward", "backward", "reduce", "prepare", "commit")
IN_RECOVERY = ("regroup", "copy")
VLM = ("--steps", "6", "--batch", "24", "--microbatch", "4", "--precision", "fp64")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def check_fired(run: Run, *expected: tuple[int, str | None]) -> None:
    """Check that exactly these nodes were killed, each in its phase of the step."""
    assert [(fired["node"], fired["phase"], fired["step"]) for fired in run.failures] == [
        (node, phase, STEP) for node, phase in expected
    ]


@pytest.mark.parametrize("phase", IN_STEP)
def test_node_killed_in_a_step(phase: str, reference: Run, tmp_path: Path) -> None:
    run = run_job(tmp_path, nodes=NODES, inject=[fail_at(node=2, step=STEP, phase=phase)])
    check_fired(run, (2, phase))
    check_recovered(run, reference)
    (recovery,) = run.report["recoveries"]
    assert recovery["nodes"] == [2]
    if phase != "commit":  # without its gradients nobody can have passed the barrier
        assert run.generations[1]["version"] == STEP - 1
    if phase in ("backward", "reduce", "prepare"):  # the node it shares its pipeline with has begun the step too
        assert recovery["lost_steps"] == 1


@pytest.mark.parametrize("phase", IN_RECOVERY)
@pytest.mark.parametrize("place", [0, -1], ids=["first spare node", "last spare node"])
def test_node_killed_in_a_recovery(place: int, phase: str, reference: Run, tmp_path: Path) -> None:
    """Redundancy covers one loss: the second is one of a node without which every layer is still held."""
    second = spare_nodes(reference.generations[0], 2)[place]
    inject = [fail_at(node=2, step=STEP, phase="backward"), fail_at(node=second, step=STEP, phase=phase)]
    run = run_job(tmp_path, nodes=NODES, inject=inject)
    check_fired(run, (2, "backward"), (second, phase))
    check_recovered(run, reference)
    (recovery,) = run.report["recoveries"]
    assert sorted(recovery["nodes"]) == sorted([2, second])
    assert recovery["lost_steps"] == 1


def test_node_killed_in_the_redone_step(reference: Run, tmp_path: Path) -> None:
    """Once the survivors have installed the new generation, one of them dies before its first commit."""
    first, second, *_ = reference.generations[0]["pipelines"][-1][
        "nodes"
    ]  # without the first, the other cannot prepare
    inject = [f"node={first},step={STEP},phase=forward", f"node={second},step={STEP},phase=prepare"]
    run = run_job(tmp_path, nodes=NODES, inject=inject)
    check_fired(run, (first, "forward"), (second, "prepare"))
    check_recovered(run, reference)
    (recovery,) = run.report["recoveries"]
    assert recovery["nodes"] == [first, second]


@pytest.mark.parametrize("phase", ["backward", "copy"])
def test_worker_killed_alone_comes_back_as_a_new_node(phase: str, reference: Run, tmp_path: Path) -> None:
    """The machine is fine: its agent starts another worker and joins again, while one step waits for it."""
    joined = tmp_path / "joined"
    inject = [f"node=2,step={STEP},phase={phase},worker"]
    if phase == "copy":
        inject.append(f"node={spare_nodes(reference.generations[0], 2)[-1]},step={STEP},phase=forward")

    def act(launcher: Launcher, event: Event) -> None:
        # It may be up in time for the recovery itself, or has to ask for a boundary.
        if event["kind"] == "generation" and NODES in event["nodes"]:
            joined.touch()

    run = run_job(tmp_path / "run", "--change-after", "8", "--unless", str(joined), nodes=NODES, inject=inject, act=act)
    assert [fired["worker_only"] for fired in run.failures if fired["node"] == 2] == [True]
    check_recovered(run, reference)
    assert "worker killed by SIGKILL" in run.report["recoveries"][0]["cause"]
    assert NODES in run.generations[-1]["nodes"]
    assert sum(join["lost_steps"] for join in run.report["joins"]) == 0
    agents = {event["node"]: event["pid"] for event in run.of_kind("node_connected")}
    assert agents[NODES] == agents[2]


def test_two_nodes_killed_at_once(reference: Run, tmp_path: Path) -> None:
    arguments = ("--max-failures", "2", "--min-pipeline-nodes", "1")
    inject = [f"node={node},step={STEP},phase=backward" for node in (1, 4)]
    run = run_job(tmp_path, *arguments, nodes=NODES, inject=inject)
    assert {fired["node"] for fired in run.failures} <= {1, 4}
    check_recovered(run, reference, num_failures=2)
    assert sorted(node for recovery in run.report["recoveries"] for node in recovery["nodes"]) == [1, 4]


@pytest.mark.parametrize("place", ["rank 0", "first stage", "last stage"])
def test_node_killed_at_every_end_of_a_pipeline(place: str, reference: Run, tmp_path: Path) -> None:
    pipelines = [pipeline["nodes"] for pipeline in reference.generations[0]["pipelines"]]
    node = {"rank 0": pipelines[0][0], "first stage": pipelines[-1][0], "last stage": pipelines[-1][-1]}[place]
    run = run_job(tmp_path, nodes=NODES, inject=[fail_at(node=node, step=STEP, phase="reduce")])
    check_fired(run, (node, "reduce"))
    check_recovered(run, reference)


@pytest.mark.parametrize("victim", ["the whole node", "the agent alone"])
def test_node_killed_from_outside(victim: str, reference: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody in the job knows of this one beforehand. The next step waits until the loss is known."""
    gate, temporary = tmp_path / "gate", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    agents: dict[int, int] = {}

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "node_connected":
            agents[event["node"]] = event["pid"]
        elif event["kind"] == "step" and event["step"] == STEP and event["generation"] == 1:
            kill = os.killpg if victim == "the whole node" else os.kill
            kill(agents[3], signal.SIGKILL)
        elif event["kind"] == "node_lost":
            gate.touch()

    run = run_job(tmp_path / "run", "--hold-in", str(STEP + 1), "--gate", str(gate), nodes=NODES, act=act)
    check_recovered(run, reference)
    assert run.report["recoveries"][0]["nodes"] == [3]
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own
    assert left == [], "who is killed cannot remove what it has made"
    assert list(run.directory.rglob(".*")) == []


def test_kills_one_after_another_until_the_smallest_job_is_left(reference: Run, tmp_path: Path) -> None:
    inject = ["node=0,step=4,phase=commit", "node=5,step=7,phase=reduce"]
    run = run_job(tmp_path, nodes=NODES, inject=inject)
    check_recovered(run, reference, num_failures=2)
    assert len(run.report["recoveries"]) == 2
    assert len(run.generations[-1]["nodes"]) == 4


def test_node_killed_in_a_job_with_parameter_groups(tmp_path: Path) -> None:
    """What is copied is laid out by the groups."""
    reference = run_job(tmp_path / "reference", "--optimizer", "groups", nodes=5)
    inject = [fail_at(node=2, step=STEP, phase="commit")]
    run = run_job(tmp_path / "run", "--optimizer", "groups", nodes=5, inject=inject)
    check_recovered(run, reference)


@pytest.mark.parametrize("phase", ["forward", "backward", "commit"])
def test_node_of_a_multimodal_job_killed(phase: str, multimodal_reference: Run, tmp_path: Path) -> None:
    """Tied embeddings, an encoder, samples of different lengths."""
    run = run_job(tmp_path, *VLM, script=DIGITS, nodes=5, inject=[fail_at(node=2, step=3, phase=phase)])
    check_recovered(run, multimodal_reference)


@pytest.fixture(scope="module")
def multimodal_reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run of the example."""
    run = run_job(tmp_path_factory.mktemp("reference"), *VLM, script=DIGITS, nodes=5)
    assert run.exit_code == 0, run.reason
    return run


def test_node_of_a_job_with_two_encoders_killed(tmp_path: Path) -> None:
    """Samples without pictures, without sound, and with several pictures."""
    script = DIGITS.with_name("sight_and_sound.py")
    reference = run_job(tmp_path / "reference", *VLM, script=script, nodes=5)
    run = run_job(tmp_path / "run", *VLM, script=script, nodes=5, inject=[fail_at(node=2, step=3, phase="backward")])
    check_recovered(run, reference)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_float32_run_is_about_as_far_off_as_batch_splits_are_from_each_other(optimizer: str, tmp_path: Path) -> None:
    arguments = ("--precision", "fp32", "--optimizer", optimizer)
    two = run_job(tmp_path / "two", *arguments, nodes=4)
    three = run_job(tmp_path / "three", *arguments, "--max-failures", "2", nodes=6)
    assert [len(run.generations[0]["pipelines"]) for run in (two, three)] == [2, 3]
    natural = difference(two, three)
    run = run_job(tmp_path / "killed", *arguments, nodes=6, inject=[fail_at(node=2, step=STEP, phase="backward")])
    check_survivors(run)
    assert 0 < difference(run, three) <= 3 * natural < 1e-3, "the largest of a few rounding errors is a matter of luck"


def difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of the parameters."""
    assert run.exit_code == 0, run.reason
    return compare_runs(run.directory, reference.directory)["max_param_rel_diff"]


def test_run_with_a_kill_is_replayed(tmp_path: Path) -> None:
    options = "--inject node=2,step=3,phase=backward"
    with started(tmp_path / "run", "--steps", 6, nodes=5, options=options) as job:
        run = job.wait()
    assert run.exit_code == 0, run.reason
    assert [event["node"] for event in run.of_kind("node_lost")] == [2]
    ended = subprocess.run(command("replay", run.directory), capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "equal to events.jsonl"
    assert ended.stdout.count("  node_lost  node=2 ") == 1
