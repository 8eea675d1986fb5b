"""Emulated devices train what one process trains, through failures and under every kind of backward; and the guide's
example of a test with them passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resilient.testing import fail_at
from tests.integration.harness import check_equals_one_process, check_survivors, run_alone, run_job, started

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "jobs" / "emulated.py"
OPTIONS = (
    *("--steps", "6", "--layers", "8", "--scale", "0.2", "--mix", "heavy", "--batch", "8", "--microbatch", "2"),
    *("--max-failures", "1", "--min-pipeline-nodes", "2"),
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the log of the same job in one process."""
    directory = tmp_path_factory.mktemp("alone")
    return directory, run_alone(directory, *OPTIONS, script=SCRIPT)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_run_with_a_kill_equals_one_process(schedule: str, alone: tuple[Path, str], tmp_path: Path) -> None:
    run = run_job(
        tmp_path / "run",
        *(*OPTIONS, "--schedule", schedule),
        script=SCRIPT,
        nodes=5,
        inject=[fail_at(node=1, step=3, phase="backward")],
    )
    check_equals_one_process(run, *alone)
    check_survivors(run)
    assert [failure["node"] for failure in run.failures] == [1]


def test_schedule_that_the_command_has_chosen_trains_the_same_through_a_kill(
    alone: tuple[Path, str], tmp_path: Path
) -> None:
    """The script asks for 1f1b; where halves of backwards take as long as forwards another is faster."""
    options = "--schedule auto --inject node=1,step=3,phase=backward"
    with started(tmp_path / "run", *OPTIONS, nodes=5, script=SCRIPT, options=options) as job:
        run = job.wait()
    check_equals_one_process(run, *alone)
    check_survivors(run)
    assert [failure["node"] for failure in run.failures] == [1]
    (event,) = run.of_kind("schedule")
    chosen, others = event["chosen"], event["others"]
    assert chosen["step_ms"] < 0.99 * next(each["step_ms"] for each in others if each["schedule"] == "1f1b")
    assert run.report["schedule"]["chosen"] == chosen
    assert f"schedule {chosen['schedule']}" in job.output
    for generation in run.generations:
        for pipeline in generation["pipelines"]:
            assert len(pipeline["stages"]) == chosen["num_chunks"] * len(pipeline["nodes"])


def test_example_of_a_test_of_a_planner_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "user_guide.md").read_text()
    blocks = dict(
        re.findall(r"^```python\n# (emulated_train\.py|test_train\.py)\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    )
    assert list(blocks) == ["emulated_train.py", "test_train.py"]
    (tmp_path / "emulated_train.py").write_text(blocks["emulated_train.py"])
    monkeypatch.chdir(tmp_path)
    written: dict[str, Any] = {}
    exec(blocks["test_train.py"], written)
    written["test_planner_goes_on_without_a_node"](tmp_path)
