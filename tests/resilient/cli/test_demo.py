"""The demo's choice of a failure and its verdict."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from resilient.cli.demo import KILL_PHASES, NUM_NODES, Director, choose_scenario, example_script, judge, show_verdict
from resilient.observability.run_report import build_run_report
from resilient.protocol.messages import Injection
from tests.resilient.observability.made_up_runs import Run, failure_and_join


def good_report(**changes: Any) -> dict[str, Any]:
    compared = {"max_param_rel_diff": 1e-13, "max_loss_abs_diff": 1e-14, "same_steps_and_samples": True}
    return {**build_run_report(failure_and_join().events), **compared, **changes}


def with_recovery(**changes: Any) -> dict[str, Any]:
    report = good_report()
    return {**report, "recoveries": [{**report["recoveries"][0], **changes}]}


def with_join(**changes: Any) -> dict[str, Any]:
    report = good_report()
    return {**report, "joins": [{**report["joins"][0], **changes}]}


def test_scenario_depends_on_the_seed_alone_and_varies_with_it() -> None:
    drawn = [choose_scenario(seed, 40) for seed in range(50)]
    assert drawn == [choose_scenario(seed, 40) for seed in range(50)]
    assert {int(scenario.draw * NUM_NODES) for scenario in drawn} == set(range(NUM_NODES))
    assert {scenario.at_phase for scenario in drawn} == set(KILL_PHASES)
    assert {scenario.at_step for scenario in drawn} <= set(range(8, 17))


def test_scenario_of_too_few_steps_is_refused() -> None:
    with pytest.raises(
        ValueError, match="steps must be at least 20 for a failure and a join to fit in, got 5; train for more"
    ):
        choose_scenario(0, 5)


def test_director_adds_one_node_some_steps_after_the_recovery() -> None:
    run = Run(num_steps=12)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    director_steps = []
    seen = 0
    director = Director(choose_scenario(0, 40), lambda _: None, lambda: director_steps.append(seen))
    for step in range(1, 5):
        run.step(100 * step, step)
    run.generation(450, 2, "failure", 4, [0, 2], lost_steps=1)
    run.step(460, 5, generation=1)
    for step in range(5, 13):
        run.step(100 * step, step)
    for event in run.events:
        seen = event.get("step", seen)
        director.on_event(event)
    assert director_steps == [8]


LANES = {0: ["vision.0"], 1: ["llm.0"], 2: ["llm.0", "vision.1"], 3: ["vision.0", "audio.0"]}


@pytest.mark.parametrize(("lanes", "killed"), [(LANES, {0, 3}), ({0: [""], 1: [""]}, {0, 1})])
def test_director_has_a_node_killed_that_only_encodes_if_there_is_one(
    lanes: dict[int, list[str]], killed: set[int]
) -> None:
    stages = [{"node": node, "lane": lane} for node, of_node in lanes.items() for lane in of_node]
    generation = {"kind": "generation", "cause": "start", "nodes": list(lanes), "pipelines": [{"stages": stages}]}
    kills: list[Injection] = []
    for seed in range(30):
        scenario = choose_scenario(seed, 40)
        Director(scenario, kills.append, lambda: None).on_event(generation)
        assert (kills[-1].at_step, kills[-1].at_phase) == (scenario.at_step, scenario.at_phase)
    assert {kill.node for kill in kills} == killed


def test_example_script_is_part_of_the_package() -> None:
    assert example_script().is_file()


def test_verdict_on_a_good_run_is_passed() -> None:
    assert judge(good_report()) == []


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (with_recovery(restarted_workers=1), "no surviving worker may be restarted, got 1"),
        (with_recovery(lost_steps=2), "a failure must cost at most 1 step, got 2"),
        (with_join(lost_steps=1), "a join must cost no step, got 1"),
        (with_join(restarted_workers=2), "no surviving worker may be restarted, got 2"),
        (good_report(recoveries=[]), "a failure must happen and be recovered from, got none"),
        (good_report(joins=[]), "a node must join, got none: it was not ready before the last step, use more --steps"),
        (
            good_report(same_steps_and_samples=False),
            "both runs must train the same samples in the same steps, got others",
        ),
        (good_report(max_param_rel_diff=2e-9), "max_param_rel_diff must be at most 1e-09, got 2e-09"),
        (good_report(max_loss_abs_diff=float("nan")), "max_loss_abs_diff must be at most 1e-09, got nan"),
        (good_report(max_param_rel_diff=None), "max_param_rel_diff must be at most 1e-09, got None"),
        (
            good_report(exit={"code": 3, "reason": "2 nodes are missing"}),
            "the run must finish, got: 2 nodes are missing",
        ),
    ],
)
def test_verdict_names_what_went_wrong(report: dict[str, Any], reason: str) -> None:
    assert judge(report) == [reason]


def test_show_verdict_prints_the_numbers_and_returns_the_exit_code(tmp_path: Path) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    assert show_verdict(good_report(), tmp_path, console) == 0
    text = console.export_text()
    for expected in (
        "PASSED",
        "250 ms",
        "detect 2 ms, agree 18 ms",
        "node 5",
        "60 ms, 0 steps lost",
        "1.0e-13",
        "accuracy",
    ):
        assert expected in text
    assert show_verdict(good_report(joins=[]), tmp_path, console) == 1
    assert "FAILED" in console.export_text()
