"""Nodes of every method side by side train what one process trains, through failures and a join, and what they save is
resumed by any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_parameters
from resilient.testing import fail_at
from tests.integration.degrees.test_tensor_parallel import TEXT
from tests.integration.harness import Event, Run, check_survivors, run_alone, run_job

ARGUMENTS = ("--tied", "--steps")
MIXED: dict[str, Any] = {"workers_per_node": 2, "tp": "auto", "shard": "auto", "network_gbit_s": 0.008}
"""A network on which sums of gradients take a sixth of a step: with the known costs the fastest plan for three nodes is
a sharded one beside two tensor-parallel ones, which have half of the model each."""

SHARDED, ONE_DEVICE, PARALLEL = "sharded", "1 device", "2 tensor parallel"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps of one process."""
    directory = tmp_path_factory.mktemp("alone")
    run_alone(directory, *ARGUMENTS, "10", script=TEXT)
    return Run(directory, 0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A job of eight steps that loses two of four nodes, one while it recovers from the loss of the other; then one
    joins; then a worker of the sharded node is lost, and so its states are left with those who share microbatches."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == 4:
            launcher.add_node()

    inject = [
        fail_at(node=1, step=3, phase="scatter"),
        fail_at(node=3, step=3, phase="regroup"),
        fail_at(node=0, step=8, phase="gather", worker_only=True, worker=1),
    ]
    arguments = (*ARGUMENTS, "8", "--known-costs", "--change-after", "6")
    return run_job(tmp_path_factory.mktemp("mixed"), *arguments, script=TEXT, nodes=4, act=act, inject=inject, **MIXED)


def methods(generation: Event) -> list[tuple[int, str]]:
    """Return how many nodes each pipeline has, and how the workers of its stages share them, the fewest nodes first."""
    found: list[tuple[int, str]] = []
    for pipeline in generation["pipelines"]:
        (way,) = {(stage.get("num_workers", 1), stage.get("sharded", False)) for stage in pipeline["stages"]}
        found.append((len(pipeline["nodes"]), {(2, True): SHARDED, (1, False): ONE_DEVICE, (2, False): PARALLEL}[way]))
    return sorted(found)


def test_pipelines_of_different_methods_train_on_through_failures_and_a_join(mixed: Run) -> None:
    assert mixed.exit_code == 0, mixed.reason
    check_survivors(mixed)
    assert [fired["phase"] for fired in mixed.failures] == ["scatter", "regroup", "gather"]
    assert all(recovery["lost_steps"] <= 1 for recovery in mixed.report["recoveries"])
    of_nodes = {tuple(generation["nodes"]): methods(generation) for generation in mixed.generations}
    assert of_nodes[0, 1, 2, 3] == [(1, ONE_DEVICE), *[(1, SHARDED)] * 3]
    assert of_nodes[0, 2] == [(1, PARALLEL), (1, SHARDED)]
    assert of_nodes[0, 2, 4] == [(1, SHARDED), (2, PARALLEL)]
    assert of_nodes[2, 4] == [(1, PARALLEL), (1, SHARDED)]


@pytest.mark.parametrize(
    "after",
    [{"tp": "1", "shard": "on"}, {"tp": "2", "shard": "off"}, {"tp": "1", "shard": "off"}, {"workers_per_node": 1}],
    ids=["sharded", "tensor parallel", "pipelines of two devices", "one device"],
)
def test_checkpoint_of_a_mixture_is_resumed_by_any_method(
    after: dict[str, Any], mixed: Run, alone: Run, tmp_path: Path
) -> None:
    rest = run_job(
        tmp_path,
        *ARGUMENTS,
        "10",
        script=TEXT,
        nodes=2,
        resume=str(mixed.directory),
        **{"workers_per_node": 2, **after},
    )
    assert rest.exit_code == 0, rest.reason
    assert compare_parameters(rest.directory, alone.directory)[1] <= 1e-9
