"""Planned jobs whose workers share stages train what one process trains, through failures and at other degrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilient.testing import fail_at
from tests.integration.degrees.test_sharded import check_parameters_equal, devices
from tests.integration.harness import Run, check_equals_one_process, check_survivors, run_alone, run_job
from tests.integration.jobs import planned

SCRIPT = Path(planned.__file__)
JOB = ("--batch", "12", "--microbatch", "2")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep costs and pipelines in a folder of their own: others ask the same planners."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job in one process, a chain of padded microbatches: its folder and its log."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_alone(folder, *JOB, "--steps", "6", script=SCRIPT)


def degrees(run: Run) -> list[dict[str, set[int]]]:
    """Return, by generation, how many workers share the stages of each unit in pipelines of the fewest nodes."""
    found: list[dict[str, set[int]]] = []
    for generation in run.generations:
        fewest = min(len(pipeline["nodes"]) for pipeline in generation["pipelines"])
        of_units: dict[str, set[int]] = {}
        for pipeline in generation["pipelines"]:
            for stage in pipeline["stages"] if len(pipeline["nodes"]) == fewest else ():
                of_units.setdefault(stage["lane"].split(".")[0], set()).add(stage.get("num_workers", 1))
        found.append(of_units)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("planner", "tp", "expected"),
    [
        ("dip", "2", {"vision": {2}, "audio": {2}, "llm": {2}}),
        ("dflop", "auto", {"vision": {1}, "audio": {1}, "llm": {2}}),
    ],
    ids=["two stages of all units", "lanes of one worker and of two"],
)
def test_stages_of_several_nodes_through_a_kill(
    planner: str, tp: str, expected: dict[str, set[int]], alone: tuple[Path, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"nodes": 5, "workers_per_node": 2, "tp": tp}
    inject = [fail_at(node=1, step=3, phase="backward")]
    arguments = (*JOB, "--steps", "6", "--planner", planner, *(["--divided"] if tp == "auto" else []))
    run = run_job(tmp_path, *arguments, script=SCRIPT, inject=inject, **options)
    check_equals_one_process(run, *alone)
    check_survivors(run)
    assert [recovery["lost_steps"] for recovery in run.report["recoveries"]] == [1]
    assert degrees(run) == [expected] * 2


@pytest.mark.timeout(400)  # two jobs, one after the other
def test_checkpoint_of_sharded_nodes_is_resumed(alone: tuple[Path, str], tmp_path: Path) -> None:
    """One of the workers is killed at the end; what is compared is a checkpoint of tensor-parallel nodes."""
    killed = fail_at(node=1, step=6, phase="audio.backward", worker_only=True)
    resume = run = None
    arguments = (*JOB, "--planner", "resilient", "--min-pipeline-nodes", "1")
    for steps, nodes, tp, always in (("3", 2, "1", ("--always", "sharded")), ("6", 3, "2", ())):
        options: dict[str, Any] = {"workers_per_node": 2, "tp": tp, "resume": resume, "inject": [killed]}
        run = run_job(tmp_path / steps, *arguments, "--steps", steps, *always, script=SCRIPT, nodes=nodes, **options)
        assert run.exit_code == 0, run.reason
        assert set().union(*devices(run)) == {2}
        resume = str(run.directory)
    assert run is not None
    assert [generation["nodes"] for generation in run.generations] == [[0, 1, 2], [0, 2]]
    check_parameters_equal(run, Run(alone[0], 0))
