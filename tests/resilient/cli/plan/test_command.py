"""``resilient plan``: what it writes is what a job would do, and what it refuses it explains."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.image
import pytest
from typer.testing import CliRunner, Result

from resilient.cli.app import app
from resilient.cli.plan.report import MOST_LOSSES, SEQUENCES, build_plan_report
from resilient.cli.plan.tables import compact
from resilient.observability.wording import duration
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import DEVICES, cluster_of
from resilient.templates.inputs.known_models import MODELS
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, PlanningProblem, Sharding
from resilient.templates.replan.replan import first_plan, replan, templates_for
from resilient.templates.template import TemplateSet

SMALL = {
    "--model": "gpt3-2.7b",
    "--device": "a40",
    "--nodes": "7",
    "--max-failures": "1",
    "--global-batch": "96",
    "--microbatch": "2",
}


def run(options: dict[str, str | None], *flags: str) -> Result:
    arguments = [part for option, value in options.items() if value is not None for part in (option, value)]
    return CliRunner().invoke(app, ["plan", *arguments, *flags])


def planned(folder: Path, **changes: str | None) -> dict[str, Any]:
    options = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    ended = run({**SMALL, **options, "--json": str(folder / "plan.json")})
    assert ended.exit_code == 0, ended.output
    return json.loads((folder / "plan.json").read_text())


def small_problem() -> PlanningProblem:
    return PlanningProblem(
        profile=derive_profile("gpt3-2.7b", "a40", microbatch=2),
        num_microbatches=48,
        cluster=cluster_of("a40", 1),
        max_failures=1,
    )


def step_ms(plan: Plan) -> float:
    return max(pipeline.template.iteration_ms(pipeline.num_microbatches) for pipeline in plan.pipelines)


def test_json_is_the_plan_that_the_job_would_make(tmp_path: Path) -> None:
    report = planned(tmp_path)
    problem = small_problem()
    plan = first_plan(problem, range(7))
    sizes = templates_for(problem, 7).sizes
    assert [row["num_nodes"] for row in report["templates"]] == list(range(sizes.start, 7 - sizes.start + 1))
    assert report["min_pipeline_nodes"] == sizes.start > 1, "the state alone is larger than a device"
    assert report["fewest_nodes"] == 2 * sizes.start
    assert [(row["num_nodes"], row["num_microbatches"]) for row in report["pipelines"]] == [
        (len(pipeline.nodes), pipeline.num_microbatches) for pipeline in plan.pipelines
    ]
    assert sum(row["num_microbatches"] for row in report["pipelines"]) * 2 == report["global_batch"] == 96
    assert report["step_ms"] == pytest.approx(step_ms(plan))
    assert report["samples_per_s"] == pytest.approx(96e3 / report["step_ms"])
    assert report["num_idle"] == 7 - len(plan.nodes)
    for row in report["templates"]:
        template = templates_for(problem, 7).best(row["num_nodes"], row["num_microbatches"])
        assert row["tp_degrees"] == [stage.num_devices for stage in template.stages]
        assert set(row["shards"]) == {1}, "nobody asked for it"
        assert row["iteration_ms"] == template.iteration_ms(row["num_microbatches"])
        assert 0 < row["memory_bytes"] <= report["device_memory_bytes"]


def test_losses_are_the_plans_that_replanning_makes(tmp_path: Path) -> None:
    report = planned(tmp_path)
    problem = small_problem()
    assert [row["num_lost"] for row in report["losses"]] == list(range(7 - report["fewest_nodes"] + 1))
    first, *_, last = report["losses"]
    assert (first["kept"], first["worst_kept"]) == (1.0, 1.0)
    assert first["samples_per_s"] == report["samples_per_s"]
    plans = [first_plan(problem, range(7))] * SEQUENCES
    for lost in range(1, last["num_lost"] + 1):
        for seed in range(SEQUENCES):
            left = random.Random(seed).sample(range(7), 7)[lost:]
            plans[seed] = replan(problem, plans[seed], sorted(left))
        steps_ms = [step_ms(plan) for plan in plans]
        worst = plans[steps_ms.index(max(steps_ms))]
        row = report["losses"][lost]
        assert row["samples_per_s"] == pytest.approx(fmean(96e3 / ms for ms in steps_ms))
        assert row["kept"] == pytest.approx(row["samples_per_s"] / report["samples_per_s"])
        assert row["worst_samples_per_s"] == pytest.approx(96e3 / max(steps_ms))
        assert row["pipelines"] == sorted((len(pipeline.nodes) for pipeline in worst.pipelines), reverse=True)
        assert sum(row["pipelines"]) + row["num_idle"] == 7 - lost
    assert last["kept"] < 0.9


def test_many_nodes_are_lost_several_at_a_time() -> None:
    problem = PlanningProblem(profile=derive_profile("gpt2-medium", "h100"), num_microbatches=256, max_failures=1)
    calls: list[tuple[int, int]] = []
    report = build_plan_report(problem, 100, 32, lambda done, total: calls.append((done, total)))
    assert [row.num_lost for row in report.losses] == [*range(0, 98, 3), 98], "down to the fewest nodes"
    assert len(report.losses) <= MOST_LOSSES + 2
    assert calls == [(done, SEQUENCES * 33) for done in range(1, SEQUENCES * 33 + 1)]


def test_what_is_printed_is_what_is_written(tmp_path: Path) -> None:
    ended = run({**SMALL, "--json": str(tmp_path / "plan.json")})
    report = json.loads((tmp_path / "plan.json").read_text())
    assert ended.output.startswith(
        "derived: gpt3-2.7b, a40, microbatch 2, 2048 tokens\n7 nodes with 1 device of 46.4 GB"
    )
    assert f"a step takes {duration(report['step_ms'])}: {report['samples_per_s']:.4g} samples/s\n" in ended.output
    for row in report["losses"]:
        assert f"{100 * row['kept']:.1f} %" in ended.output
    assert "planned in" in ended.output


def test_templates_and_picture_are_written_where_told(tmp_path: Path) -> None:
    planned(tmp_path, templates=str(tmp_path / "new" / "t.json"), png=str(tmp_path / "new" / "p.png"))
    read = TemplateSet.from_json((tmp_path / "new" / "t.json").read_bytes())
    assert read == templates_for(small_problem(), 7)
    image = matplotlib.image.imread(tmp_path / "new" / "p.png")
    assert image.shape[0] > 800
    assert image.shape[1] > 1200
    assert len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, 4)}) > 10


def test_a_measured_profile_is_planned_like_a_derived_one(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(derive_profile("gpt3-2.7b", "a40").to_json())
    measured = planned(tmp_path, model=None, profile=str(tmp_path / "profile.json"))
    assert measured == planned(tmp_path)
    assert measured == planned(tmp_path, model=None, profile=str(tmp_path / "profile.json"), microbatch=None)
    unlimited = planned(tmp_path, model=None, device=None, profile=str(tmp_path / "profile.json"))
    assert unlimited["device_memory_bytes"] is None
    assert unlimited["min_pipeline_nodes"] == 1


def test_frozen_units_make_the_step_shorter_and_the_pipeline_smaller(tmp_path: Path) -> None:
    both = {"model": "qwen2-vl-7b", "nodes": "8", "global_batch": "32", "microbatch": "1"}
    trained = planned(tmp_path, **both)
    frozen = planned(tmp_path, **both, frozen="vision, llm")
    assert frozen["step_ms"] < 0.75 * trained["step_ms"]
    assert frozen["min_pipeline_nodes"] < trained["min_pipeline_nodes"]
    (tmp_path / "profile.json").write_bytes(derive_profile("qwen2-vl-7b", "a40").to_json())
    measured = planned(tmp_path, **{**both, "model": None}, profile=str(tmp_path / "profile.json"), frozen="vision,llm")
    assert measured["step_ms"] == frozen["step_ms"]


def test_a_slow_network_shows(tmp_path: Path) -> None:
    assert planned(tmp_path, network_gbit_s="1")["step_ms"] > planned(tmp_path)["step_ms"]
    assert planned(tmp_path, network_gbit_s="200") == planned(tmp_path), "what is usual for the device"


def test_a_slow_node_of_sixteen_stands_by_and_it_is_said_why(tmp_path: Path) -> None:
    job = {"model": "llama3-8b", "device": "a100-80gb", "global_batch": None, "microbatch": None}
    fifteen = planned(tmp_path, nodes="15", **job)
    report = planned(tmp_path, nodes="16", slow="2", **job)
    assert report["slow"] == [{"factor": 2.0, "stands_by": True}]
    assert report["step_ms"] == fifteen["step_ms"] < report["with_idle_ms"]
    assert report["num_idle"] == 1
    options = {f"--{name.replace('_', '-')}": value for name, value in {**job, "nodes": "16", "slow": "2"}.items()}
    assert (
        "1 node stands by (2 times slower than others): with every node a step would take "
        f"{duration(report['with_idle_ms'])}\n"
    ) in run({**SMALL, **options}).output


@pytest.mark.parametrize(("slow", "got"), [("0.5", "0.5"), ("inf", "inf"), ("1e300", "1e+300")])
def test_nodes_that_would_be_faster_or_never_done_are_refused(slow: str, got: str) -> None:
    ended = run({**SMALL, "--slow": slow})
    assert ended.exit_code == 2
    assert f"--slow must be a number from 1 to 1000000 for each of at most 7 nodes, got {got}; 1 is" in ended.output


def test_limits_on_shares_are_asked_for_without_slow_nodes() -> None:
    ended = run({**SMALL, "--slow": "2", "--share": "min=2"})
    assert ended.exit_code == 2
    assert "--share must stand without --slow, got 'min=2'; ask one after the other" in ended.output


def test_more_nodes_than_the_model_can_use_are_idle(tmp_path: Path) -> None:
    report = planned(tmp_path, nodes="9", global_batch="8", microbatch="2", max_failures="0", min_pipeline_nodes="2")
    assert report["num_idle"] + sum(row["num_nodes"] for row in report["pipelines"]) == 9


def test_a_cluster_of_192_devices_keeps_its_share_down_to_the_fewest_nodes(tmp_path: Path) -> None:
    report = planned(
        tmp_path,
        model="gpt3-6.7b",
        nodes="24",
        gpus_per_node="8",
        max_failures="2",
        global_batch=None,
        microbatch=None,
    )
    assert (report["global_batch"], report["microbatch"]) == (1024, 2), "as published"
    assert (report["min_pipeline_nodes"], report["fewest_nodes"]) == (1, 3)
    assert [row["num_nodes"] for row in report["templates"]] == list(range(1, 23))
    for row in report["templates"]:
        assert sum(row["tp_degrees"]) == 8 * row["num_nodes"], "all devices work"
    assert [row["num_lost"] for row in report["losses"]] == list(range(22))
    for row in report["losses"]:
        assert row["worst_kept"] > 0.95 * (1 - row["num_lost"] / 24)
        assert row["num_idle"] == 0


def test_all_stages_have_the_degree_that_is_asked_for(tmp_path: Path) -> None:
    job: dict[str, str | None] = {**SMALL, "--gpus-per-node": "4", "--nodes": "3"}
    for degree in ("1", "2"):
        ended = run({**job, "--json": str(tmp_path / "plan.json")}, "--tp", degree)
        assert ended.exit_code == 0, ended.output
        report = json.loads((tmp_path / "plan.json").read_text())
        assert {each for row in report["templates"] for each in row["tp_degrees"]} == {int(degree)}
    ended = run(job, "--tp", "3")
    assert ended.exit_code == 2
    assert "--tp must be one of the model's degrees (1, 2, 4, 8), got 3; choose one of them" in ended.output


def test_sharded_stages_are_planned_where_asked_for(tmp_path: Path) -> None:
    job = {**SMALL, "--gpus-per-node": "4", "--nodes": "3"}
    plain = run({**job, "--json": str(tmp_path / "plain.json")}).output
    ended = run({**job, "--json": str(tmp_path / "sharded.json")}, "--shard", "auto")
    assert ended.exit_code == 0, ended.output
    sharded = json.loads((tmp_path / "sharded.json").read_text())
    problem = replace(small_problem(), cluster=cluster_of("a40", 4), sharding=Sharding.AUTO)
    for row in sharded["templates"]:
        template = templates_for(problem, 3).best(row["num_nodes"], row["num_microbatches"])
        assert row["shards"] == [stage.shard for stage in template.stages]
        assert row["tp_degrees"] == [stage.tp_degree for stage in template.stages]
        devices = sum(shard * degree for shard, degree in zip(row["shards"], row["tp_degrees"], strict=True))
        assert devices == 4 * row["num_nodes"], "all devices work"
        assert row["iteration_ms"] == template.iteration_ms(row["num_microbatches"])
    assert sharded["step_ms"] < json.loads((tmp_path / "plain.json").read_text())["step_ms"]
    note = "shard: devices that divide a stage's state; slowest ms: of a microbatch for each\n"
    assert (note in ended.output, note in plain) == (True, False)
    assert ("tp degrees  shard" in ended.output, " shard" in plain.partition("\nPlan\n")[0]) == (True, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--model": "gpt3-6.7"},
            f"--model must be one of {', '.join(MODELS)}, got 'gpt3-6.7'; did you mean 'gpt3-6.7b'?",
        ),
        (
            {"--device": "a41"},
            f"--device must be one of {', '.join(DEVICES)}, got 'a41'; did you mean 'a40'?",
        ),
        ({"--model": None}, f"--model or --profile must be given, got neither; --model can be {', '.join(MODELS)}"),
        ({"--device": None}, f"--device must be given with --model, got none; it can be {', '.join(DEVICES)}"),
        (
            {"--global-batch": "97"},
            "--global-batch must be a multiple of --microbatch 2, at least 4 (one microbatch for each of 2 pipelines), "
            "got 97; use 96 or 98",
        ),
        (
            {"--nodes": "3"},
            "--nodes must be at least 4 (--max-failures + 1 = 2 pipelines of 2 nodes, the fewest that hold "
            "the model), got 3; add 1 node, or lower --max-failures, or use nodes with more memory (--gpus-per-node, "
            "--device)",
        ),
        (
            {"--nodes": "5", "--min-pipeline-nodes": "3"},
            "--nodes must be at least 6 (--max-failures + 1 = 2 pipelines of 3 nodes, the fewest that hold "
            "the model), got 5; add 1 node, or lower --max-failures, or lower --min-pipeline-nodes",
        ),
        (
            {"--model": "llama3-70b", "--device": "l4", "--global-batch": None, "--microbatch": None},
            "the memory of --device must hold layer 'llm.head' alone in a stage, 23651827712 bytes on each device, got "
            "23192823398; use smaller microbatches or devices with more memory",
        ),
        (
            {"--gpus-per-node": "100000000000000000000"},
            "--gpus-per-node must be 1 to 100000, got 100000000000000000000; give less",
        ),
        (
            {"--gpus-per-node": "100000"},
            "--gpus-per-node must be filled by stages of 34 layers at tensor-parallel degrees 1, 2, 4, 8, got 100000; "
            "lower it, or profile other degrees",
        ),
        ({"--share": "min=5,max=2"}, "--share must have a min of at most its max, got 'min=5,max=2'; swap them"),
        ({"--microbatch": "0"}, "--microbatch must be >= 1, got 0; 2 is usual for gpt3-2.7b"),
        ({"--frozen": "llm"}, "--frozen must leave a unit to train, got llm; leave one out"),
        ({"--frozen": "lm"}, "--frozen must be one of llm, got 'lm'; did you mean 'llm'?"),
        ({"--seq-len": "4096"}, "--seq-len must be 1 to 2048 for gpt3-2.7b, got 4096; 2048 is usual"),
        (
            {"--network-gbit-s": "0"},
            "--network-gbit-s must be at least 0.001, got 0.0; leave it out for the usual network",
        ),
    ],
)
def test_bad_options_are_refused_with_the_fix(changes: dict[str, str | None], message: str) -> None:
    ended = run({**SMALL, **changes})
    assert (ended.exit_code, ended.output) == (2, f"error: {message}\n")


def test_bad_profiles_are_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"layers": 3}')
    ended = run({**SMALL, "--model": None, "--profile": str(path)})
    assert (ended.exit_code, ended.output) == (
        2,
        f"error: --profile must be a file that `resilient profile` wrote, got {path} (Expected `array`, got `int` - at "
        "`$.layers`); write it again\n",
    )
    path.write_bytes(derive_profile("bert-large", "a40").to_json())
    ended = run({**SMALL, "--profile": str(path)})
    assert (ended.exit_code, ended.output) == (
        2,
        f"error: --profile must come without --model, which it says, got {path}; leave one of them out\n",
    )
    ended = run({**SMALL, "--model": None, "--profile": str(path), "--microbatch": "16"})
    assert (ended.exit_code, ended.output) == (
        2,
        "error: --microbatch must be 32, the one that --profile is of, got 16; leave it out, or profile with another\n",
    )
    ended = run({**SMALL, "--model": None, "--profile": str(path), "--microbatch": None, "--global-batch": None})
    assert (ended.exit_code, ended.output) == (
        2,
        "error: --global-batch must be given with --profile, got none; give the job's, a multiple of its microbatch "
        "32\n",
    )
    path.write_bytes(replace(derive_profile("bert-large", "a40"), microbatch=None).to_json())
    ended = run({**SMALL, "--model": None, "--profile": str(path), "--microbatch": None})
    assert (ended.exit_code, ended.output) == (
        2,
        "error: --global-batch and --microbatch must be given with --profile, got 96 and none; the microbatch is "
        "the one that was measured\n",
    )


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run({**SMALL, "--json": str(tmp_path / "file" / "plan.json")})
    assert ended.exit_code == 2
    assert str(tmp_path / "file") in ended.output


def test_numbers_are_written_compactly() -> None:
    assert compact((4, 8, 8, 4, 4)) == "8 x2, 4 x3"
    assert compact((2,)) == "2"


def test_command_line_starts_without_what_only_planning_needs() -> None:
    slow = {"torch", "numba", "scipy", "pyomo", "matplotlib"}
    code = f"import sys, resilient.cli.app; print(sorted({slow!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--nodes", "2", "--model", "gpt2-medium"),
        ("simulate", "--availability", "g4dn", "--model", "gpt2-medium"),
        ("schedule", "--stages", "40", "--microbatches", "2", "--model", "gpt2-medium"),
        ("compare", "--model", "qwen2-vl-7b", "--workload", "coco"),
    ],
)
def test_a_device_without_its_size_is_the_largest_in_every_command(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def described(model: str, device: str, **_: object) -> ModelProfile:
        taken.append(device)
        raise ValueError("enough")

    monkeypatch.setattr("resilient.templates.inputs.derive.derive_profile", described)
    monkeypatch.setattr("resilient.planners.costs.derived_costs.derive_costs", described)
    for device, full, also in (
        ("a100", "a100-80gb", "; there is a100-40gb, too"),
        ("v100", "v100-32gb", ""),
    ):
        ended = CliRunner().invoke(app, [*command, "--device", device])
        assert ended.output == f"note: --device {device} is taken as {full}{also}\nerror: enough\n"
    for device in ("a100-40gb", "h100"):
        assert CliRunner().invoke(app, [*command, "--device", device]).output == "error: enough\n"
    assert taken == ["a100-80gb", "v100-32gb", "a100-40gb", "h100"]
