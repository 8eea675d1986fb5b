"""What is told where an optional package is missing, and what goes on without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from resilient.cli import run
from resilient.cli.app import app
from resilient.common.extras import _EXTRAS, MissingPackageError, require
from resilient.planners.published.dflop.vector_packing import pack_vectors
from resilient.templates.composition.batch_split import Line
from resilient.templates.composition.batch_split_model import split_with_constraints
from tests.resilient.observability.made_up_runs import failure_and_join

PLAN = ("plan", "--model", "gpt2-medium", "--device", "a40", "--nodes", "4")
SIMULATE = ("simulate", *PLAN[1:5], "--availability", "g4dn")
SCHEDULE = ("schedule", "--stages", "2", "--microbatches", "2")
COMPARE = ("compare", "--model", "qwen2-vl-7b", "--device", "h100", "--workload", "coco")
NO_PICTURES = "--png needs matplotlib, which is not installed; pip install 'resilient-train[figures]'"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what the extras bring is there: as it is for import statements."""
    for package in _EXTRAS:
        monkeypatch.setitem(sys.modules, package, None)


def test_packages_that_are_there_are_not_imported_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    require("sklearn", "it")
    assert "sklearn" not in sys.modules


def test_extras_and_projects_are_those_of_the_package() -> None:
    lines = (Path(__file__).parents[3] / "pyproject.toml").read_text().splitlines()
    for project, extra in _EXTRAS.values():
        found = [line.partition(" =")[0] for line in lines if f'"{project}>=' in line]
        assert found == [extra]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("command", [PLAN, SIMULATE, SCHEDULE, COMPARE], ids=lambda command: command[0])
def test_pictures_are_refused_before_anything_is_computed(command: tuple[str, ...], tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [*command, "--png", str(tmp_path / "it.png")])
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"error: {NO_PICTURES}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("bare")
def test_limits_on_shares_are_refused_before_anything_is_computed() -> None:
    ended = CliRunner().invoke(app, [*PLAN, "--share", "min=2"])
    told = "--share needs pyomo, which is not installed; pip install 'resilient-train[solvers]'"
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"error: {told}\n")


@pytest.mark.usefixtures("bare")
def test_plans_are_made_without_any_extra() -> None:
    ended = CliRunner().invoke(app, PLAN)
    assert (ended.exit_code, ended.stderr) == (0, "")


@pytest.mark.usefixtures("bare")
def test_the_demo_is_refused_without_its_data(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["demo", "--run-dir", str(tmp_path / "run")])
    told = "`resilient demo` needs scikit-learn, which is not installed; pip install 'resilient-train[demo]'"
    assert (ended.exit_code, ended.stdout, ended.stderr) == (2, "", f"error: {told}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("bare")
def test_a_run_ends_with_its_report_and_a_line_instead_of_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(event) for event in failure_and_join().events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    run._write_report(tmp_path)
    told = "no report.png: a figure needs matplotlib, which is not installed; pip install 'resilient-train[figures]'\n"
    assert capsys.readouterr() == ("", told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report.json"]


@pytest.mark.usefixtures("bare")
def test_highs_is_asked_for_where_it_is_used() -> None:
    weights = np.random.default_rng(0).random((2, 20))
    assert len(pack_vectors(weights, [1.0] * 4)) == 20
    with pytest.raises(MissingPackageError) as caught:
        pack_vectors(weights, [1.0] * 4, time_limit_s=10)
    told = "Dflop(time_limit_s=...) needs highspy, which is not installed; pip install 'resilient-train[solvers]'"
    assert str(caught.value) == told


@pytest.mark.usefixtures("bare")
def test_pyomo_is_asked_for_where_it_is_used() -> None:
    with pytest.raises(MissingPackageError) as caught:
        split_with_constraints([(Line(1, 1),), (Line(1, 1),)], 4, multiple_of=[2, 2])
    told = "a batch split under constraints needs pyomo, which is not installed; pip install 'resilient-train[solvers]'"
    assert str(caught.value) == told
