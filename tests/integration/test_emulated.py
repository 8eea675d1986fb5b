"""Emulated devices train what one process trains, through failures and under every kind of backward; and the guide's
example of a test with them passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resilient.testing import fail_at
from tests.integration.harness import check_equals_one_process, check_survivors, run_alone, run_job

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "jobs" / "emulated.py"
OPTIONS = (
    *("--steps", "6", "--layers", "8", "--scale", "0.2", "--mix", "heavy", "--batch", "8", "--microbatch", "2"),
    *("--max-failures", "1", "--min-pipeline-nodes", "2"),
)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_run_with_a_kill_equals_one_process(schedule: str, tmp_path: Path) -> None:
    log = run_alone(tmp_path / "alone", *OPTIONS, script=SCRIPT)
    run = run_job(
        tmp_path / "run",
        *(*OPTIONS, "--schedule", schedule),
        script=SCRIPT,
        nodes=5,
        inject=[fail_at(node=1, step=3, phase="backward")],
    )
    check_equals_one_process(run, tmp_path / "alone", log)
    check_survivors(run)
    assert [failure["node"] for failure in run.failures] == [1]


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
