"""``resilient compare``: every planner on the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from resilient.cli import app

_JOB = ("--model", "qwen2-vl-7b", "--device", "a100-80gb", "--nodes", "2", "--global-batch", "32", "--batches", "2")


def _compare(*options: str) -> Result:
    return CliRunner().invoke(app, ["compare", *_JOB, *options], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("compared")
    files = ("--json", str(folder / "all.json"), "--png", str(folder / "all.png"))
    return _compare("--workload", "coco", "--planners", "uniform,dip", *files), folder


def test_compare_prints_a_row_for_each_planner_and_the_best(compared: tuple[Result, Path]) -> None:
    result, folder = compared
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "all.json").read_text())
    assert [row["planner"] for row in found["planners"]] == ["uniform", "dip"]
    assert found["planners"][0]["speed_up"] == 1.0
    steps = [row["iteration_ms"] for row in found["planners"]]
    assert found["planners"][1]["speed_up"] == pytest.approx(steps[0] / steps[1])
    assert found["best"] == ["uniform", "dip"][steps.index(min(steps))]
    assert found["reason"] in result.output


def test_compare_draws_bars_and_steps(compared: tuple[Result, Path]) -> None:
    _, folder = compared
    for name in ("all.png", "all-steps.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_compare_goes_on_with_the_nodes_that_are_left(compared: tuple[Result, Path], tmp_path: Path) -> None:
    path = tmp_path / "lost.json"
    result = _compare("--workload", "coco", "--planners", "uniform", "--lost-nodes", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "2 nodes with 8 devices each, 1 of them lost" in result.output
    whole = json.loads((compared[1] / "all.json").read_text())["planners"][0]
    assert json.loads(path.read_text())["planners"][0]["iteration_ms"] > whole["iteration_ms"]


def test_compare_names_the_planners_there_are() -> None:
    result = _compare("--workload", "coco", "--planners", "unifrom")
    assert result.exit_code == 2
    assert "planner must be one of uniform, random, fsdp, dip" in result.stderr
    assert "got 'unifrom'; did you mean 'uniform'?" in result.stderr


def test_compare_refuses_a_network_without_bandwidth() -> None:
    result = _compare("--workload", "coco", "--network-gbit-s", "0")
    assert result.exit_code == 2
    assert result.stderr == "error: network_gbit_s must be > 0, got 0.0; leave it out for the usual network\n"
