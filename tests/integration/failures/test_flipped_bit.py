"""A bit of a layer's state flips in a node's memory: most copies heal it, and of two the job stops by name."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from resilient.state.manifest import MANIFEST, read_manifest
from tests.integration.harness import (
    Run,
    check_equal,
    check_resumed,
    check_survivors,
    resume_command,
    run_job,
    started,
)

FLIPPING = Path(__file__).parents[1] / "jobs" / "flipping.py"
ALONE = ("--min-pipeline-nodes", "1", "--layers", "4")
"""Every node is a pipeline, and so holds every layer."""


def run_flipping(directory: Path, *arguments: str, nodes: int) -> Run:
    return run_job(directory, *ALONE, "--max-failures", str(nodes - 1), *arguments, script=FLIPPING, nodes=nodes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nothing flips."""
    run = run_flipping(tmp_path_factory.mktemp("reference"), nodes=3)
    assert run.exit_code == 0, run.reason
    assert run.of_kind("replica_dropped") == []
    return run


@pytest.mark.parametrize("part", ["parameter", "frozen", "slot"])
def test_flip_is_healed_by_the_copies_of_two_others(part: str, reference: Run, tmp_path: Path) -> None:
    flip = ("--flip-node", "1", "--flip-step", "4", "--flip-part", part)
    run = run_flipping(tmp_path, *flip, "--compare-replicas-every", "1", nodes=3)
    check_equal(run, reference)
    check_survivors(run)
    (event,) = run.of_kind("replica_dropped")
    assert {key: event[key] for key in ("node", "states", "step")} == {"node": 1, "states": ["layer.0"], "step": 3}
    assert run.report["dropped_replicas"] == [{"step": 3, "node": 1, "states": ["layer.0"]}]
    (recovery,) = run.report["recoveries"]
    assert recovery["cause"] == "copies on node 1 differed from those of most others after step 3: layer.0"
    assert (recovery["step"], recovery["lost_steps"]) == (4, 1)
    assert recovery["bytes_copied"] > 0


def test_state_of_which_two_nodes_have_a_shard_each_is_put_together(reference: Run, tmp_path: Path) -> None:
    """Each of two nodes has dropped another half of the layer when the third dies, which has all of it."""
    run = run_job(
        tmp_path,
        *ALONE,
        *("--max-failures", "1", "--flip-node", "0,1", "--flip-step", "4", "--compare-replicas-every", "1"),
        script=FLIPPING,
        nodes=3,
        workers_per_node=2,
        shard="on",
        inject=["node=2,step=4,phase=regroup"],
    )
    check_equal(run, reference)
    check_survivors(run)
    assert [(each["node"], each["states"]) for each in run.report["dropped_replicas"]] == [
        (0, ["layer.0"]),
        (1, ["layer.0"]),
    ]
    assert run.generations[-1]["nodes"] == [0, 1]
    assert run.report["recoveries"][-1]["bytes_copied"] > 0


def test_flip_is_found_when_copies_were_installed(reference: Run, tmp_path: Path) -> None:
    flip = ("--flip-node", "2", "--flip-step", "1", "--compare-replicas-every", "0")
    run = run_flipping(tmp_path, *flip, nodes=3)
    check_equal(run, reference)
    assert [event["node"] for event in run.of_kind("replica_dropped")] == [2]


def test_flip_on_one_of_two_holders_stops_the_job_before_a_damaged_state_is_saved(tmp_path: Path) -> None:
    """The flip is in step 6, after the comparison of step 4: that before the checkpoint of step 6 finds it."""
    flip = ("--flip-node", "1", "--flip-step", "6", "--compare-replicas-every", "4", "--checkpoint-every", "3")
    run = run_flipping(tmp_path, *flip, nodes=2)
    assert run.exit_code == 1
    message = (
        r"node \d: ReplicaError: all copies of a layer's state must be equal, got different ones after step 6 "
        r"\(layer\.0 on nodes 0, 1\) and no majority to tell which is right; check the memory of these nodes, and keep "
        r"three copies \(max_failures=2\) or more for most to decide \(generation 1, step 7\); resume with: "
        r"resilient run .*"
    )
    assert re.fullmatch(message, run.reason), run.reason
    words = resume_command(run.reason)
    checkpoint = run.directory / "checkpoints" / "step-00000003"
    assert words[words.index("--resume") + 1] == str(checkpoint)
    assert read_manifest(checkpoint).step == 3
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_flip_after_the_last_comparison_in_a_step_is_found_before_the_last_checkpoint(tmp_path: Path) -> None:
    run = run_flipping(tmp_path, "--flip-node", "0", "--flip-step", "12", nodes=2)
    assert run.exit_code == 1
    assert "got different ones after step 12 (layer.0 on nodes 0, 1)" in run.reason
    assert "; there is no checkpoint; start again with: resilient run " in run.reason


