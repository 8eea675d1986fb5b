"""``resilient plan`` of a measured profile says what a job runs, before a node is lost and after it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilient.templates.template import TemplateSet
from resilient.testing import fail_at
from tests.integration.degrees.test_tensor_parallel import TEXT
from tests.integration.harness import CHAIN, Event, command, run_job

LOST = 1
WORKERS = 2
BATCHES = {CHAIN: (28, 4), TEXT: (14, 2)}
"""Of these jobs: samples of a step, and of a microbatch."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the profiles in a folder of their own: no other test measures while these compare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def said(*words: object) -> None:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def of_plan(plan: Event) -> list[tuple[Any, ...]]:
    """Return the pipelines that a plan has, each with how many nodes and microbatches, and its stages."""
    return sorted(
        (
            pipeline["num_nodes"],
            pipeline["num_microbatches"],
            [
                (*layers, degree * shard, shard > 1)
                for layers, degree, shard in zip(
                    pipeline["layers"], pipeline["tp_degrees"], pipeline["shards"], strict=True
                )
            ],
        )
        for pipeline in plan["pipelines"]
    )


def of_generation(generation: Event) -> list[tuple[Any, ...]]:
    """Return the pipelines that a generation has, likewise."""
    return sorted(
        (
            len(pipeline["nodes"]),
            pipeline["num_microbatches"],
            [
                (stage["first_layer"], stage["end_layer"], stage.get("num_workers", 1), stage.get("sharded", False))
                for stage in pipeline["stages"]
            ],
        )
        for pipeline in generation["pipelines"]
    )


@pytest.mark.parametrize(
    ("script", "nodes", "fewest", "methods"),
    [
        (CHAIN, 5, 2, {"tp": "1", "shard": "off"}),
        (TEXT, 3, 1, {"tp": "auto", "shard": "auto"}),
    ],
    ids=["stages", "whatever is fastest"],
)
def test_job_runs_what_is_planned(
    script: Path, nodes: int, fewest: int, methods: dict[str, Any], tmp_path: Path
) -> None:
    """By the profile that the run finds in the cache; the node is lost before it is measured how fast each one is."""
    arguments = ("--min-pipeline-nodes", str(fewest))
    batch, microbatch = BATCHES[script]
    profile = tmp_path / "profile.json"
    said("profile", "--json", profile, script, *arguments)
    plans: dict[int, Event] = {}
    digests: dict[int, str] = {}
    for num_nodes in (nodes, nodes - LOST):
        job = ("--profile", profile, "--nodes", num_nodes, "--gpus-per-node", WORKERS, *arguments)
        job += ("--global-batch", batch, "--microbatch", microbatch, "--tp", methods["tp"], "--shard", methods["shard"])
        said("plan", *job, "--json", tmp_path / "plan.json", "--templates", tmp_path / "templates.json")
        plans[num_nodes] = json.loads((tmp_path / "plan.json").read_text())
        digests[num_nodes] = TemplateSet.from_json((tmp_path / "templates.json").read_bytes()).digest
    killed = fail_at(node=1, step=1, phase="backward")
    run = run_job(
        tmp_path / "run", *arguments, "--steps", "3", script=script, nodes=nodes, workers_per_node=WORKERS,
        inject=[killed], **methods,
    )  # fmt: skip
    assert run.exit_code == 0, run.reason
    before, after = run.generations
    assert of_generation(before) == of_plan(plans[nodes])
    assert of_generation(after) == of_plan(plans[nodes - LOST])
    assert (before["templates"], after["templates"]) == (digests[nodes], digests[nodes - LOST])
    assert (before["step_ms"], after["step_ms"]) == (plans[nodes]["step_ms"], plans[nodes - LOST]["step_ms"])
    sizes = sorted((len(pipeline["nodes"]) for pipeline in after["pipelines"]), reverse=True)
    assert plans[nodes]["losses"][LOST]["pipelines"] == sizes, "and so it was said before"
