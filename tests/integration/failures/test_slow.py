"""A node that computes slowly is found by what the workers measure: it gets less to do from the next change on, or
stands by."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.pipeline.stage_timer import MIN_MEASURED_STEPS
from tests.integration.harness import Event, check_equal, run_job

NODES = 5
UNEVEN = Path(__file__).parents[1] / "jobs" / "uneven.py"


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


def test_node_that_is_far_too_slow_stands_by_until_another_is_lost(tmp_path: Path) -> None:
    measured = MIN_MEASURED_STEPS + 2
    steps = ("--steps", str(measured + 8))
    reference = run_job(tmp_path / "reference", *steps, nodes=NODES + 1)

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] in (measured - 1, measured + 3):
            launcher.remove_node(NODES if event["generation"] == 1 else NODES - 1)

    held = ("--change-after", str(measured), "--change-after", str(measured + 4))
    run = run_job(tmp_path / "run", *steps, *held, "--slow-node", "0", nodes=NODES + 1, act=act)
    check_equal(run, reference)
    first, second, third = run.generations
    assert 0 in first["nodes"]
    assert (second["standby"], second["standby_reasons"]) == ([0], {"0": "faster"})
    assert second["step_ms"] < second["with_standby_ms"]
    assert (third["standby"], sorted(third["nodes"])) == ([], [0, 1, 2, 3])
    (standby,) = run.report["standbys"]
    assert (standby["generation"], standby["slowdowns"]) == (2, {"0": second["slowdowns"]["0"]})


@pytest.mark.parametrize("slow", [0, 3])
def test_node_of_a_planned_job_is_slow_only_by_what_it_was_given(slow: int, tmp_path: Path) -> None:
    """Two pipelines of 2 and 1 microbatches get equal parts of the samples; the slow node has measured that it is."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["generation"] == 1 and event["step"] == MIN_MEASURED_STEPS + 2:
            launcher.add_node()
        if event["kind"] == "step" and event["generation"] == 2:
            launcher.interrupt("enough")

    options = ("--planner", "dflop", "--steps", "100000", "--slow-node", str(slow), "--cache", str(tmp_path / "cache"))
    run = run_job(tmp_path / "run", *options, script=UNEVEN, nodes=4, act=act)
    assert run.reason.startswith("interrupted (enough)"), run.reason
    before, after = run.generations
    assert [pipeline["num_microbatches"] for pipeline in before["pipelines"]] == [2, 1]
    assert after["slowdowns"] == {str(slow): pytest.approx(2.0, rel=0.15)}
