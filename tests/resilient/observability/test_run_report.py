"""What failures and joins cost, from hand-made events with round numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from resilient.errors import CheckpointError
from resilient.observability.event_log import read_events
from resilient.observability.run_comparison import compare_runs
from resilient.observability.run_report import build_run_report, write_report
from resilient.state.manifest import Manifest, SavedState, write_manifest
from resilient.templates.common.checkpoint_interval import checkpoint_interval_s
from tests.resilient.observability.made_up_runs import Run, fail_twice_with_late_steps, failure_and_join
from tests.resilient.small import make_job


def started(num_steps: int = 4) -> Run:
    """Three nodes; generation 1 is installed at 50 ms, steps 1 and 2 are committed at 100 ms and 200 ms."""
    run = Run(num_steps=num_steps)
    run.generation(0, 1, "start", 0, [0, 1, 2])
    run.installed(20, 50)
    run.step(100, 1)
    run.step(200, 2)
    return run


def test_report_of_a_failure_names_the_units_of_the_node() -> None:
    events = failure_and_join().events
    (first, *_) = (event for event in events if event["kind"] == "generation")
    for stage in (stage for pipeline in first["pipelines"] for stage in pipeline["stages"]):
        stage["lane"] = "vision.1" if stage["node"] == 2 else "llm.0"
    (recovery,) = build_run_report(events)["recoveries"]
    assert (recovery["nodes"], recovery["units"]) == ([2], ["vision"])


def test_report_of_a_failure_and_a_join_adds_up() -> None:
    report = build_run_report(failure_and_join(num_steps=40).events)
    assert report["steps"] == 40
    assert report["final_loss"] == pytest.approx(0.1)
    assert report["throughput_samples_per_s"] == pytest.approx(40 * 64 / (4.390 - 0.050), abs=1e-3)
    assert report["recoveries"] == [
        {
            "generation": 2,
            "cause": "node lost (node 2)",
            "nodes": [2],
            "units": [],
            "step": 15,
            "lost_steps": 1,
            "roll_forward": False,
            "detect_ms": 2.0,
            "agree_ms": 18.0,
            "regroup_ms": 40.0,
            "copy_ms": 70.0,
            "redo_ms": 120.0,
            "total_ms": 250.0,
            "bytes_copied": 5_000_000,
            "restarted_workers": 0,
        }
    ]
    assert report["joins"] == [
        {
            "generation": 3,
            "nodes": [5],
            "step": 23,
            "lost_steps": 0,
            "pause_ms": 60.0,
            "bytes_copied": 3_000_000,
            "restarted_workers": 0,
        }
    ]
    assert report["notes"] == {"accuracy": 0.93}
    assert report["exit"] == {"code": 0, "reason": "finished", "checkpoint": "checkpoints/step-00000040"}
    assert report["max_param_abs_diff"] is None
    assert report["max_loss_abs_diff"] is None
    json.dumps(report)


@pytest.mark.parametrize("lost_again", [0, 1], ids=["before it was installed", "in the redone step"])
def test_second_failure_during_recovery_belongs_to_the_first(lost_again: int) -> None:
    run = started()
    run.injected(240, 1)
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", 2, [0, 2], lost_steps=1)
    run.installed(265, 270, node=0, bytes_copied=10)
    run.injected(275, 2)
    run.detected(280, [2], 3, cause="worker killed by SIGKILL")
    run.generation(300, 3, "failure", 2, [0], lost_steps=lost_again)
    run.installed(310, 330, node=0, bytes_copied=7)
    run.step(430, 3)
    (recovery,) = build_run_report(run.events)["recoveries"]
    assert recovery["cause"] == "node lost (node 1), then worker killed by SIGKILL (node 2)"
    assert recovery["nodes"] == [1, 2]
    assert [recovery[f"{part}_ms"] for part in ("detect", "agree", "regroup", "copy", "redo", "total")] == [
        10.0,
        50.0,
        10.0,
        20.0,
        100.0,
        190.0,
    ]
    assert recovery["bytes_copied"] == 17
    assert recovery["lost_steps"] == 1


@pytest.mark.parametrize("suspected", [True, False])
def test_second_failure_is_told_apart_though_the_steps_before_it_are_heard_of_late(suspected: bool) -> None:
    run = started()
    fail_twice_with_late_steps(run, suspected=suspected)
    first, second = build_run_report(run.events)["recoveries"]
    assert (first["nodes"], first["cause"], first["lost_steps"]) == ([1], "node lost (node 1)", 1)
    assert (second["nodes"], second["cause"], second["lost_steps"]) == ([2], "heartbeat missed (node 2)", 1)
    assert (first["detect_ms"], first["agree_ms"], first["redo_ms"], first["generation"]) == (10.0, 10.0, 100.0, 2)
    assert (second["detect_ms"], second["agree_ms"], second["redo_ms"], second["generation"]) == (5.0, 20.0, 100.0, 3)


def test_failure_that_was_not_injected_has_no_detection_time() -> None:
    run = started()
    run.detected(250, [], 2, cause="communication failed: peer closed")
    run.add(252, "node_lost", node=1, cause="heartbeat missed")
    run.generation(260, 2, "failure", 2, [0, 2], lost_steps=1)
    run.installed(270, 290)
    run.step(390, 3)
    (recovery,) = build_run_report(run.events)["recoveries"]
    assert recovery["detect_ms"] is None
    assert recovery["total_ms"] == 140.0
    assert recovery["cause"] == "heartbeat missed (node 1)"


def test_lost_nodes_are_named_in_the_order_it_became_known_also_after_a_suspicion() -> None:
    run = started()
    run.detected(250, [], 2, cause="communication failed: peer closed")
    run.add(252, "node_lost", node=2, cause="node lost")
    run.generation(260, 2, "failure", 2, [0, 1], lost_steps=1)
    run.installed(265, 270, node=0)
    run.add(280, "node_lost", node=1, cause="heartbeat missed")
    run.detected(280, [1], 3, cause="heartbeat missed")
    run.generation(300, 3, "failure", 2, [0])
    run.installed(310, 330, node=0)
    run.step(430, 3)
    (recovery,) = build_run_report(run.events)["recoveries"]
    assert recovery["nodes"] == [2, 1]
    assert recovery["cause"] == "node lost (node 2), then heartbeat missed (node 1)"


def test_recovery_that_rolls_forward_loses_and_redoes_nothing() -> None:
    run = started()
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", 3, [0, 2], roll_forward=True, lost_steps=0)
    run.installed(270, 290)
    run.step(300, 3)
    run.step(390, 4)
    (recovery,) = build_run_report(run.events)["recoveries"]
    assert (recovery["lost_steps"], recovery["redo_ms"], recovery["total_ms"]) == (0, 0.0, 40.0)
    assert recovery["roll_forward"] is True
    assert recovery["step"] == 4


def test_committed_steps_fallen_back_behind_count_as_lost() -> None:
    run = started()
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", 0, [0, 2], lost_steps=1)
    run.installed(270, 290)
    run.step(390, 1)
    report = build_run_report(run.events)
    assert report["recoveries"][0]["lost_steps"] == 2
    assert report["steps"] == 2


def test_restarted_worker_is_counted() -> None:
    run = started()
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", 2, [0, 2], lost_steps=1, pids={"0/0": 200, "2/0": 999})
    run.installed(270, 290)
    run.step(390, 3)
    assert build_run_report(run.events)["recoveries"][0]["restarted_workers"] == 1


def test_step_of_the_old_generation_that_arrives_late_does_not_end_a_recovery() -> None:
    run = started()
    run.detected(250, [1], 2)
    run.generation(260, 2, "failure", 3, [0, 2], lost_steps=1)
    run.step(245, 3, generation=1)
    run.installed(270, 290)
    run.step(390, 4)
    (recovery,) = build_run_report(run.events)["recoveries"]
    assert recovery["redo_ms"] == 100.0


def test_two_failures_of_the_same_node_are_two_recoveries() -> None:
    run = started(num_steps=5)
    for at_ms, generation, version in ((240, 2, 2), (640, 3, 3)):
        run.injected(at_ms, 1)
        run.detected(at_ms + generation, [1], generation)
        run.generation(at_ms + 10, generation, "failure", version, [0, 2], lost_steps=1)
        run.installed(at_ms + 20, at_ms + 40)
        run.step(at_ms + 140, version + 1)
    assert [recovery["detect_ms"] for recovery in build_run_report(run.events)["recoveries"]] == [2.0, 3.0]


def test_report_says_what_checkpoints_were_chosen_by() -> None:
    run = Run()
    run.generation(0, 1, "start", 0, [0, 1], checkpoint_pace={"risk_s": 1000.0, "cost_s": None})
    run.add(10, "checkpoint", step=3, path="/c")
    chosen = {"written": 1, "cost_s": None, "risk_s": 1000.0, "interval_s": None}
    assert build_run_report(run.events)["checkpoints"] == chosen
    run.add(20, "step", step=5, loss=1.0, num_samples=1, checkpoint_s=4.0)
    interval_s = checkpoint_interval_s(4.0, 1000.0)
    assert build_run_report(run.events)["checkpoints"] == {**chosen, "cost_s": 4.0, "interval_s": interval_s}
    assert build_run_report(run.events[-2:-1])["checkpoints"] == {"written": 1}


def test_report_says_which_nodes_stood_by_and_why() -> None:
    run = Run()
    standing = {"standby": [2], "standby_reasons": {"2": "faster"}, "slowdowns": {"2": 3.0}}
    run.generation(0, 1, "start", 0, [0, 1], step_ms=8.0, with_standby_ms=9.5, **standing)
    run.generation(900, 2, "join", 4, [0, 1, 2], step_ms=7.0, with_standby_ms=None, standby_reasons={}, slowdowns={})
    assert build_run_report(run.events)["standbys"] == [
        {"generation": 1, "reasons": {"2": "faster"}, "slowdowns": {"2": 3.0}, "step_ms": 8.0, "with_standby_ms": 9.5}
    ]


def test_job_that_stops_for_want_of_nodes_reports_why() -> None:
    run = started()
    run.detected(250, [1, 2], 2)
    run.add(300, "stopped", exit_code=3, reason="2 nodes are missing", path="checkpoints/step-00000002")
    report = build_run_report(run.events)
    assert report["recoveries"] == []
    assert report["exit"] == {"code": 3, "reason": "2 nodes are missing", "checkpoint": "checkpoints/step-00000002"}


def test_departure_is_measured_like_a_join() -> None:
    run = started()
    run.generation(210, 2, "leave", 2, [0, 2])
    run.installed(230, 250)
    run.step(350, 3)
    (departure,) = build_run_report(run.events)["departures"]
    assert (departure["nodes"], departure["lost_steps"], departure["pause_ms"]) == ([1], 0, 50.0)


def test_nodes_that_join_and_leave_at_one_boundary_are_a_join_and_a_departure() -> None:
    run = started()
    run.generation(210, 2, "join", 2, [0, 2, 3])
    run.installed(230, 250)
    run.step(350, 3)
    report = build_run_report(run.events)
    assert [change["nodes"] for change in report["joins"]] == [[3]]
    assert [change["nodes"] for change in report["departures"]] == [[1]]


def test_boundary_after_which_all_are_still_there_is_neither_join_nor_departure() -> None:
    run = started()
    run.generation(210, 2, "join", 2, [0, 1, 2])  # the joiner was lost on the way
    run.installed(230, 250)
    run.step(350, 3)
    report = build_run_report(run.events)
    assert (report["joins"], report["departures"]) == ([], [])


def test_report_counts_skipped_steps_and_is_json() -> None:
    run = started()
    for step, loss in enumerate((4.0, float("nan"), 3.0, float("inf")), start=1):
        run.step(100 * step, step, loss=loss)
    report = build_run_report(run.events)
    assert (report["steps"], report["skipped_steps"], report["final_loss"]) == (4, 2, None)
    json.dumps(report, allow_nan=False)


def test_report_of_no_events_says_the_run_was_cut_off() -> None:
    report = build_run_report([])
    assert (report["steps"], report["final_loss"], report["throughput_samples_per_s"]) == (0, None, None)
    assert report["exit"] == {"code": None, "reason": "the run was cut off", "checkpoint": None}


def test_read_events_leaves_out_a_last_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "note"}\n{"kind": "st')
    assert read_events(path) == [{"kind": "note"}]


def test_read_events_refuses_a_broken_line_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind"\n{"kind": "note"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*events.jsonl must be a JSON object, got b'\{\"kind\"'"):
        read_events(path)


# ---------------------------------------------------------------- two runs


def write_run(folder: Path, weight: list[float], losses: tuple[float, ...] = (4.0, 2.0), slot: float = 0.0) -> Path:
    """A run folder with an events.jsonl and a final checkpoint of one state."""
    run = Run(num_steps=2)
    for step, loss in enumerate(losses, start=1):
        run.step(100 * step, step, loss=loss)
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run.events))
    tensors = {"weight": np.array(weight), "bias": np.zeros(2), "optimizer/exp_avg": np.array([slot])}
    save_file(tensors, checkpoint / "head.safetensors")
    num_bytes = (checkpoint / "head.safetensors").stat().st_size
    saved = {"llm.head": (SavedState(file="head.safetensors", num_bytes=num_bytes, sha256=""),)}
    write_manifest(checkpoint, Manifest(step=2, recipe=make_job().recipe(), states=saved))
    return folder


def test_compare_runs_finds_the_largest_differences_and_ignores_optimizer_slots(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0, -8.25], losses=(4.0, 2.5), slot=5.0)
    reference = write_run(tmp_path / "reference", [1.0, -8.0])
    assert compare_runs(run, reference) == {
        "max_param_abs_diff": 0.25,
        "max_param_rel_diff": 0.25 / 8.0,
        "max_loss_abs_diff": 0.5,
        "same_steps_and_samples": True,
    }


def test_compare_runs_measures_each_tensor_against_itself(tmp_path: Path) -> None:
    run, reference = write_run(tmp_path / "run", [8.0]), write_run(tmp_path / "reference", [8.0])
    for folder, value in ((run, 1e-13), (reference, 2e-13)):
        path = folder / "checkpoints" / "step-00000002" / "head.safetensors"
        save_file({"weight": np.array([8.0]), "bias": np.array([value])}, path)
    assert compare_runs(run, reference)["max_param_rel_diff"] == pytest.approx(0.5)


def test_compare_runs_notices_a_step_that_one_run_lacks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0], losses=(4.0,))
    reference = write_run(tmp_path / "reference", [1.0])
    assert compare_runs(run, reference)["same_steps_and_samples"] is False


def test_compare_runs_leaves_out_losses_that_are_no_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0], losses=(4.0, float("nan")))
    reference = write_run(tmp_path / "reference", [1.0], losses=(4.5, float("nan")))
    compared = compare_runs(run, reference)
    assert (compared["max_loss_abs_diff"], compared["same_steps_and_samples"]) == (0.5, True)


def test_compare_runs_notices_a_step_that_only_one_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0], losses=(4.0, float("nan")))
    compared = compare_runs(run, write_run(tmp_path / "reference", [1.0]))
    assert (compared["max_loss_abs_diff"], compared["same_steps_and_samples"]) == (0.0, False)


def test_compare_runs_does_not_take_nan_for_equal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0, float("nan")])
    reference = write_run(tmp_path / "reference", [1.0, 2.0])
    assert not compare_runs(run, reference)["max_param_abs_diff"] <= 1e-9


def test_compare_runs_reads_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch_file

    run = write_run(tmp_path / "run", [1.0])
    reference = write_run(tmp_path / "reference", [1.0])
    for folder, value in ((run, 1.5), (reference, -2.0)):
        path = folder / "checkpoints" / "step-00000002" / "head.safetensors"
        save_torch_file({"weight": torch.tensor([value], dtype=torch.bfloat16)}, path)
    assert compare_runs(run, reference)["max_param_abs_diff"] == 3.5


def test_compare_runs_names_what_only_one_checkpoint_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0])
    reference = write_run(tmp_path / "reference", [1.0])
    path = reference / "checkpoints" / "step-00000002" / "head.safetensors"
    save_file({"weight": np.array([1.0])}, path)
    with pytest.raises(CheckpointError, match=r"must hold the same states and tensors, got \['bias'\] in one only"):
        compare_runs(run, reference)


def test_write_report_writes_what_it_returns(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1.0])
    reference = write_run(tmp_path / "reference", [1.0])
    report = write_report(run, reference)
    assert report["max_param_abs_diff"] == 0.0
    assert json.loads((run / "report.json").read_text()) == report


def test_failures_that_were_wanted_and_never_caused_are_listed() -> None:
    run = failure_and_join()
    assert build_run_report(run.events)["not_injected"] == []
    run.not_injected(9000, 7, step=12)
    assert build_run_report(run.events)["not_injected"] == [
        {"node": 7, "phase": None, "step": 12, "worker_only": False, "worker": None}
    ]


@pytest.mark.parametrize(("worker_only", "worker"), [(False, None), (True, 0)])
def test_records_of_versions_that_killed_first_workers_only_are_read(worker_only: bool, worker: int | None) -> None:
    run = failure_and_join()
    run.add(9000, "not_injected", node=7, phase=None, step=12, worker_only=worker_only)
    assert build_run_report(run.events)["not_injected"] == [
        {"node": 7, "phase": None, "step": 12, "worker_only": worker_only, "worker": worker}
    ]
