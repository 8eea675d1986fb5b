"""Whole launches with real processes: how they end, and that nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilient.agent.launch import LaunchOptions, launch

_WAITING = """
import threading
import pathlib, os
pathlib.Path(os.environ["RESILIENT_RUN_DIR"], "up-" + os.environ["RANK"]).touch()
threading.Event().wait()
"""


def script(folder: Path, source: str) -> str:
    path = folder / "script.py"
    path.write_text(source)
    return str(path)


def test_exception_in_the_script_ends_the_launch_with_its_message(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    options = LaunchOptions(
        script=script(tmp_path, "import sys\nraise ValueError(sys.argv[1:])"),
        arguments=("--lr", "3"),
        num_nodes=2,
        run_directory=str(tmp_path / "run"),
    )
    assert launch(options, events.append) == 1
    stopped = events[-1]
    assert (stopped["kind"], stopped["exit_code"]) == ("stopped", 1)
    assert "ValueError: ['--lr', '3']" in stopped["reason"]
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").glob("node-*/worker-0.log")]
    assert any("Traceback" in log for log in logs)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_outlives_the_launcher(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", "from resilient.cli import app; app()", "run", "--nodes", "2", "--plain"]
    command += ["--run-dir", str(run), script(tmp_path, _WAITING)]
    launcher = psutil.Popen(command, stdout=subprocess.DEVNULL)
    while not all((run / f"up-{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
    family = launcher.children(recursive=True)
    assert len(family) == 7  # the zygote; two agents, each with a spawner and a worker
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) == exit_code
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"script must be a file, got 'nothing\.py'"):
        LaunchOptions(script="nothing.py", run_directory=str(tmp_path))


def test_wildcard_host_is_refused_because_workers_could_not_be_reached_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ValueError, match=r"host must be the address .* got '0\.0\.0\.0'; give one of this machine's"):
        LaunchOptions(script=str(script), run_directory=str(tmp_path), host="0.0.0.0")
