"""Whole launches with real processes: how they end, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from resilient.agent.launch import Launcher, launch
from resilient.agent.launch_options import _REPEATED, LaunchOptions
from resilient.agent.leadership.leader_store import LeaderStore
from tests.etcd_server import etcd_server, needs_etcd
from tests.processes import has_ended

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


def wait_for(is_so: Callable[[], bool], launcher: psutil.Popen | None = None) -> None:
    """Return once it is so, while the launcher, if there is to be one, runs."""
    while not is_so():
        assert launcher is None or launcher.poll() is None
        time.sleep(0.01)


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


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_outlives_the_launcher(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", "from resilient.cli.app import app; app()", "run", "--nodes", "2", "--plain"]
    command += ["--orphan-s", "1"]
    command += ["--run-dir", str(run), script(tmp_path, _WAITING)]
    launcher = psutil.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: all((run / f"up-{rank}").exists() for rank in range(2)), launcher)
    family = launcher.children(recursive=True)
    assert len(family) == 7  # the forkserver; two agents, each with a spawner and a worker
    launcher.send_signal(number)
    assert launcher.wait() == exit_code
    wait_for(lambda: all(map(has_ended, family)))


@pytest.fixture
def train(tmp_path: Path) -> str:
    return script(tmp_path, "")


def test_options_that_start_the_job_again_are_those_that_were_given(train: str, tmp_path: Path) -> None:
    options = LaunchOptions(
        script=train,
        run_directory=str(tmp_path),
        workers_per_node=2,
        network_gbit_s=12.5,
        grace_s=30.0,
        domains=("east", "west"),
        resume="checkpoint",
        trace_steps="3",
        allow_different=("script", "data"),
    )
    words = "--workers-per-node 2 --network-gbit-s 12.5 --grace-s 30"
    words += " --allow-different script --allow-different data --domains east,west"
    assert " ".join(options.repeated()) == words
    assert LaunchOptions(script=train, run_directory=str(tmp_path)).repeated() == ()


def test_schedule_that_there_is_not_is_refused_before_anything_is_started(train: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^schedule must be one of gpipe, .*, auto, got 'zb'; did you mean 'zb-h1'"):
        LaunchOptions(script=train, run_directory=str(tmp_path), schedule="zb")
    options = LaunchOptions(script=train, run_directory=str(tmp_path), schedule="auto")
    assert options.repeated() == ("--schedule", "auto")


@pytest.mark.parametrize("name", ["network_gbit_s", "failure_interval_s", "heartbeat_s", "grace_s"])
def test_times_and_bandwidths_are_positive(name: str, train: str, tmp_path: Path) -> None:
    zero: dict[str, Any] = {name: 0}
    message = f"{name} must be > 0, got 0; leave it out for the default"
    with pytest.raises(ValueError, match=f"^{message}$"):
        LaunchOptions(script=train, run_directory=str(tmp_path), **zero)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": "two"}, "tp must be auto or a number of devices, got 'two'; 1 means none"),
        ({"tp_chunks": 0}, "tp_chunks must be >= 1, got 0; 1 exchanges tokens before or after they are computed with"),
        ({"tp": "0"}, "tp must be auto or a number of devices, got '0'; 1 means none"),
        (
            {"tp": "2", "workers_per_node": 3},
            "tp must divide workers_per_node 3, got 2; give another, or auto for any in each stage",
        ),
        (
            {"tp": "2", "shard": "on"},
            "shard must not be on beside tp 2 (devices of a stage share each microbatch or have their own, not both), "
            "got on; give tp auto for pipelines of both kinds",
        ),
        (
            {"planner": "auto", "shard": "on"},
            "shard must be off for jobs with a planner (it decides which units are sharded), got on; leave it out",
        ),
        (
            {"tp": "2", "workers_per_node": 2, "schedule": "interleaved-1f1b"},
            "tp must be 1 for interleaved-1f1b, whose stages have one device each, got 2; leave it out, or choose "
            "another schedule",
        ),
    ],
)
def test_degrees_that_cannot_be_are_refused(given: dict[str, Any], message: str, train: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LaunchOptions(script=train, run_directory=str(tmp_path), **given)


def test_folder_that_cannot_be_written_is_named(train: str, tmp_path: Path) -> None:
    folder = tmp_path / "script.py" / "run"
    message = f"run_directory must be a folder that can be written, got {folder} (Not a directory); give another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        launch(LaunchOptions(script=train, run_directory=str(folder)))


def test_folder_of_another_run_is_left_alone(train: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    message = f"run_directory must be new, got {tmp_path}, which holds another run; give another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        launch(LaunchOptions(script=train, run_directory=str(tmp_path)))


def test_environment_that_is_too_large_for_a_process_ends_the_launch(train: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    options = LaunchOptions(
        script=train, run_directory=str(tmp_path / "run"), environment={"LARGE": 200_000 * "x"}, num_nodes=2
    )
    assert launch(options, events.append) == 1
    assert events[-1]["reason"].startswith("cannot start a node: arguments and environment must fit 131072 bytes, got ")


def test_launcher_ends_though_an_import_hangs(tmp_path: Path) -> None:
    """The forkserver imports what the script imports: no node is ever started."""
    (tmp_path / "hanging.py").write_text(
        "import os, pathlib, threading\npathlib.Path(os.environ['REACHED']).touch()\nthreading.Event().wait()"
    )
    reached = tmp_path / "reached"
    command = [sys.executable, "-c", "from resilient.cli.app import app; app()", "run", "--nodes", "2", "--plain"]
    command += ["--orphan-s", "1"]
    command += ["--run-dir", str(tmp_path / "run"), script(tmp_path, "import hanging")]
    launcher = psutil.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "REACHED": str(reached)})
    wait_for(reached.exists, launcher)
    family = launcher.children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate()
    assert launcher.returncode == 130
    assert "stopped with exit code 130: interrupted (SIGINT)" in output
    wait_for(lambda: all(map(has_ended, family)))


@pytest.mark.parametrize(
    ("error", "why"), [(OSError("no terminal"), "no terminal"), (SystemExit(1), "nobody reads them any more")]
)
def test_whoever_shows_the_events_and_cannot_any_more_does_not_end_the_job(
    error: BaseException, why: str, train: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher, show = Launcher(LaunchOptions(script=train, run_directory=str(tmp_path))), Mock(side_effect=error)
    launcher.subscribe(show)
    for _ in range(2):
        launcher._on_event({"kind": "step"})
    show.assert_called_once()
    assert caplog.messages == [f"events are no longer shown, only in {tmp_path}/events.jsonl: {why}"]


def test_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"script must be a file, got 'nothing\.py'"):
        LaunchOptions(script="nothing.py", run_directory=str(tmp_path))


def test_what_may_not_differ_is_named(train: str, tmp_path: Path) -> None:
    message = (
        "allow_different must be one of versions, package, script, model, schedule, loss, data, got 'job'; what else "
        "differs trains another job"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        LaunchOptions(script=train, run_directory=str(tmp_path), allow_different=("job",))


def test_coordinator_alone_is_started_again_as_one(train: str, tmp_path: Path) -> None:
    options = LaunchOptions(script=train, run_directory=str(tmp_path), num_nodes=2, most_nodes=3, local_nodes=False)
    assert options.repeated() == ("--no-local-nodes",)
    told = replace(options, token="a secret of this test", token_file="/jobs/token")
    assert told.repeated() == ("--token-file", "/jobs/token", "--no-local-nodes"), "the token itself is never told"


def test_bounds_of_nodes_and_tokens_are_checked(train: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^most_nodes must be >= 4, the least, got 3; give it no less$"):
        LaunchOptions(script=train, run_directory=str(tmp_path), num_nodes=4, most_nodes=3)
    message = r"^token must be 16 characters or more, got one of 5 characters; give a random one$"
    with pytest.raises(ValueError, match=message):
        LaunchOptions(script=train, run_directory=str(tmp_path), token="guess")


def test_wildcard_host_is_refused_because_workers_could_not_be_reached_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ValueError, match=r"host must be the address .* got '0\.0\.0\.0'; give one of this machine's"):
        LaunchOptions(script=str(script), run_directory=str(tmp_path), host="0.0.0.0")


def test_every_option_is_kept_by_a_resumed_job_or_belongs_to_one_run() -> None:
    of_one_run = {
        "script", "arguments", "num_nodes", "run_directory", "resume", "injections", "domains", "trace_steps",
        "validate", "environment", "most_nodes", "local_nodes", "token",
    }  # fmt: skip
    assert {option.name for option in fields(LaunchOptions)} == {*_REPEATED, *of_one_run}


@needs_etcd
def test_prefix_at_which_another_job_is_led_is_refused(train: str, tmp_path: Path) -> None:
    with etcd_server(tmp_path / "etcd") as server:
        url = f"etcd://{server.endpoint}/jobs/one"
        assert LeaderStore(url, 10).stand("/runs/other", 0, 600) is not None
        options = LaunchOptions(script=train, run_directory=str(tmp_path / "run"), store=url)
        told = (
            rf"^store must have a prefix where nobody leads a job, got '{url}'; give a prefix of its own, or wait until"
        )
        with pytest.raises(ValueError, match=told):
            launch(options)
