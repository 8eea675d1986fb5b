"""A node that computes slowly is found by what the workers measure, and gets less to do from the next change on."""

from __future__ import annotations

from pathlib import Path

from resilient.agent.launch import Launcher
from resilient.pipeline.stage_timer import MIN_MEASURED_STEPS
from tests.integration.harness import Event, check_equal, run_job

NODES = 5


def test_slow_node_gets_less_to_do(tmp_path: Path) -> None:
    steps = ("--steps", str(MIN_MEASURED_STEPS + 6))
    reference = run_job(tmp_path / "reference", *steps, nodes=NODES)

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == MIN_MEASURED_STEPS + 1:
            launcher.remove_node(4)

    held = ("--change-after", str(MIN_MEASURED_STEPS + 2))
    run = run_job(tmp_path / "run", *steps, *held, "--slow-node", "0", nodes=NODES, act=act)
    check_equal(run, reference)
    before, after = run.generations
    assert before["slowdowns"] == {}
    assert after["slowdowns"]["0"] > 2
    assert after["slowdowns"]["0"] == max(after["slowdowns"].values())
    (slow,) = (pipeline for pipeline in after["pipelines"] if 0 in pipeline["nodes"])
    (other,) = (pipeline for pipeline in after["pipelines"] if 0 not in pipeline["nodes"])
    assert slow["num_microbatches"] < other["num_microbatches"]
