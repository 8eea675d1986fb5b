"""Fewer nodes than redundancy takes, states nobody holds: the job stops with what it has and says how to go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_parameters
from resilient.state.manifest import read_manifest
from tests.integration.harness import Event, Run, check_equal, check_recovered, check_resumed, resume_command, run_job

NODES = 4
STEP = 5
UNPROTECTED = ("--max-failures", "0", "--min-pipeline-nodes", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


@pytest.mark.parametrize("phase", ["backward", "commit"])
def test_too_few_nodes_save_and_resume(phase: str, reference: Run, tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", nodes=NODES, inject=[f"node=1,step={STEP},phase={phase}"])
    assert run.exit_code == 3
    step = max(run.losses)
    assert step == STEP - 1 or (step == STEP and phase == "commit"), "whether another one has passed the barrier"
    checkpoint = run.directory / "checkpoints" / f"step-{step:08d}"
    assert run.reason.startswith("3 nodes are live ([0, 2, 3]), 4 are needed; resume with: resilient run --nodes 4 ")
    assert run.report["exit"]["checkpoint"] == str(checkpoint)
    assert read_manifest(checkpoint).step == step
    words = resume_command(run.reason)
    assert words[words.index("--resume") + 1] == str(checkpoint)
    check_resumed(run, words, reference, tmp_path / "resumed")


def test_worker_that_is_killed_and_comes_back_is_waited_for(reference: Run, tmp_path: Path) -> None:
    """No node can be spared; its agent starts another worker, which begins when the others are waiting."""
    inject, begin = [f"node=1,step={STEP},phase=backward,worker"], tmp_path / "begin"

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "too_few":
            begin.touch()

    late = ("--late-node", str(NODES), "--begin", str(begin))
    run = run_job(tmp_path / "run", *late, nodes=NODES, inject=inject, wait_for_nodes_s=60, act=act)
    check_recovered(run, reference)
    (too_few,) = run.of_kind("too_few")
    assert (too_few["num_missing"], too_few["wait_s"]) == (1, 60)
    assert run.generations[-1]["nodes"] == [0, 2, 3, NODES]


def test_second_node_dies_while_the_last_checkpoint_is_agreed_on(reference: Run, tmp_path: Path) -> None:
    """Two of four nodes, one of each pipeline: whatever the two left hold is enough, as redundancy is complete."""
    pipelines = [pipeline["nodes"] for pipeline in reference.generations[0]["pipelines"]]
    inject = [f"node={pipelines[0][0]},step={STEP},phase=backward", f"node={pipelines[1][1]},step={STEP},phase=reduce"]
    run = run_job(tmp_path / "run", nodes=NODES, inject=inject)
    assert run.exit_code == 3
    check_resumed(run, resume_command(run.reason), reference, tmp_path / "resumed")


def test_failed_node_below_the_minimum_before_any_step_starts_again(reference: Run, tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", nodes=NODES, inject=["node=1,step=1,phase=regroup"])
    assert run.exit_code == 3
    assert "3 nodes are live" in run.reason
    assert "; start again with: resilient run --nodes 4 " in run.reason


def test_job_with_too_few_nodes_from_the_start_says_how_many_it_needs(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", nodes=3)
    assert run.exit_code == 3
    assert run.reason.startswith(
        "3 nodes are live ([0, 1, 2]), 4 are needed, for 2 pipelines of 2 nodes (max_failures=1, min_pipeline_nodes=2);"
        " start again with: resilient run --nodes 4"
    )
    assert run.losses == {}


def test_job_resumes_from_a_periodic_checkpoint(reference: Run, tmp_path: Path) -> None:
    first = run_job(tmp_path / "first", "--checkpoint-every", "4", nodes=NODES)
    check_equal(first, reference)
    assert [event["step"] for event in first.of_kind("checkpoint")] == [4, 8, 12]
    second = run_job(
        tmp_path / "second",
        nodes=NODES + 1,
        resume=str(first.directory / "checkpoints" / "step-00000004"),
        inject=["node=1,step=7,phase=backward"],
    )
    assert second.exit_code == 0, second.reason
    assert second.generations[0]["cause"] == "resume"
    assert min(second.losses) == 5
    _, relative = compare_parameters(second.directory, reference.directory)
    assert relative <= 1e-9


def test_failure_while_a_checkpoint_is_written_leaves_no_broken_one(reference: Run, tmp_path: Path) -> None:
    """Node 2 dies as step 9 begins: others may still be writing step 8."""
    run = run_job(tmp_path / "run", "--checkpoint-every", "2", nodes=NODES + 1, inject=["node=2,step=9"])
    check_recovered(run, reference)
    for event in run.of_kind("checkpoint"):
        assert read_manifest(event["path"]).step == event["step"]


def test_states_nobody_holds_come_from_the_last_checkpoint(reference: Run, tmp_path: Path) -> None:
    """One pipeline on three nodes that need two: the states of a lost stage are nowhere else."""
    gate = tmp_path / "gate"
    arguments = (*UNPROTECTED, "--batch", "28", "--microbatch", "28", "--checkpoint-every", "3")

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "checkpoint":  # nobody knows of a part that is written until its node has said so
            gate.touch()

    held = ("--hold-in", "5", "--gate", str(gate))
    run = run_job(tmp_path / "run", *arguments, *held, nodes=3, inject=["node=1,step=5,phase=backward"], act=act)
    check_equal(run, reference)
    (recovery,) = run.report["recoveries"]
    assert (run.generations[-1]["version"], recovery["roll_forward"]) == (3, False)
    assert any("nobody holds" in event["text"] for event in run.of_kind("output"))


def test_states_nobody_holds_and_no_checkpoint_end_the_job(tmp_path: Path) -> None:
    arguments = (*UNPROTECTED, "--batch", "28", "--microbatch", "28")
    run = run_job(tmp_path / "run", *arguments, nodes=3, inject=["node=1,step=5,phase=backward"])
    assert run.exit_code == 4
    assert re.search(r"no live node holds layer\.\d.* and there is no checkpoint; start the job again", run.reason)


def test_checkpoint_of_another_job_is_refused_by_what_differs(reference: Run, tmp_path: Path) -> None:
    checkpoint = reference.directory / "checkpoints" / "step-00000012"
    run = run_job(tmp_path, "--steps", "20", "--layers", "6", "--batch", "32", nodes=NODES, resume=str(checkpoint))
    assert run.exit_code == 1
    assert run.losses == {}
    assert re.fullmatch(
        rf"resume must be a checkpoint of this job, got {checkpoint}, written with model \w+, now \w+; num_layers "
        r"10, now 6; num_parameters \d+, now \d+; global_batch 28, now 32; use the script and the arguments that wrote "
        "it, or begin without a checkpoint",
        run.reason,
    )


def test_damaged_checkpoint_is_refused_and_the_newest_sound_one_named(tmp_path: Path) -> None:
    first = run_job(tmp_path / "first", "--steps", "4", "--checkpoint-every", "2", nodes=NODES)
    sound, damaged = (first.directory / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    (victim,) = damaged.glob("layer.3.*.safetensors")
    data = bytearray(victim.read_bytes())
    data[-5] ^= 0x10
    victim.write_bytes(data)
    run = run_job(tmp_path / "run", nodes=NODES, resume=str(damaged))
    assert run.exit_code == 1
    assert f"{victim} is damaged (its SHA-256 differs); use {sound}" in run.reason
    words = resume_command(run.reason)
    assert words[words.index("--resume") + 1] == str(sound)
    resumed = run_job(tmp_path / "resumed", "--steps", "4", nodes=NODES, resume=str(first.directory))
    assert (resumed.exit_code, list(resumed.losses)) == (0, [3, 4])
