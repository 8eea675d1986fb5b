"""``resilient inject`` and the like: whom they ask, and what they say where nobody answers."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from http.client import parse_headers
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resilient.cli.app import app
from resilient.common.job_certificate import server_context


def test_injecting_into_a_run_that_does_not_answer_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "over"
    folder.mkdir(parents=True)
    with socket.socket() as silent:  # its port is taken, and nobody listens
        silent.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        (folder / "job.json").write_text(json.dumps({"address": address, "token": "t", "pid": 1}))
        (folder / "events.jsonl").write_text('{"kind": "step"}\n')
        newest = CliRunner().invoke(app, ["inject", "kill", "--node", "1"])
        named = CliRunner().invoke(app, ["drain", "1", "--run", str(folder)])
    begin, end = f" does not answer at {address} (", "); if another is running, name its folder with --run\n"
    for result, run in ((newest, Path("runs", "over")), (named, folder)):
        assert result.exit_code == 2
        assert result.output.startswith(f"error: the job of {run}{begin}")
        assert result.output.endswith(end)
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"kind": "stopped", "exit_code": 3, "reason": "too few"}\n')
    result = CliRunner().invoke(app, ["status"])
    told = f"error: the job of runs/over is over: exit code 3, too few{end[1:]}"
    assert (result.exit_code, result.output) == (2, told)


def test_run_is_asked_without_the_proxy_of_the_web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> bytes:
        with (
            tls.wrap_socket(listener.accept()[0], server_side=True) as connection,
            connection.makefile("rb") as request,
        ):
            asked = request.readline()
            request.read(int(parse_headers(request)["Content-Length"]))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return asked

    tls = server_context("t")
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent, ThreadPoolExecutor(1) as pool:
        listener.settimeout(100)  # nobody comes if a proxy is asked
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:{1}".format(*silent.getsockname()))
        address = "127.0.0.1:{1}".format(*listener.getsockname())
        (tmp_path / "job.json").write_text(json.dumps({"address": address, "token": "t"}))
        asked = pool.submit(answer)
        ended = CliRunner().invoke(app, ["drain", "1", "--run", str(tmp_path)])
        assert (ended.exit_code, ended.output) == (0, "")
        assert asked.result() == b"POST /leave HTTP/1.1\r\n"


@pytest.mark.parametrize("asked", [("inject", "kill", "--node", "1"), ("drain", "1"), ("status",), ("stop",)])
def test_injecting_without_a_run_is_explained(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "no run in ./runs" in result.output


def test_folder_of_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{")
    result = CliRunner().invoke(app, ["drain", "1", "--run", str(tmp_path)])
    reason = "(Input data was truncated); choose one from ./runs"
    assert result.output == f"error: --run must be the folder of a run on this machine, got {tmp_path} {reason}\n"
    assert result.exit_code == 2
