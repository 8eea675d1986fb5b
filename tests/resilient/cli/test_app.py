"""Reading the command line."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import parse_headers
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from resilient.agent.launch import Launcher
from resilient.cli import run as cli
from resilient.cli.app import app
from resilient.cli.run import parse_injection
from resilient.protocol.messages import Injection


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("node=2", Injection(node=2)),
        ("node=2, step=15, phase=backward", Injection(node=2, at_step=15, at_phase="backward")),
        ("node=0,phase=copy,worker", Injection(node=0, at_phase="copy", worker_only=True)),
    ],
)
def test_injections_are_read(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection


@pytest.mark.parametrize("text", ["", "step=3", "node=x", "node=1,phase=lunch", "node=1,stop=3"])
def test_bad_injection_shows_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r'^inject must look like "node=2,step=15,phase=backward\[,worker\]", got'):
        parse_injection(text)


def test_resuming_from_no_checkpoint_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    arguments = ["run", "--resume", str(tmp_path), "--run-dir", str(tmp_path / "run"), str(tmp_path / "s.py")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"error: {tmp_path} must be a finished checkpoint, ")


@pytest.mark.parametrize("what", ["report", "trace"])
@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("damaged"), KeyboardInterrupt()])
def test_report_or_trace_that_cannot_be_written_leaves_the_exit_code_alone(
    error: BaseException, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").touch()
    (tmp_path / "events.jsonl").touch()
    monkeypatch.setattr(Launcher, "run", lambda _: 130)
    for each in ("report", "trace"):
        monkeypatch.setattr(cli, f"_write_{each}", Mock(side_effect=error if each == what else None))
    result = CliRunner().invoke(app, ["run", "--trace-steps", "1", "--run-dir", str(tmp_path), str(tmp_path / "s.py")])
    assert result.exit_code == 130
    message = f"warning: the job has ended, but there is no whole {what} in {tmp_path}: {error!r}\n"
    assert result.output == message


@pytest.mark.parametrize(("value", "validates"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_membership_is_checked_where_the_environment_asks_for_it(
    value: str | None, validates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").touch()
    asked: list[bool] = []

    def run(self: Launcher) -> int:
        asked.append(self._options.validate)
        return 0

    monkeypatch.setattr(Launcher, "run", run)
    if value is None:
        monkeypatch.delenv("RESILIENT_VALIDATE", raising=False)
    else:
        monkeypatch.setenv("RESILIENT_VALIDATE", value)
    result = CliRunner().invoke(app, ["run", "--run-dir", str(tmp_path / "run"), str(tmp_path / "s.py")])
    assert (result.exit_code, asked) == (0, [validates])


def test_injecting_into_a_run_that_is_over_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "over"
    folder.mkdir(parents=True)
    with socket.socket() as silent:  # its port is taken, and nobody listens
        silent.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        (folder / "job.json").write_text(json.dumps({"address": address, "token": "t", "pid": 1}))
        newest = CliRunner().invoke(app, ["inject", "kill", "--node", "1"])
        named = CliRunner().invoke(app, ["inject", "leave", "--node", "1", "--run", str(folder)])
    begin, end = f" does not answer at {address} (", "); if another is running, name its folder with --run\n"
    for result, run in ((newest, "the newest run in ./runs"), (named, folder)):
        assert result.exit_code == 2
        assert result.output.startswith(f"error: the job of {run}{begin}")
        assert result.output.endswith(end)


def test_run_is_asked_without_the_proxy_of_the_web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> bytes:
        with listener.accept()[0] as connection, connection.makefile("rb") as request:
            asked = request.readline()
            request.read(int(parse_headers(request)["Content-Length"]))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return asked

    monkeypatch.delenv("no_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent, ThreadPoolExecutor(1) as pool:
        listener.settimeout(100)  # nobody comes if a proxy is asked
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:{1}".format(*silent.getsockname()))
        address = "127.0.0.1:{1}".format(*listener.getsockname())
        (tmp_path / "job.json").write_text(json.dumps({"address": address, "token": "t"}))
        asked = pool.submit(answer)
        ended = CliRunner().invoke(app, ["inject", "leave", "--node", "1", "--run", str(tmp_path)])
        assert (ended.exit_code, ended.output) == (0, "")
        assert asked.result() == b"POST /leave HTTP/1.1\r\n"


@pytest.mark.parametrize("what", ["kill", "leave"])
def test_injecting_without_a_run_is_explained(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["inject", what, "--node", "1"])
    assert result.exit_code == 2
    assert "no run in ./runs" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "head"], "--join must be HOST:PORT, got 'head'; take the address from the run's job.json"),
        (
            ["--join", "http://h:1"],
            "--join must be HOST:PORT, got 'http://h:1'; take the address from the run's job.json",
        ),
        (["--join", "h:1", "--heartbeat-s", "0"], "--heartbeat-s must be > 0, got 0; leave it out for the default"),
    ],
)
def test_agent_that_could_never_join_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["agent", "--token", "t", *arguments])
    assert (result.exit_code, result.output) == (2, f"error: {message}\n")


def test_folder_of_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{")
    result = CliRunner().invoke(app, ["inject", "leave", "--node", "1", "--run", str(tmp_path)])
    reason = "(Input data was truncated); choose one from ./runs"
    assert result.output == f"error: --run must be the folder of a run on this machine, got {tmp_path} {reason}\n"
    assert result.exit_code == 2
