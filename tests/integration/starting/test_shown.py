"""What workers print reaches the screen of whoever has started them, as far as is asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.integration.harness import CHAIN, command, started

SMALL = ("--min-pipeline-nodes", "1", "--steps", "2")

_TALKING = f"""
import os, runpy, sys
print("out " + os.environ["RANK"] + " \\x1b]0;title\\x07")
print("err " + os.environ["RANK"], file=sys.stderr)
runpy.run_path({str(CHAIN)!r}, run_name="__main__")
"""


def talking(folder: Path) -> Path:
    script = folder / "talking.py"
    script.write_text(_TALKING)
    return script


def signed(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("[node "))


def test_teed_stream_is_shown_once_with_who_wrote_it_and_logged_apart(tmp_path: Path) -> None:
    with started(tmp_path / "run", *SMALL, nodes=2, script=talking(tmp_path), options="-t 1") as job:
        run = job.wait()
    assert run.exit_code == 0, job.output
    last = "[node 0 worker 0]: trained 2 steps"
    out = [f"[node {node} worker 0]: out {node} \\x1b]0;title\\x07" for node in range(2)]
    assert signed(job.output) == [out[0], last, out[1]]
    assert job.output.count("trained 2 steps") == 1, "the main worker's lines are not shown a second time"
    assert [event["text"] for event in run.of_kind("output") if event["worker"]] == ["trained 2 steps"]
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs" / "node-1").glob("*.log")}
    assert logs["worker-0.stdout.log"] == "out 1 \x1b]0;title\x07\n"
    assert "err 1\n" in logs["worker-0.log"]
    assert "out" not in logs["worker-0.log"].split()
    everything = subprocess.run(command("logs", "--run", tmp_path / "run"), capture_output=True, text=True, check=True)
    assert {"[node 1 worker 0]: err 1", *out, last} <= set(everything.stdout.splitlines())


def test_each_machine_shows_its_own_workers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret of this test\n")
    options = f"--no-local-nodes --token-file {tmp_path / 'token'} --tee 3"
    words = ("-r 0", "--tee 0:2", "--tee 3 --local-ranks-filter 1")
    agents: list[subprocess.Popen[str]] = []
    with started(tmp_path / "run", *SMALL, nodes=3, script=talking(tmp_path), options=options) as job:
        job.wait_for(lambda event: event["kind"] == "waiting")
        address = json.loads((job.directory / "job.json").read_text())["address"]
        line = command("agent", "--join", address, "--token-file", tmp_path / "token")
        try:
            for node, each in enumerate(words):
                agents.append(subprocess.Popen([*line, *each.split()], stdout=subprocess.PIPE, text=True))
                job.wait_for(lambda event, node=node: event["kind"] == "node_connected" and event["node"] == node)
            run = job.wait()
            shown = [each.communicate(timeout=60)[0] for each in agents]
        finally:
            for each in agents:
                each.kill()
    assert run.exit_code == 0, job.output
    assert signed(job.output) == []
    assert "trained 2 steps" in job.output, "what the main worker prints is told to whoever has started the job"
    both = ["[node 0 worker 0]: err 0", "[node 0 worker 0]: out 0 \\x1b]0;title\\x07"]
    assert [each for each in signed(shown[0]) if " out " in each or " err " in each] == both
    assert [each for each in signed(shown[1]) if " out " in each or " err " in each] == ["[node 1 worker 0]: err 1"]
    assert shown[2] == ""
