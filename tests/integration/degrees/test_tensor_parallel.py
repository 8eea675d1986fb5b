"""Nodes whose workers share each microbatch train what one process trains, through failures, joins, other degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilient.agent.launch import Launcher
from resilient.testing import fail_at
from tests.integration.degrees.test_sharded import devices
from tests.integration.harness import (
    DIGITS,
    Event,
    Run,
    check_equal,
    check_equals_one_process,
    check_recovered,
    check_survivors,
    run_alone,
    run_job,
)

TEXT = Path(__file__).parents[1] / "jobs" / "text.py"
NODES = 3
STEP = 5


def parallel(directory: Path, *arguments: str, nodes: int = NODES, **options: Any) -> Run:
    return run_job(directory, *arguments, nodes=nodes, **{"script": TEXT, "workers_per_node": 2, "tp": "2", **options})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One process, and what it logged."""
    directory = tmp_path_factory.mktemp("alone")
    return directory, run_alone(directory, script=TEXT)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run of nodes that hold the model each."""
    run = parallel(tmp_path_factory.mktemp("reference"))
    assert run.exit_code == 0, run.reason
    assert devices(run) == [{2}]
    assert len(run.generations[0]["pipelines"]) == NODES
    return run


def test_tensor_parallel_nodes_equal_one_process(reference: Run, alone: tuple[Path, str]) -> None:
    check_equals_one_process(reference, *alone)


def test_pipelines_of_tensor_parallel_stages_equal_one_process(tmp_path: Path) -> None:
    """With split backwards, and an embedding that is in both of their stages."""
    arguments = ("--min-pipeline-nodes", "2", "--steps", "4", "--schedule", "zb-h1", "--tied")
    log = run_alone(tmp_path / "alone", *arguments, script=TEXT)
    run = parallel(tmp_path / "run", *arguments, nodes=4)
    assert devices(run) == [{2}]
    assert [len(pipeline["stages"]) for pipeline in run.generations[0]["pipelines"]] == [2, 2]
    check_equals_one_process(run, tmp_path / "alone", log)


def test_encoders_are_divided_as_well(tmp_path: Path) -> None:
    """With pictures in some samples alone."""
    arguments = (
        "--steps",
        "3",
        "--batch",
        "8",
        "--microbatch",
        "2",
        "--precision",
        "fp64",
        "--min-pipeline-nodes",
        "1",
    )
    log = run_alone(tmp_path / "alone", *arguments, script=DIGITS)
    run = parallel(tmp_path / "run", *arguments, script=DIGITS, nodes=2)
    assert devices(run) == [{2}]
    check_equals_one_process(run, tmp_path / "alone", log)


@pytest.mark.parametrize(("phase", "worker_only"), [("forward", False), ("backward", True), ("reduce", False)])
def test_node_or_worker_killed_in_a_step(phase: str, worker_only: bool, reference: Run, tmp_path: Path) -> None:
    run = parallel(tmp_path, inject=[fail_at(node=1, step=STEP, phase=phase, worker_only=worker_only)])
    check_recovered(run, reference)
    assert [fired["phase"] for fired in run.failures] == [phase]
    (recovery,) = run.report["recoveries"]
    assert recovery["nodes"] == [1]
    after = run.generations[1]
    assert all(not worker.startswith("1/") for worker in after["pids"]), "a node is lost with one of its workers"
    assert set().union(*devices(run)) == {2}


def test_node_killed_where_stages_have_different_degrees(reference: Run, tmp_path: Path) -> None:
    """Of three workers of a node two share a stage, and one has one of its own."""
    inject = [fail_at(node=1, step=STEP, phase="backward")]
    run = parallel(tmp_path, "--divided", workers_per_node=3, tp="auto", inject=inject)
    check_recovered(run, reference)
    assert devices(run)[0] == {1, 2}


def test_node_killed_in_a_recovery(reference: Run, tmp_path: Path) -> None:
    inject = [fail_at(node=1, step=STEP, phase="backward"), fail_at(node=2, step=STEP, phase="regroup")]
    run = parallel(tmp_path, nodes=4, inject=inject)
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 3]


def test_node_joins_while_another_dies_in_the_copy(reference: Run, tmp_path: Path) -> None:
    """Of workers that exchange tokens in chunks while they compute: those of the reference do so before or after."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == STEP:  # ready before the sixth were done, it would join then
            launcher.add_node()

    arguments = ("--change-after", "6", "--tp-chunks", "2")
    run = parallel(tmp_path, *arguments, act=act, inject=[fail_at(node=0, step=7, phase="copy")])
    check_equal(run, reference)
    check_survivors(run)
    assert [fired["phase"] for fired in run.failures] == ["copy"]
    assert run.generations[-1]["nodes"] == [1, 2, 3]
    assert set().union(*devices(run)) == {2}


def test_degree_that_the_model_cannot_be_run_at_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = parallel(tmp_path, nodes=2, workers_per_node=4, tp="4")
    assert run.exit_code == 1
    assert run.reason is not None
    assert "4 devices cannot divide the 2 key-value heads of layer 'llm.block.0' evenly" in run.reason
