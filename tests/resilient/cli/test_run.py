"""``resilient run``: what it reads, and what it leaves of its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from resilient.agent.launch import Launcher
from resilient.agent.launch_options import LaunchOptions
from resilient.cli import run as cli
from resilient.cli.app import app
from resilient.cli.run import parse_injection
from resilient.planners.registry import AUTO, PLANNERS
from resilient.protocol.messages import Injection


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("node=2", Injection(node=2)),
        ("node=2, step=15, phase=backward", Injection(node=2, at_step=15, at_phase="backward")),
        ("node=2,phase=vision.send", Injection(node=2, at_phase="vision.send")),
        ("node=0,phase=copy,worker", Injection(node=0, at_phase="copy", worker_only=True)),
        ("node=0,phase=copy,worker=1", Injection(node=0, at_phase="copy", worker_only=True, worker=1)),
    ],
)
def test_injections_are_read(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step=3",
        "node=x",
        "node=1,phase=lunch",
        "node=1,phase=vision.copy",
        "node=1,phase=.send",
        "node=1,stop=3",
        "node=-1",
        "node=1,step=0",
        "node=1,worker=x",
        "node=1,worker=-1",
    ],
)
def test_bad_injection_shows_the_form(text: str) -> None:
    with pytest.raises(
        ValueError, match=r'^inject must look like "node=2,step=15,phase=backward\[,worker\[=1\]\]", got'
    ):
        parse_injection(text)


def test_latest_is_the_run_beside_this_one_that_wrote_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, asked = tmp_path / "runs", list[str | None]()
    for written_at, name in ((3, "a/checkpoints/step-00000002"), (5, "b/checkpoints/step-00000001")):
        manifest = runs / name / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (written_at, written_at))
    (runs / "c" / "checkpoints" / "step-00000003").mkdir(parents=True)  # it was not finished
    (tmp_path / "s.py").touch()

    def run(self: Launcher) -> int:
        asked.append(self._options.resume)
        return 0

    monkeypatch.setattr(Launcher, "run", run)
    arguments = ["run", "--resume", "latest", "--run-dir", str(runs / "d"), str(tmp_path / "s.py")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, asked) == (0, [str(runs / "b")])
    assert f"going on from the newest checkpoint of {runs / 'b'}\n" in result.stderr


def test_latest_of_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    arguments = ["run", "--resume", "latest", "--run-dir", str(tmp_path / "runs" / "e"), str(tmp_path / "s.py")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: --resume latest must find a checkpoint, got none in the runs of {tmp_path}/runs; name one, or begin "
        "without --resume\n",
    )


def test_resuming_from_no_checkpoint_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    arguments = ["run", "--resume", str(tmp_path), "--run-dir", str(tmp_path / "run"), str(tmp_path / "s.py")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: --resume must be a finished checkpoint, a folder step-* with manifest.json, got {tmp_path} (a folder "
        f"without manifest.json); choose one from the checkpoints/ of a run\n"
    )


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SCRIPT must be given; without one, a job can only be taken over, with --attach RUN"),
        (["--attach", "runs/a", "s.py"], "--attach RUN must stand without a script, got s.py; the run knows its own"),
        (
            ["--attach", "runs/a", "--nodes", "3"],
            "--attach RUN must stand without --nodes; the job keeps what it was started with",
        ),
    ],
)
def test_job_is_started_or_taken_over(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    result = CliRunner().invoke(app, ["run", *arguments])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


def test_folder_without_a_job_cannot_be_taken_over(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--plain", "--attach", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: --attach must be the folder of a run, with its job.json, got {tmp_path}; give one that this machine "
        "sees, or begin again with --resume\n"
    )


def test_run_without_its_log_cannot_be_taken_over(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"address": "127.0.0.1:1", "token": "t", "pid": 1, "term": 1}')
    result = CliRunner().invoke(app, ["run", "--plain", "--attach", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: --attach must be a run whose stimuli.jsonl is whole, got {tmp_path} (")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "4"], (4, None, True, "")),
        (["--nodes", "4:16", "--no-local-nodes", "--token-file", "TOKEN"], (4, 16, False, "sixteen characters")),
        ([], (1, None, True, "")),
    ],
)
def test_nodes_and_token_are_read(
    words: list[str], told: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESILIENT_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TOKEN").write_text("sixteen characters\n")
    (tmp_path / "s.py").touch()
    seen: list[LaunchOptions] = []
    monkeypatch.setattr("resilient.agent.launch.Launcher.__init__", lambda self, options: seen.append(options))
    monkeypatch.setattr(cli, "_run_to_its_end", lambda *_, **__: 0)
    result = CliRunner().invoke(app, ["run", *words, "s.py"])
    assert result.exit_code == 0, result.output
    (options,) = seen
    assert (options.num_nodes, options.most_nodes, options.local_nodes, options.token) == told


def test_unknown_planner_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    result = CliRunner().invoke(app, ["run", "--planner", "entrian", str(tmp_path / "s.py")])
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --planner must be one of {', '.join((AUTO, *PLANNERS))}, got 'entrian'; did you mean 'entrain'?\n"
    )


@pytest.mark.parametrize("text", ["0", "-1", "x", "4:", ":4", "4:3", "4:5:6", "²"])
def test_nodes_that_cannot_be_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    result = CliRunner().invoke(app, ["run", f"--nodes={text}", str(tmp_path / "s.py")])
    assert result.exit_code == 2
    told = " ".join(result.output.replace("│", " ").split())
    assert f"--nodes must be N or MIN:MAX, with 1 <= MIN <= MAX, got {text!r}; give 4, or 4:16" in told


@pytest.mark.parametrize("command", [["run"], ["agent", "--join", "one:1"]])
def test_empty_file_of_a_token_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    token = tmp_path / "token"
    token.write_text("\n")
    script = [str(tmp_path / "s.py")] if command == ["run"] else []
    result = CliRunner().invoke(app, [*command, "--token-file", str(token), *script])
    assert result.exit_code == 2
    assert "--token-file must hold a token, got the empty file" in " ".join(result.output.replace("│", " ").split())
