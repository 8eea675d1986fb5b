"""``resilient simulate`` from its options to its files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.cli.simulate.options import load_trace
from resilient.simulation.scenario import POLICIES
from resilient.templates.inputs.derive import derive_profile

JOB = ["simulate", "--model", "gpt2-medium", "--device", "a40", "--global-batch", "256"]


def run(*arguments: str) -> str:
    """Return what is printed; the command must succeed."""
    ended = CliRunner().invoke(app, [*JOB, *arguments], env={"COLUMNS": "80"})
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_policies_are_compared_on_each_trace(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("".join(f"0,add,n{i}\n" for i in range(8)) + "1800000,remove,n3\n3600000,add,x\n")
    files = ["--json", str(tmp_path / "out" / "all.json"), "--png", str(tmp_path / "out" / "all.png")]
    output = run("--availability", str(tmp_path / "two.csv"), "--availability", "every-30min", "--nodes", "8", *files)
    assert "two\n1 h, 8 nodes at the start, 8 at most; 1 lost, 1 joined\n" in output
    assert "every-30min\n2.5 h, 8 nodes at the start, 8 at most; 4 lost, 0 joined\n" in output
    assert len(re.findall(r"^(resilient|bamboo|varuna|restart) +\d", output, re.MULTILINE)) == 8
    assert len(re.findall(r"^  tuned +\d", output, re.MULTILINE)) == 6
    assert all(len(line) <= 80 for line in output.splitlines())
    written = json.loads((tmp_path / "out" / "all.json").read_text())
    assert written["job"]["profile"] == "derived: gpt2-medium, a40, microbatch 32, 1024 tokens"
    assert written["job"]["node_hour_dollars"] == 0.4
    assert [trace["trace"] for trace in written["traces"]] == ["two", "every-30min"]
    for trace in written["traces"]:
        assert [each["policy"] for each in trace["outcomes"]] == list(POLICIES)
        for each in trace["outcomes"]:
            assert sum(each["node_hours_by_part"].values()) == pytest.approx(each["node_hours"])
            assert each["dollars"] == pytest.approx(0.4 * each["node_hours"])
    assert (tmp_path / "out" / "all-two.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "all-every-30min.png").stat().st_size > 10_000


def test_storage_of_nodes_saves_as_many_times_faster_as_there_are_nodes_up_to_what_the_job_has(tmp_path: Path) -> None:
    def checkpointing(*arguments: str) -> float:
        trace = ["--availability", "every-1h", "--nodes", "8", "--hours", "1", "--policy", "varuna"]
        run(*trace, *arguments, "--json", str(tmp_path / "s.json"))
        (outcome,) = json.loads((tmp_path / "s.json").read_text())["traces"][0]["outcomes"]
        return outcome["share_by_part"]["checkpointing"] / (1 - outcome["share_by_part"]["checkpointing"])

    whole = checkpointing("--storage-gb-s", "0.08")
    assert checkpointing("--node-storage-gb-s", "0.01") == pytest.approx(whole, rel=0.05)
    assert checkpointing("--node-storage-gb-s", "1", "--storage-gb-s", "0.08") == pytest.approx(whole, rel=0.05)


def test_a_sweep_marks_the_fastest_and_the_cheapest(tmp_path: Path) -> None:
    sweeps = ["--sweep", "nodes=4,8", "--sweep", "max-failures=1,2"]
    output = run(
        "--availability", "g4dn", "--hours", "2", *sweeps, "--price", "1.5", "--json", str(tmp_path / "s.json")
    )
    assert output.count("fastest") == output.count("cheapest") == 1
    (trace,) = json.loads((tmp_path / "s.json").read_text())["traces"]
    assert [(row["values"]["nodes"], row["values"]["max-failures"]) for row in trace["rows"]] == [
        (4, 1), (4, 2), (8, 1), (8, 2),
    ]  # fmt: skip
    assert {row["policy"] for row in trace["rows"]} == {"resilient"}
    fastest = max(trace["rows"], key=lambda row: row["samples_per_s"])["values"]
    assert re.search(rf"^{fastest['nodes']} +{fastest['max-failures']} .*fastest", output, re.MULTILINE)


def test_a_policy_that_does_not_fit_is_said_with_the_reason() -> None:
    output = run(
        "--availability", "every-1h", "--nodes", "2", "--microbatch", "128", "--policy", "bamboo", "--policy", "varuna"
    )
    assert re.search(r"^bamboo +does not fit *$", output, re.MULTILINE)
    assert (
        "bamboo: half of the memory is for the next node's layers: the memory of --device must hold layer 'llm.head'"
        in output
    )


def test_a_combination_that_cannot_be_is_said_in_its_row() -> None:
    output = run("--availability", "every-1h", "--nodes", "4", "--sweep", "max-failures=1,8")
    assert re.search(r"^8 +resilient +does not fit *$", output, re.MULTILINE)
    assert (
        "resilient: the number of microbatches must be at least --max-failures + 1 = 9 (each pipeline processes one), "
        "got 8; raise the global batch or lower the microbatch"
    ) in output.replace("\n", " ")
    assert output.count("fastest") == 1


def test_jobs_are_described_as_for_planning(tmp_path: Path) -> None:
    profile = tmp_path / "global_batch" / "profile.json"
    profile.parent.mkdir()
    profile.write_bytes(derive_profile("gpt2-medium", "a40").to_json())

    def samples(*arguments: str) -> int:
        trace = ["--availability", "every-1h", "--nodes", "6", "--policy", "resilient", "--global-batch", "256"]
        ended = CliRunner().invoke(app, ["simulate", *trace, "--json", str(tmp_path / "s.json"), *arguments])
        assert ended.exit_code == 0, ended.output
        return json.loads((tmp_path / "s.json").read_text())["traces"][0]["outcomes"][0]["samples"]

    derived = samples("--model", "gpt2-medium", "--device", "a40")
    assert samples("--profile", str(profile), "--device", "a40") == derived
    assert samples("--profile", str(profile), "--price", "1") > derived, "messages cost nothing without a device"
    assert samples("--model", "gpt2-medium", "--device", "a40", "--network-gbit-s", "1") < derived
    vision = ("--model", "qwen2-vl-7b", "--device", "h100", "--microbatch", "1")
    assert samples(*vision, "--frozen", "vision,llm") > samples(*vision)
    ended = CliRunner().invoke(
        app, ["simulate", "--availability", "g4dn", "--profile", str(profile), "--global-batch", "33"]
    )
    assert ended.output == (
        "error: --global-batch must be a multiple of --microbatch 32, at least 64 (one microbatch for each of 2 "
        "pipelines), got 33; use 64\n"
    )


def test_too_few_nodes_are_said_with_the_number_that_would_do() -> None:
    output = run("--availability", "every-1h", "--nodes", "1", "--policy", "resilient").replace("\n", " ")
    assert (
        "resilient: --nodes must be at least 2 (--max-failures + 1 = 2 pipelines of 1 node, the fewest that hold the "
        "model), got 1; add 1 node"
    ) in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--availability", "nowhere.csv"],
            "--availability must be a file, ec2-p3, g4dn or like every-6h, got 'nowhere.csv'; check the path",
        ),
        (
            ["--availability", "g4dn", "--policy", "oobleck"],
            "--policy must be one of resilient, bamboo, bamboo-tuned, varuna, varuna-tuned, restart, "
            "restart-tuned, got 'oobleck'; choose one of these",
        ),
        (
            ["--availability", "g4dn", "--sweep", "gpus=2"],
            "--sweep must look like \"nodes=16,24,32\", got 'gpus=2'; give each of nodes and max-failures at most once",
        ),
        (
            ["--availability", "g4dn", "--storage-gb-s", "0"],
            "--storage-gb-s must be at least 0.001, got 0.0; give what was measured",
        ),
        (
            ["--availability", "g4dn", "--step-factor", "inf"],
            "--step-factor must be 1e-09 to 1e+09, got inf; 1 means as planned",
        ),
        (["--availability", "g4dn", "--regroup-ms", "nan"], "--regroup-ms must be 0 to 1e+09, got nan; 0 means none"),
        (
            ["--availability", "g4dn", "--network-gbit-s", "1e-300"],
            "--network-gbit-s must be at least 0.001, got 1e-300; leave it out for the usual network",
        ),
        (
            ["--availability", "g4dn", "--nodes", "7", "--sweep", "nodes=2,4"],
            "--nodes must come without --sweep nodes, got 7; leave one of them out",
        ),
        (
            ["--availability", "g4dn", "--png", "x.png", "--sweep", "nodes=2,4"],
            "--png must come without --sweep, got x.png; leave one of them out",
        ),
        (
            ["--availability", "every-0h"],
            "--availability must lose nodes 0.001 s or more apart, the last within 87600 hours, got 'every-0h'; give a "
            "time as in every-6h",
        ),
        (
            ["--availability", "every-99999999h"],
            "--availability must lose nodes 0.001 s or more apart, the last within 87600 hours, got 'every-99999999h'; "
            "give a time as in every-6h",
        ),
        (
            ["--availability", "g4dn", "--global-batch", "32000032"],
            "--global-batch must be at most 32000000, got 32000032; lower it, or raise --microbatch",
        ),
        (["--availability", "g4dn", "--price", "nan"], "--price must be >= 0, got nan; 0 leaves dollars out"),
        (
            ["--availability", "g4dn", "--hours", "inf"],
            "--hours must be 0.001 to 87600, got inf; leave it out for the trace's own",
        ),
        (
            ["--availability", "g4dn", "--sweep", "nodes=8,0"],
            "--sweep must have nodes of 1 to 100000, got 'nodes=8,0'; leave the others out",
        ),
        (["--availability", "g4dn", "--restart-s", "-1"], "--restart-s must be 0 to 1e+09, got -1.0; 0 means none"),
    ],
)
def test_bad_options_are_refused_with_the_fix(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(app, [*JOB, *arguments])
    assert ended.exit_code == 2
    assert ended.stderr.strip() == f"error: {message}"


def test_nodes_without_a_device_need_a_price(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(derive_profile("gpt2-medium", "a40").to_json())
    job = ["simulate", "--availability", "g4dn", "--profile", str(tmp_path / "p.json"), "--global-batch", "256"]
    ended = CliRunner().invoke(app, job)
    assert (ended.exit_code, ended.output) == (
        2,
        "error: --price must be given without --device, got none; 0 leaves dollars out\n",
    )


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0,add,a\n5,remove,b\n")
    ended = CliRunner().invoke(app, [*JOB, "--availability", str(path)])
    assert ended.exit_code == 2
    assert f"error: {path}: line 2 must remove a node that is there, got b, which is not; add it first" in ended.stderr


def test_traces_are_made_up_scaled_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text("0,add,a\n0,add,b\n7200000,remove,b\n")
    assert load_trace(str(path), None, None, 0).max_nodes == 2
    assert load_trace(str(path), 6, 1.0, 0).max_nodes == 6
    assert load_trace(str(path), 6, 1.0, 0).end_ms == 3_600_000
    (tmp_path / "moment.csv").write_text("0,add,a\n")
    assert load_trace(str(tmp_path / "moment.csv"), None, 2.0, 0).end_ms == 7_200_000
    assert load_trace("every-90s", None, None, 0).end_ms == 16 * 90_000
    assert load_trace("ec2-p3", None, None, 0).end_ms == 12 * 3_600_000
    assert load_trace("ec2-p3", 40, 5.0, 3).max_nodes <= 40
    assert load_trace("ec2-p3", 40, 5.0, 3) != load_trace("ec2-p3", 40, 5.0, 4)


def test_too_few_nodes_to_restart_with_are_called_by_their_option() -> None:
    job = ["--min-pipeline-nodes", "3", "--nodes", "8", "--hours", "1", "--restart-nodes", "2"]
    output = run("--availability", "every-30min", "--policy", "restart", *job)
    assert "restart: --restart-nodes must hold a pipeline, got 2; restart with more nodes" in output
