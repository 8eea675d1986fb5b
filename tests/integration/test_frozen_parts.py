"""Frozen parts of layers, in types of their own, survive failures, joins and resumption, to the last bit."""

from __future__ import annotations

from pathlib import Path

from safetensors import deserialize

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_parameters, final_checkpoint
from resilient.state.manifest import read_manifest
from tests.integration.harness import TOLERANCE, Event, check_equals_one_process, check_survivors, run_alone, run_job

NODES = 3
OPTIONS = ("--frozen", "--layers", "7", "--batch", "24", "--min-pipeline-nodes", "1")


def frozen_parts(checkpoint: Path) -> dict[str, tuple[str, bytes]]:
    """Return type and bytes of everything in a checkpoint that is not of the job's type."""
    return {
        f"{name}/{key}": (tensor["dtype"], bytes(tensor["data"]))
        for name, files in read_manifest(checkpoint).states.items()
        for saved in files
        for key, tensor in deserialize((checkpoint / saved.file).read_bytes())
        if tensor["dtype"] != "F64"
    }


def test_frozen_parts_keep_type_and_bits_through_a_kill_a_join_and_a_resumption(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    log = run_alone(alone, *OPTIONS, "--steps", "10")
    joined = tmp_path / "joined"

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "generation" and NODES in event["nodes"]:
            joined.touch()

    change = ("--change-after", "6", "--unless", str(joined))
    run = run_job(
        tmp_path / "run",
        *OPTIONS,
        *change,
        *("--steps", "10", "--checkpoint-every", "4"),
        nodes=NODES,
        inject=["node=1,step=3,phase=backward,worker"],
        act=act,
    )
    check_equals_one_process(run, alone, log)
    check_survivors(run)
    assert NODES in run.generations[-1]["nodes"], "the killed worker came back with nothing, and was given copies"
    found, expected = frozen_parts(final_checkpoint(run.directory)), frozen_parts(final_checkpoint(alone))
    assert found == expected
    assert {kind: sum(each == kind for each, _ in found.values()) for kind in ("BF16", "I8")} == {"BF16": 8, "I8": 2}
    assert not [name for name in found if "optimizer" in name]

    resumed = run_job(
        tmp_path / "resumed",
        *OPTIONS,
        *("--steps", "10"),
        nodes=2,
        resume=str(run.directory / "checkpoints" / "step-00000008"),
    )
    assert resumed.losses.keys() == {9, 10}
    assert compare_parameters(resumed.directory, alone)[1] <= TOLERANCE
    assert frozen_parts(final_checkpoint(resumed.directory)) == expected
