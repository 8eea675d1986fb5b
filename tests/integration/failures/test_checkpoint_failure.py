"""Checkpoints that choose their steps, and a disk that takes none: those on the way are missed and told, training goes
on; the last one ends the job.

A file in the place of the checkpoints' folder stands for the disk, for whoever runs the tests may write everywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.state.manifest import MANIFEST, read_manifest
from resilient.templates.common.checkpoint_interval import checkpoint_interval_s
from resilient.testing import fail_at
from tests.integration.harness import Event, check_recovered, run_job

NODES = 4


def test_job_goes_on_without_a_checkpoint_and_writes_the_next(tmp_path: Path) -> None:
    directory, gate = tmp_path / "run", tmp_path / "gate"
    checkpoints = directory / "checkpoints"
    directory.mkdir()
    checkpoints.write_text("in the way")

    def make_room(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "checkpoint_failed" and not gate.exists():
            checkpoints.unlink()
            gate.touch()

    arguments = ("--steps", "6", "--checkpoint-every", "2")
    run = run_job(directory, *arguments, "--hold-in", "3", "--gate", str(gate), nodes=NODES, act=make_room)
    assert run.exit_code == 0, run.reason
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
    missed = run.of_kind("checkpoint_failed")
    folder = checkpoints / "step-00000002"
    for event in missed:
        assert (event["step"], event["newest"]) == (2, None)
        assert event["error"].startswith(f"{folder} cannot be written ([Errno 20] Not a directory: ")
    assert {event["node"] for event in missed} <= set(range(NODES))
    assert not (folder / MANIFEST).exists()
    assert [(event["step"], read_manifest(event["path"]).step) for event in run.of_kind("checkpoint")] == [
        (4, 4),
        (6, 6),
    ]
    assert not run.of_kind("detected")


def test_checkpoints_are_chosen_by_what_one_costs_also_after_a_failure(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", "--steps", "10", nodes=NODES + 1)
    arguments = ("--steps", "10", "--checkpoint-every", "auto")
    run = run_job(tmp_path / "run", *arguments, nodes=NODES + 1, inject=[fail_at(node=2, step=6, phase="forward")])
    check_recovered(run, reference)
    first, second = run.generations
    assert first["checkpoint_pace"] == {"risk_s": 36_000.0, "cost_s": None}
    written = [event["step"] for event in run.of_kind("checkpoint")]
    assert (written[0], written[-1]) == (3, 10), "as soon as it is known how long a step takes, to see what one costs"
    assert second["checkpoint_pace"]["cost_s"] is not None
    assert second["checkpoint_pace"]["risk_s"] == pytest.approx(3600 / 2 * 11, rel=0.1)
    chosen = run.report["checkpoints"]
    assert chosen["written"] == len(written)
    assert chosen["interval_s"] == checkpoint_interval_s(chosen["cost_s"], chosen["risk_s"])


def test_last_checkpoint_that_cannot_be_written_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "checkpoints").write_text("in the way")
    run = run_job(directory, "--steps", "4", "--checkpoint-every", "2", "--comm-timeout-s", "5", nodes=NODES)
    assert run.exit_code == 1
    assert {event["step"] for event in run.of_kind("checkpoint_failed")} == {2, 4}
    assert max(run.losses) == 4
    assert "CheckpointError: " in run.reason
    assert (
        f"{directory / 'checkpoints' / 'step-00000004'} cannot be written ([Errno 20] Not a directory: " in run.reason
    )
    assert "; there is no checkpoint; start again with: resilient run --nodes 4 " in run.reason
    assert run.of_kind("checkpoint") == []


@pytest.mark.parametrize(
    ("inject", "step", "exit_code"),
    [((), 6, 0), (("node=1,step=5,phase=backward",), 4, 3)],
    ids=["at the end", "before an early stop"],
)
def test_manifest_is_tried_again_until_it_can_be_written(
    inject: tuple[str, ...], step: int, exit_code: int, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    (checkpoint / MANIFEST).mkdir(parents=True)

    def make_room(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "checkpoint_failed":
            (checkpoint / MANIFEST).rmdir()

    run = run_job(tmp_path / "run", "--steps", "6", nodes=NODES, inject=inject, act=make_room)
    assert run.exit_code == exit_code, run.reason
    (missed,) = run.of_kind("checkpoint_failed")
    assert (missed["step"], missed["node"], missed["newest"]) == (step, None, None)
    assert missed["error"].startswith(f"{checkpoint} cannot be written ([Errno 21] Is a directory: ")
    assert [event["path"] for event in run.of_kind("checkpoint")] == [str(checkpoint)]
    assert read_manifest(checkpoint).step == step
    if exit_code:
        assert run.reason.startswith("3 nodes are live ([0, 2, 3]), 4 are needed; resume with: resilient run ")
        assert f" --resume {checkpoint} " in run.reason
