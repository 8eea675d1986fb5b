"""Nodes whose workers divide the states of their stage train what one process trains, through failures and joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_parameters
from resilient.state.manifest import read_manifest
from resilient.testing import fail_at
from tests.integration.harness import (
    Event,
    Run,
    check_equal,
    check_equals_one_process,
    check_recovered,
    check_survivors,
    run_alone,
    run_job,
)

NODES = 3
STEP = 5
ONE_STAGE = ("--min-pipeline-nodes", "1", "--steps", "8")


def sharded(directory: Path, *arguments: str, nodes: int = NODES, **options: Any) -> Run:
    return run_job(directory, *arguments, nodes=nodes, **{"workers_per_node": 2, "shard": "on", **options})


def devices(run: Run) -> list[set[int]]:
    """Return how many workers the stages of each pipeline have, generation by generation."""
    return [
        {stage.get("num_workers", 1) for pipeline in generation["pipelines"] for stage in pipeline["stages"]}
        for generation in run.generations
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One process, and what it logged."""
    directory = tmp_path_factory.mktemp("alone")
    return directory, run_alone(directory, *ONE_STAGE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run of nodes that hold the model each: 7 microbatches in 3 pipelines leave workers without."""
    run = sharded(tmp_path_factory.mktemp("reference"), *ONE_STAGE)
    assert run.exit_code == 0, run.reason
    assert devices(run) == [{2}]
    assert len(run.generations[0]["pipelines"]) == NODES
    return run


def test_sharded_nodes_equal_one_process(reference: Run, alone: tuple[Path, str]) -> None:
    check_equals_one_process(reference, *alone)


def test_states_are_saved_in_parts_by_who_holds_them(reference: Run) -> None:
    manifest = read_manifest(reference.directory / "checkpoints" / "step-00000008")
    assert all(len(files) > 1 for files in manifest.states.values())


def test_pipelines_of_sharded_stages_equal_one_process(tmp_path: Path) -> None:
    """With split backwards, and frozen parts with types of their own."""
    arguments = ("--min-pipeline-nodes", "2", "--steps", "4", "--schedule", "zb-h1", "--frozen")
    log = run_alone(tmp_path / "alone", *arguments)
    run = sharded(tmp_path / "run", *arguments, nodes=4)
    assert devices(run) == [{2}]
    assert [len(pipeline["stages"]) for pipeline in run.generations[0]["pipelines"]] == [2, 2]
    check_equals_one_process(run, tmp_path / "alone", log)


@pytest.mark.parametrize(
    ("phase", "worker_only"),
    [("forward", False), ("backward", True), ("gather", False), ("gather", True)],
)
def test_node_or_worker_killed_in_a_step(phase: str, worker_only: bool, reference: Run, tmp_path: Path) -> None:
    run = sharded(tmp_path, *ONE_STAGE, inject=[fail_at(node=1, step=STEP, phase=phase, worker_only=worker_only)])
    check_recovered(run, reference)
    assert [fired["phase"] for fired in run.failures] == [phase]
    (recovery,) = run.report["recoveries"]
    assert recovery["nodes"] == [1]
    after = run.generations[1]
    assert all(not worker.startswith("1/") for worker in after["pids"]), "a node is lost with one of its workers"
    assert set().union(*devices(run)) == {2}


def test_node_killed_in_a_recovery(reference: Run, tmp_path: Path) -> None:
    inject = [fail_at(node=1, step=STEP, phase="gather"), fail_at(node=2, step=STEP, phase="regroup")]
    run = sharded(tmp_path, *ONE_STAGE, nodes=4, inject=inject)
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 3]


def check_parameters_equal(run: Run, reference: Run) -> None:
    assert run.exit_code == 0, run.reason
    assert compare_parameters(run.directory, reference.directory)[1] <= 1e-9


@pytest.mark.parametrize("killed", [False, True], ids=["", "while another dies in the copy"])
def test_node_joins(killed: bool, reference: Run, tmp_path: Path) -> None:
    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == STEP:
            launcher.add_node()

    inject = [fail_at(node=0, step=7, phase="copy")] if killed else []
    run = sharded(tmp_path, *ONE_STAGE, "--change-after", "6", act=act, inject=inject)
    check_equal(run, reference)
    check_survivors(run)
    assert [fired["phase"] for fired in run.failures] == ["copy"] * killed
    assert run.generations[-1]["nodes"] == [1, 2, 3] if killed else [0, 1, 2, 3]
    assert set().union(*devices(run)) == {2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"workers_per_node": 2}, {"workers_per_node": 3, "shard": "auto"}),
        ({"workers_per_node": 2, "shard": "off"}, {"workers_per_node": 2}),
    ],
    ids=["1 stage of 2 to what is best for 3", "2 stages to 1 of 2"],
)
def test_checkpoint_of_one_degree_is_resumed_at_another(
    before: dict[str, Any], after: dict[str, Any], reference: Run, tmp_path: Path
) -> None:
    arguments = ("--min-pipeline-nodes", "1")
    first = sharded(tmp_path / "first", *arguments, "--steps", "4", nodes=2, **before)
    assert first.exit_code == 0, first.reason
    rest = sharded(tmp_path / "rest", *arguments, "--steps", "8", nodes=2, resume=str(first.directory), **after)
    check_parameters_equal(rest, reference)
    assert {**first.losses, **rest.losses} == pytest.approx(reference.losses, rel=1e-9)


def test_job_that_is_interrupted_saves_parts_and_goes_on(reference: Run, tmp_path: Path) -> None:
    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == STEP:
            launcher.interrupt("of a test")

    first = sharded(tmp_path / "first", *ONE_STAGE, "--change-after", "6", act=act)
    assert first.exit_code == 130, first.reason
    rest = sharded(tmp_path / "rest", *ONE_STAGE, nodes=2, resume=str(first.directory))
    check_parameters_equal(rest, reference)
