"""A job that stands still, with all its workers alive, ends; the message names the file that shows where they hang."""

from __future__ import annotations

import re
from pathlib import Path

from resilient.state.manifest import read_manifest
from tests.integration.harness import resume_command, run_job


def test_data_set_that_blocks_for_ever_ends_the_job_which_can_be_resumed(tmp_path: Path) -> None:
    alone = ("--max-failures", "0", "--min-pipeline-nodes", "1", "--checkpoint-every", "1", "--comm-timeout-s", "0.7")
    run = run_job(tmp_path / "run", *alone, "--hold-in", "2", "--gate", str(tmp_path / "never"), nodes=1)
    assert run.exit_code == 3
    log = run.directory / "logs" / "node-0" / "worker-0.log"
    assert re.match(
        r"all nodes are lost, the last one \(0\) because of: no step done for \d+ s, no report within \d+ s; where it "
        rf"hangs is at the end of {re.escape(str(log))}; resume with: ",
        run.reason,
    )
    words = resume_command(run.reason)
    assert read_manifest(words[words.index("--resume") + 1]).step == 1 == max(run.losses)
    assert log.exists()  # a worker that does not even run in its last half second shows no stack
