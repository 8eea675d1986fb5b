"""``resilient plan`` shows how each pipeline's devices share their stages, and refuses what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

from resilient.templates.inputs.profile import ModelProfile
from tests.resilient.cli.plan.test_command import run
from tests.templates.jobs import cost, layer


def test_method_of_each_pipeline_is_shown(tmp_path: Path) -> None:
    """Sharded nodes beside a tensor-parallel one, of which a device would be idle in the last round."""
    layers = tuple(layer(i, [cost(9.0), cost(5.0)], 30_000, 2000) for i in range(6))
    measured = ModelProfile(layers=layers, tp_degrees=(1, 2), microbatch=2)
    (tmp_path / "profile.json").write_bytes(measured.to_json())
    job: dict[str, str | None] = {
        "--profile": str(tmp_path / "profile.json"),
        "--nodes": "3",
        "--gpus-per-node": "2",
        "--global-batch": "14",
    }
    job |= {"--microbatch": "2", "--max-failures": "1", "--json": str(tmp_path / "plan.json")}
    ended = run(job, "--tp", "auto", "--shard", "auto")
    assert ended.exit_code == 0, ended.output
    rows = [line.split("  ") for line in ended.output.partition("\nPlan\n")[2].splitlines()[1:3]]
    assert [[cell.strip() for cell in row if cell][1:4] for row in rows] == [["1", "shard 2", "2"], ["1", "tp 2", "3"]]
    pipelines = json.loads((tmp_path / "plan.json").read_text())["pipelines"]
    assert sorted((row["shards"], row["tp_degrees"]) for row in pipelines) == [([1], [2]), ([2], [1]), ([2], [1])]
    ended = run(job, "--tp", "2", "--shard", "auto")
    assert ended.exit_code == 0, ended.output
    pipelines = json.loads((tmp_path / "plan.json").read_text())["pipelines"]
    assert {(*row["shards"], *row["tp_degrees"]) for row in pipelines} == {(1, 2)}
    refused = run(job, "--tp", "2", "--shard", "on")
    assert "--shard must not be on beside --tp 2" in refused.output
    refused = run(job, "--tp", "2", "--schedule", "interleaved-1f1b")
    assert "--tp must be 1 for interleaved-1f1b, whose stages have one device each, got 2" in refused.output
