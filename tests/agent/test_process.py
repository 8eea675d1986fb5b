"""The spawner, with a real forkserver and real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from resilient.agent.process import Spawner, SpawnError, start_forkserver
from resilient.common.processes import command_for
from resilient.protocol import forkserver
from resilient.protocol.forkserver import Spawn, script_imports
from tests.processes import has_ended

LIMIT_S = 150
"""Somewhat less than a test may take: what was started is ended."""


class Forkserver:
    """A cold forkserver and what it reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.lost = asyncio.Event()

    async def __aenter__(self) -> Forkserver:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = command_for(
            "resilient.protocol.forkserver", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())
        )
        self.process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.spawner = Spawner(
            ours, on_exit=lambda pid, code: self.exits.put_nowait((pid, code)), on_lost=self.lost.set
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.spawner.close()
        await self.process.wait()

    async def start(self, source: str, *arguments: str, **env: str) -> int:
        script = self.folder / "script.py"
        script.write_text(source)
        return await self.spawner.spawn(
            Spawn(
                kind="worker",
                argv=(str(script), *arguments),
                env={**os.environ, **env},
                directory=str(self.folder),
                log=str(self.folder / "logs" / "log"),
            )
        )

    @property
    def log(self) -> str:
        return (self.folder / "logs" / "log").read_text()


def with_forkserver(folder: Path, scenario: Callable[[Forkserver], Awaitable[None]]) -> None:
    async def play() -> None:
        async with Forkserver(folder) as forkserver:
            await asyncio.wait_for(scenario(forkserver), LIMIT_S)

    asyncio.run(play())


async def ended(*processes: psutil.Process) -> None:
    while not all(map(has_ended, processes)):
        await asyncio.sleep(0.01)


async def logged(forkserver: Forkserver, text: str) -> None:
    while not (forkserver.folder / "logs" / "log").exists() or text not in forkserver.log:
        await asyncio.sleep(0.01)


def test_worker_runs_the_script_with_its_arguments_environment_and_log(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        (tmp_path / "neighbour.py").write_text("word = 'found'")
        source = "import os, sys, neighbour\nprint(__name__, sys.argv[1:], os.environ['ANSWER'], neighbour.word)"
        pid = await forkserver.start(source, "--lr", "3", ANSWER="42")
        assert await forkserver.exits.get() == (pid, 0)
        assert forkserver.log == "__main__ ['--lr', '3'] 42 found\n"

    with_forkserver(tmp_path, scenario)


@pytest.mark.parametrize(
    ("source", "exit_code"),
    [("raise SystemExit(7)", 7), ("raise SystemExit('no')", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_exit_codes_are_reported(tmp_path: Path, source: str, exit_code: int) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        pid = await forkserver.start(source)
        assert await forkserver.exits.get() == (pid, exit_code)

    with_forkserver(tmp_path, scenario)


def test_exception_leaves_an_error_file_as_torchrun_does(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        error_file = tmp_path / "error.json"
        pid = await forkserver.start("raise KeyError('x')", TORCHELASTIC_ERROR_FILE=str(error_file))
        assert await forkserver.exits.get() == (pid, 1)
        message = json.loads(error_file.read_text())["message"]
        assert message["message"] == "KeyError: 'x'"
        assert "Traceback" in message["extraInfo"]["py_callstack"]
        assert message["extraInfo"]["timestamp"].isdigit()
        assert "KeyError: 'x'" in forkserver.log

    with_forkserver(tmp_path, scenario)


DRAWS = """
import random, numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item(), *{"one", "two", "three", "four", "five"})
"""


async def run_warm(script: Path, log: str) -> str:
    """Run a script from a forkserver that is warm for it; return what it prints."""
    exits: asyncio.Queue[int] = asyncio.Queue()
    spawner = start_forkserver(
        str(script), on_exit=lambda _, code: exits.put_nowait(code), on_lost=asyncio.Event().set, outlives_us=False
    )
    try:
        path, folder = script.with_name(log), str(script.parent)
        spawn = Spawn(kind="worker", argv=(str(script),), env=dict(os.environ), directory=folder, log=str(path))
        await spawner.spawn(spawn)
        assert await asyncio.wait_for(exits.get(), LIMIT_S) == 0
        return path.read_text()
    finally:
        await spawner.close()


def test_token_of_the_job_is_not_among_what_the_kernel_tells_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process keeps the environment that the first one was started with, whatever it sets later."""
    monkeypatch.setenv("RESILIENT_TOKEN", "of-the-job")
    (tmp_path / "job.py").write_text("print(open('/proc/self/environ').read(), open('/proc/self/cmdline').read())")
    told = asyncio.run(run_warm(tmp_path / "job.py", "log"))
    assert "PYTHONHASHSEED" in told
    assert "of-the-job" not in told


def test_workers_of_all_nodes_draw_the_same_and_go_through_sets_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a forkserver of its own, where they are on machines of their own."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "job.py").write_text(DRAWS)
    first, second = (asyncio.run(run_warm(tmp_path / "job.py", name)) for name in ("first", "second"))
    assert first == second
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    assert asyncio.run(run_warm(tmp_path / "job.py", "third")) != first, "what the user says counts"


def test_killed_worker_is_reported(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        pid = await forkserver.start("import threading; threading.Event().wait()")
        forkserver.spawner.send_signal(pid, signal.SIGKILL)
        forkserver.spawner.send_signal(pid, signal.SIGKILL)
        assert await forkserver.exits.get() == (pid, -signal.SIGKILL)

    with_forkserver(tmp_path, scenario)


def test_worker_that_is_asked_shows_in_its_log_where_it_is_and_goes_on(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        gate = tmp_path / "gate"
        source = (
            "import pathlib, time\nprint('up', flush=True)\n"
            f"while not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.005)"
        )
        pid = await forkserver.start(source)
        await logged(forkserver, "up")
        forkserver.spawner.send_signal(pid, signal.SIGUSR1)
        await logged(forkserver, f'File "{tmp_path / "script.py"}", line')
        gate.touch()
        assert await forkserver.exits.get() == (pid, 0)

    with_forkserver(tmp_path, scenario)


def test_workers_die_with_the_forkserver_and_the_loss_is_noticed(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        source = "import threading; threading.Event().wait()"
        workers = [psutil.Process(await forkserver.start(source)) for _ in range(2)]
        forkserver.process.kill()
        await forkserver.lost.wait()
        await ended(*workers)
        with pytest.raises(SpawnError, match="the forkserver is gone"):
            await forkserver.start("pass")

    with_forkserver(tmp_path, scenario)


def test_oversize_request_is_refused(tmp_path: Path) -> None:
    async def scenario(forkserver: Forkserver) -> None:
        with pytest.raises(SpawnError, match="arguments and environment must fit 131072 bytes"):
            await forkserver.start("pass", "x" * (128 << 10))

    with_forkserver(tmp_path, scenario)


def test_script_imports_are_the_top_level_ones() -> None:
    source = "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\nimport c"
    assert script_imports(source) == ["a.b", "c", "d.e"]


def test_preload_imports_what_the_script_does_and_what_that_needs_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / f"only_for_preload_{name}.py").write_text("")
        monkeypatch.setitem(sys.modules, f"only_for_preload_{name}", None)  # gone again after the test
        del sys.modules[f"only_for_preload_{name}"]
    script = tmp_path / "train.py"
    script.write_text("import only_for_preload_missing\nimport only_for_preload_first\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # whose first entry becomes the script's folder
    needed = {"only_for_preload_first": "only_for_preload_second", "only_for_preload_other": "only_for_preload_third"}
    monkeypatch.setattr(forkserver, "PRELOADED", ())
    monkeypatch.setattr(forkserver, "PRELOADED_WITH", needed)
    forkserver.preload(str(script))
    imported = {name for name in sys.modules if name.startswith("only_for_preload")}
    assert imported == {"only_for_preload_first", "only_for_preload_second"}
