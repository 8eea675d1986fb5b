"""``resilient profile`` runs a script up to its training, shows what its layers cost, and keeps it for its runs."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from resilient.cli.app import app
from resilient.cli.profile import table
from resilient.profiling.cache import job_unit_costs
from resilient.profiling.script import job_of
from resilient.profiling.unit_cells import draw_lengths
from resilient.profiling.unit_costs import mean_profile
from resilient.runtime.job import Job
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from tests.resilient.small import profiled

SCRIPT = """
    import argparse
    import torch
    import resilient as rs
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()

    class Points:
        def __len__(self):
            return args.samples

        def __getitem__(self, index):
            return {"input": torch.ones(args.width)}

    def loss(output, batch):
        if args.broken:
            raise ValueError("no loss of ones")
        return output.sum()

    chain = rs.Chain([nn.Linear(args.width, args.width) for _ in range(3)], loss)
    trainer = rs.Trainer(chain, Points(), optimizer=rs.SGD(lr=0.1), global_batch=8, microbatch=2, device="cpu")
    try:
        if not args.untrained:
            trainer.fit(5)
            print("trained")
    except Exception as error:
        print("caught", error)
"""


@pytest.fixture(autouse=True)
def cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return empty_cache / "profiles"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "80"})


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_profile_is_shown_kept_and_written(script: Path, cache: Path, tmp_path: Path) -> None:
    written = tmp_path / "out" / "profile.json"
    ended = run("--json", written, script, "--width", 6)
    assert ended.exit_code == 0, ended.output
    profile = ModelProfile.from_json(written.read_bytes())
    assert [layer.name for layer in profile.layers] == ["layer.0", "layer.1", "layer.2"]
    assert {layer.parameter_bytes for layer in profile.layers} == {4 * (6 * 6 + 6)}
    assert all(layer.costs[0].forward_ms > 0 for layer in profile.layers)
    (kept,) = cache.glob("*.json")
    output = words(ended.output)
    assert f"{profile.source}, one microbatch of 2; times in ms backward" in output
    assert words(f"kept in {kept} written to {written}") in output
    for layer in profile.layers:
        assert f"{layer.name} {layer.costs[0].forward_ms:.3f} " in output
    assert "trained" not in output
    assert "caught" not in output


def test_run_uses_what_the_command_measured(script: Path, tmp_path: Path) -> None:
    written = tmp_path / "profile.json"
    assert run("--json", written, script).exit_code == 0
    told: list[str] = []
    assert profiled(job_of(str(script), []), told.append) == ModelProfile.from_json(written.read_bytes())
    assert told == []


PLANNED_SCRIPT = """
    import resilient as rs
    from resilient.testing import CostCurve, EmulatedUnit, emulated

    units = [
        EmulatedUnit(name="vision", num_layers=1, cost=CostCurve(fixed_ms=1)),
        EmulatedUnit(name="llm", num_layers=2, cost=CostCurve(fixed_ms=2)),
    ]
    model, dataset = emulated(units, "short")
    rs.Trainer(model, dataset, optimizer=rs.SGD(lr=0.1), global_batch=8, microbatch=2, device="cpu").fit(5)
"""


def test_units_of_a_planned_job_are_measured_as_its_runs_do(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENT_PLANNER", "")  # what the command sets is unset after the test
    script, written = tmp_path / "job.py", tmp_path / "profile.json"
    script.write_text(textwrap.dedent(PLANNED_SCRIPT))
    ended = run("--planner", "uniform", "--json", written, script)
    assert ended.exit_code == 0, ended.output
    profile = ModelProfile.from_json(written.read_bytes())
    assert f"{profile.source}, one mean cell of each unit of 2; times in ms" in words(ended.output)
    costs = {layer.name: layer.costs[0].forward_ms for layer in profile.layers}
    assert costs == pytest.approx({"vision.0": 1.0, "llm.0": 2.0, "llm.1": 2.0}, rel=0.5)
    (kept,) = cache.with_name("unit_costs").glob("*.json")
    assert words(f"kept in {kept} written to {written}") in words(ended.output)
    job, told = job_of(str(script), []), list[str]()
    costs_again = job_unit_costs(job, draw_lengths(job), told.append)
    assert told == []
    assert mean_profile(job, costs_again, draw_lengths(job).table) == profile


def test_command_measures_again_what_is_known(script: Path, cache: Path) -> None:
    assert run(script).exit_code == 0
    (kept,) = cache.glob("*.json")
    kept.write_text("damaged")
    assert run(script).exit_code == 0
    assert kept.read_text() != "damaged"


def test_options_after_the_script_are_the_scripts_and_that_is_said(script: Path, cache: Path, tmp_path: Path) -> None:
    result = run(script, "--width", 8, f"--json={tmp_path / 'profile.json'}")
    assert "note: --json after the script is the script's; put options of `" in result.stderr
    assert "unrecognized arguments: --json=" in result.stderr
    assert result.exit_code == 2
    assert "note:" not in run(script, "--width", 8).stderr


def test_script_that_does_not_train_is_named(script: Path) -> None:
    ended = run(script, "--untrained")
    assert ended.exit_code == 1
    assert words(ended.output) == (
        f"error: script must call Trainer.fit, got {script}, which ended without it; check its arguments "
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_layer_that_fails_is_named(script: Path) -> None:
    ended = run(script, "--broken")
    assert ended.exit_code == 1
    assert ended.stderr == "error: no loss of ones\nwhile measuring layer 'layer.2'\n"


def test_job_that_cannot_run_says_why(script: Path) -> None:
    ended = run(script, "--samples", 0)
    assert ended.exit_code == 1
    assert words(ended.output) == "error: dataset must hold at least one sample, got 0; check how it is built "


def test_script_finds_its_arguments_and_neighbours_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch
            import resilient as rs
            from neighbour import WIDTH

            assert sys.argv[1:] == ["--a", "b"], sys.argv

            class Points:
                def __len__(self):
                    return 8

                def __getitem__(self, index):
                    return {"input": torch.ones(WIDTH)}

            if __name__ == "__main__":
                chain = rs.Chain([torch.nn.Linear(WIDTH, 1)], lambda output, batch: output.sum())
                trainer = rs.Trainer(chain, Points(), optimizer=rs.SGD(lr=0.1), global_batch=8, microbatch=2)
                trainer.fit(7)
        """)
    )
    before = list(sys.argv), list(sys.path)
    job = job_of(str(script), ["--a", "b"])
    assert isinstance(job, Job)
    assert (job.num_steps, job.microbatch) == (7, 2)
    assert (sys.argv, sys.path) == before


def test_table_has_totals_and_dashes_for_what_is_not_computed() -> None:
    layers = (
        LayerProfile(
            name="a[0]",
            costs=(LayerCost(forward_ms=1.25, activation_bytes=1500),),
            parameter_bytes=3_000_000_000,
            trainable=False,
            input_gradient=False,
        ),
        LayerProfile(
            name="b",
            costs=(LayerCost(forward_ms=2, backward_input_ms=3, backward_weight_ms=4, activation_bytes=999),),
            parameter_bytes=2_000_000,
            optimizer_bytes=4_000_000,
            input_bytes=800,
        ),
    )
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(table(ModelProfile(layers=layers)))
    lines = [line.split() for line in captured.get().splitlines()]
    assert [" ".join(line) for line in lines] == [
        "backward backward",
        "layer forward inputs weights activations input state",
        "a[0] 1.250 - - 1.5 KB - 3.0 GB",
        "b 2.000 3.000 4.000 999 B 800 B 6.0 MB",
        "total 3.250 3.000 4.000 2.5 KB 3.0 GB",
    ]
