"""A joiner whose run folder is another than the others' is found out at the first checkpoint, and named."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from resilient.state.manifest import MANIFEST
from tests.integration.harness import command, started

NODES = 4
JOINER = NODES


def can_mount() -> bool:
    """Return whether this user may have file systems of its own."""
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs mount namespaces")
def test_joiner_that_writes_elsewhere_is_named_and_no_checkpoint_counts_without_its_files(tmp_path: Path) -> None:
    gate, directory = tmp_path / "gate", tmp_path / "run"
    arguments = ("--checkpoint-every", 8, "--hold-in", 6, "--gate", gate, "--change-after", 6)
    with started(directory, *arguments, nodes=NODES) as job:
        job.wait_for_step(5)
        gate.touch()
        access = json.loads((directory / "job.json").read_text())
        join = shlex.join(command("agent", "--join", access["address"]))
        elsewhere = f"mount -t tmpfs none {shlex.quote(str(directory))} && exec {join}"
        environment = {**os.environ, "RESILIENT_TOKEN": access["token"]}
        agent = subprocess.Popen(["unshare", "-rm", "sh", "-c", elsewhere], env=environment, start_new_session=True)
        try:
            run = job.wait()
            agent.wait(60)
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert JOINER in run.generations[-1]["nodes"]
    lacking = r"layer\.\d+\.[0-9a-f]{12}\.safetensors must have \d+ bytes, got no such file; have all nodes write to "
    (missed,) = run.of_kind("checkpoint_failed")
    assert (missed["step"], missed["node"], missed["newest"]) == (8, JOINER, None)
    folder = directory / "checkpoints" / "step-00000008"
    assert re.fullmatch(rf"{folder}/{lacking}the same folder, at the same path \(node {JOINER}\)", missed["error"])
    assert max(run.losses) == 12, "the job goes on without the checkpoint"
    last = directory / "checkpoints" / "step-00000012"
    assert run.exit_code == 1
    assert re.match(rf"{last}/{lacking}the same folder, at the same path", run.reason), run.reason
    assert not list(directory.glob(f"checkpoints/*/{MANIFEST}"))
