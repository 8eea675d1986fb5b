"""Nodes whose workers divide the states of all units train what one process trains, through failures and joins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilient.observability.step_trace import traced_steps
from resilient.observability.trace_events import ACTION
from resilient.templates.schedules.schedule import Action, Op
from resilient.testing import fail_at
from tests.integration.degrees.test_sharded import check_parameters_equal, devices
from tests.integration.harness import Run, check_equals_one_process, check_survivors, run_alone, run_job, started
from tests.integration.jobs import planned

SCRIPT = Path(planned.__file__)
JOB = ("--steps", "6", "--batch", "10", "--microbatch", "2", "--min-pipeline-nodes", "1")
"""Pipelines of which a worker may have no sample, or none with pictures or sounds."""
PLANNER = ("--planner", "resilient", "--always", "sharded")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep costs and pipelines in a folder of their own: others ask the same planner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job in one process, a chain of padded microbatches: its folder and its log."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_alone(folder, *JOB, script=SCRIPT)


def check(run: Run, alone: tuple[Path, str]) -> None:
    """Check that a job equals one process, that its nodes held the whole model, and that no survivor was restarted."""
    check_equals_one_process(run, *alone)
    check_survivors(run)
    assert set().union(*devices(run)) == {2}
    assert all(len(pipeline["nodes"]) == 1 for each in run.generations for pipeline in each["pipelines"])
    assert all(recovery["lost_steps"] <= 1 for recovery in run.report["recoveries"]), run.report["recoveries"]


@pytest.mark.parametrize("phase", ["gather", "llm.backward"])
def test_node_killed_whose_workers_divide_the_language_model_and_the_encoders(
    phase: str, alone: tuple[Path, str], tmp_path: Path
) -> None:
    """All units are lanes of the same devices, before and after; samples go where the planner places them."""
    killed = fail_at(node=1, step=3, phase=phase)
    run = run_job(tmp_path, *JOB, *PLANNER, script=SCRIPT, nodes=3, workers_per_node=2, inject=[killed])
    check(run, alone)
    assert [(fired["node"], fired["step"]) for fired in run.failures] == [(1, 3)]
    assert [generation["nodes"] for generation in run.generations] == [[0, 1, 2], [0, 2]]
    assert [recovery["lost_steps"] for recovery in run.report["recoveries"]] == [1]
    for generation in run.generations:
        for pipeline in generation["pipelines"]:
            lanes = {(stage["lane"].partition(".")[0], stage["local_rank"]) for stage in pipeline["stages"]}
            assert lanes == {("vision", 0), ("audio", 0), ("llm", 0)}
            assert all(stage["sharded"] and stage["num_workers"] == 2 for stage in pipeline["stages"])


@pytest.mark.timeout(400)  # three jobs, one after the other, and one process
def test_checkpoint_is_resumed_with_one_worker_a_node_and_back(alone: tuple[Path, str], tmp_path: Path) -> None:
    """One of the workers is killed at the end."""
    killed = fail_at(node=1, step=6, phase="gather", worker_only=True)
    resume = run = None
    for steps, nodes, workers in (("2", 2, 2), ("4", 2, 1), ("6", 3, 2)):
        options: dict[str, Any] = {"workers_per_node": workers, "resume": resume, "inject": [killed]}
        run = run_job(tmp_path / steps, *JOB, "--steps", steps, *PLANNER, script=SCRIPT, nodes=nodes, **options)
        assert run.exit_code == 0, run.reason
        assert set().union(*devices(run)) == {workers}
        resume = str(run.directory)
    assert run is not None
    assert [generation["nodes"] for generation in run.generations] == [[0, 1, 2], [0, 2]]
    check_parameters_equal(run, Run(alone[0], 0))


def test_rounds_in_which_a_worker_has_no_sample(tmp_path: Path) -> None:
    """With a frozen encoder, a generator and split backwards."""
    arguments = (*JOB, "--steps", "4", "--frozen", "--draws", "--schedule", "zb-h1", "--batch", "14")
    log = run_alone(tmp_path / "alone", *arguments, script=SCRIPT)
    planner = ("--planner", "resilient", "--always", "rounds")
    options = "--workers-per-node 2 --trace-steps 1-4 --inject node=1,step=3,phase=scatter"
    with started(tmp_path / "run", *arguments, *planner, nodes=3, options=options, script=SCRIPT) as job:
        run = job.wait()
    check(run, (tmp_path / "alone", log))
    of_steps = [
        {span.name for span in step.spans if span.category == ACTION and Action.parse(span.name).op is Op.FORWARD}
        for step in traced_steps(run.directory)
    ]
    assert max(map(len, of_steps)) > 4, "several rounds of four units"


def test_sharding_beside_the_planner_of_a_script_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    run = run_job(tmp_path, *JOB, *PLANNER, script=SCRIPT, nodes=2, workers_per_node=2, shard="on")
    assert run.exit_code == 1
    assert run.reason is not None
    assert "be off for jobs with a planner (it decides which units are sharded), got on" in run.reason
    told = "".join(log.read_text() for log in run.directory.rglob("*.log"))
    assert "shard" in told
    assert "profiling units" not in told