def run_copying(directory: Path, *arguments: str, copies: int) -> Run:
    """Run a job of one node more than there are copies, whose first two nodes are one pipeline.

    Node 0 dies in step 3: node 1 gets a copy of the first layer, the largest one, from node 2, the first to hold it.
    """
    pipelines = ("--batch", str(4 * copies), "--compare-replicas-every", "0", "--max-failures", str(copies - 1))
    failure = ["node=0,step=3,phase=prepare"] if arguments else []
    return run_job(directory, *ALONE, *pipelines, *arguments, script=FLIPPING, nodes=copies + 1, inject=failure)


FLIP_OF_A_SOURCE = ("--flip-node", "2", "--flip-step", "3", "--flip-bit", "52")
"""After the last comparison, before it is copied."""


def test_damaged_copy_and_the_one_made_of_it_are_healed_by_two_witnesses(tmp_path: Path) -> None:
    reference = run_copying(tmp_path / "reference", copies=4)
    run = run_copying(tmp_path / "run", *FLIP_OF_A_SOURCE, copies=4)
    check_equal(run, reference)
    check_survivors(run)
    dropped = sorted((event["node"], event["states"], event["step"]) for event in run.of_kind("replica_dropped"))
    assert dropped == [(1, ["layer.0"], 2), (2, ["layer.0"], 2)]


def test_damaged_copy_and_the_one_made_of_it_do_not_outvote_the_last_witness(tmp_path: Path) -> None:
    run = run_copying(tmp_path, *FLIP_OF_A_SOURCE, copies=3)
    assert run.exit_code == 1, run.reason
    message = (
        r"node \d: ReplicaError: all copies of a layer's state must be equal, got different ones after step 2 "
        r"\(layer\.0 on nodes 1 \(made of node 2's\), 2, 3\) and no majority to tell which is right; check the memory "
        r"of these nodes, and keep three copies \(max_failures=2\) or more for most to decide \(generation 2, step "
        r"3\); there is no checkpoint; start again with: resilient run .*"
    )
    assert re.fullmatch(message, run.reason), run.reason


def interrupted(directory: Path, *, nodes: int) -> Run:
    """Return a job that is interrupted in step 5, in which what node 0 writes of a checkpoint is damaged."""
    copies = ("--max-failures", str(nodes - 1), "--checkpoint-every", "3")
    flip = ("--flip-node", "0", "--flip-step", "5", "--flip-part", "slot", "--flip-bit", "52")
    with started(directory, *ALONE, *copies, *flip, "--change-after", 5, script=FLIPPING, nodes=nodes) as job:
        job.wait_for_step(4)
        job.processes.take_in_children(job.popen.pid)
        job.popen.send_signal(signal.SIGTERM)
        return job.wait()


def test_checkpoint_of_an_interruption_is_written_of_the_copy_that_two_others_agree_with(
    reference: Run, tmp_path: Path
) -> None:
    run = interrupted(tmp_path / "run", nodes=3)
    assert run.exit_code == 130
    assert run.report["dropped_replicas"] == [{"step": 5, "node": 0, "states": ["layer.0"]}]
    words = resume_command(run.reason)
    assert words[words.index("--resume") + 1] == str(run.directory / "checkpoints" / "step-00000005")
    check_resumed(run, words, reference, tmp_path / "resumed")


def test_interruption_with_two_copies_that_differ_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    run = interrupted(tmp_path, nodes=2)
    assert run.exit_code == 130
    checkpoints = run.directory / "checkpoints"
    message = (
        "interrupted (SIGTERM), and there is no checkpoint of step 5: all copies of a layer's state must be equal, got "
        "different ones after step 5 (layer.0 on nodes 0, 1) and no majority to tell which is right; check the memory "
        "of these nodes, and keep three copies (max_failures=2) or more for most to decide; resume with: resilient run "
        f"--nodes 2 --resume {checkpoints / 'step-00000003'} "
    )
    assert run.reason.startswith(message), run.reason
    assert [folder.name for folder in checkpoints.iterdir() if (folder / MANIFEST).exists()] == ["step-00000003"]
