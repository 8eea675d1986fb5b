"""Pipelines of different depth, cut at different layers, train what one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.testing import fail_at
from tests.integration.harness import (
    CHAIN,
    DIGITS,
    Run,
    check_equal,
    check_equals_one_process,
    check_recovered,
    run_alone,
    run_job,
)

TEXT = DIGITS.with_name("text_chain.py")
VLM = ("--steps", "4", "--batch", "24", "--microbatch", "4", "--precision", "fp64")


def depths(run: Run) -> list[int]:
    """Return the number of stages of the first generation's pipelines."""
    return [len(pipeline["stages"]) for pipeline in run.generations[0]["pipelines"]]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [(CHAIN, ()), (CHAIN, ("--optimizer", "sgd")), (DIGITS, VLM), (TEXT, (*VLM, "--min-pipeline-nodes", "2"))],
    ids=["chain", "chain-sgd", "multimodal", "text"],
)
def test_two_unequal_pipelines_equal_one_process(script: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    log = run_alone(tmp_path / "alone", *arguments, script=script)
    run = run_job(tmp_path / "run", *arguments, script=script, nodes=5)
    assert depths(run) == [3, 2]
    cuts = [{stage["end_layer"] for stage in pipeline["stages"]} for pipeline in run.generations[0]["pipelines"]]
    assert cuts[0] != cuts[1]
    check_equals_one_process(run, tmp_path / "alone", log)


def test_several_workers_per_node_equal_one_process_and_die_together(tmp_path: Path) -> None:
    arguments = ("--min-pipeline-nodes", "1")
    log = run_alone(tmp_path / "alone", *arguments)
    whole = run_job(tmp_path / "whole", *arguments, nodes=3, workers_per_node=2)
    assert sorted(depths(whole)) == [2, 4] or sorted(depths(whole)) == [2, 2, 2]
    check_equals_one_process(whole, tmp_path / "alone", log)
    run = run_job(
        tmp_path / "run", *arguments, nodes=3, workers_per_node=2, inject=[fail_at(node=1, step=5, phase="backward")]
    )
    check_recovered(run, whole)
    assert all(not worker.startswith("1/") for worker in run.generations[-1]["pids"])


def test_single_node_without_redundancy(tmp_path: Path) -> None:
    arguments = ("--max-failures", "0", "--min-pipeline-nodes", "1")
    log = run_alone(tmp_path / "alone", *arguments)
    run = run_job(tmp_path / "run", *arguments, nodes=1)
    assert depths(run) == [1]
    check_equals_one_process(run, tmp_path / "alone", log)


def test_bfloat16_job_survives_a_kill(tmp_path: Path) -> None:
    """Matrix products in bfloat16: nothing is bitwise equal, but every loss stays near."""
    arguments = ("--precision", "bf16")
    reference = run_job(tmp_path / "reference", *arguments, nodes=5)
    run = run_job(tmp_path / "run", *arguments, nodes=5, inject=[fail_at(node=3, step=5, phase="reduce")])
    check_recovered(run, reference, tolerance=0.05)


def test_run_is_reproducible_to_the_last_bit(tmp_path: Path) -> None:
    """The same nodes, the same plan: the same sums in the same order."""
    one, other = (run_job(tmp_path / name, "--precision", "fp32", nodes=4) for name in ("one", "other"))
    check_equal(one, other, tolerance=0.0)
