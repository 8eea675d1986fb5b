"""The last line of a job that was interrupted is the whole command that goes on, however narrow the terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import CHAIN, Run, command, resume_command, wait_for_event

NODES = 4
STEP = 3


class Reader(threading.Thread):
    """Reads all that comes out at one end of a pipe or a terminal."""

    def __init__(self, end: int) -> None:
        super().__init__(daemon=True)
        self._end = end
        self._parts: list[bytes] = []
        self.start()

    def run(self) -> None:
        try:
            while part := os.read(self._end, 1 << 16):
                self._parts.append(part)
        except OSError:  # nobody writes to the terminal any more
            pass

    def lines(self) -> list[str]:
        """Return what was written, when all is, without what only moves and colours."""
        self.join()
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(self._parts).decode())
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize(
    ("make_ends", "columns"), [(os.openpty, "40"), (os.openpty, "80"), (os.pipe, "40")], ids=["40", "80", "piped"]
)
def test_last_line_is_the_command_that_goes_on(
    make_ends: Callable[[], tuple[int, int]], columns: str, tmp_path: Path
) -> None:
    reading, writing = make_ends()
    reader = Reader(reading)
    directory = tmp_path / "run"
    line = command("run", "--nodes", NODES, "--run-dir", directory, "--trace-steps", 1, CHAIN, "--change-after", STEP)
    job = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        env={**os.environ, "COLUMNS": columns, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(writing)
    try:
        wait_for_event(directory, job, lambda event: event["kind"] == "step" and event["step"] == STEP - 1)
        job.send_signal(signal.SIGINT)
        run = Run(directory, job.wait(100))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    shown = reader.lines()
    os.close(reading)
    assert any(f"trace in {directory}/trace.json" in each for each in shown)
    assert shown[-1] == f"stopped with exit code 130: {run.reason}"
    assert resume_command(shown[-1])[-3:] == [str(CHAIN), "--change-after", str(STEP)]
