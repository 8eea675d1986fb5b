"""What users test their own jobs with; that nodes are killed and survived is seen in ``tests/integration``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import resilient as rs
from resilient.agent.launch import Launcher
from resilient.agent.launch_options import LaunchOptions
from resilient.protocol.messages import Injection
from resilient.testing import JobRun, fail_at, run_job, train_here
from tests.resilient.small import CPU, TiedModel, Tokens


def trainer(**changes: Any) -> rs.Trainer:
    arguments: dict[str, Any] = {"optimizer": rs.SGD(lr=0.1), "global_batch": 8, "microbatch": 2, **changes}
    return rs.Trainer(TiedModel(num_blocks=1), Tokens(), device=CPU, **arguments)


def test_job_trains_here_and_gives_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_RUN_DIR", "elsewhere")
    monkeypatch.setenv("RESILIENT_AGENT", "/no/agent")
    monkeypatch.setenv("RESILIENT_TRACE", "1-5")
    mine = trainer()
    result, losses = train_here(mine, 5, directory=tmp_path / "run")
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000005"
    assert list(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1]
    assert losses == mine.losses
    assert (os.environ["RESILIENT_RUN_DIR"], os.environ["RESILIENT_AGENT"]) == ("elsewhere", "/no/agent")
    assert not Path("elsewhere").exists()
    assert os.environ["RESILIENT_TRACE"] == "1-5"
    assert not list((tmp_path / "run").rglob("*trace*"))


def test_failure_is_described() -> None:
    assert fail_at(step=3) == Injection(node=0, at_step=3)
    assert fail_at(step=3, phase="commit", node=2, worker_only=True) == Injection(
        node=2, at_step=3, at_phase="commit", worker_only=True
    )
    assert fail_at(step=3, worker_only=True, worker=1) == Injection(node=0, at_step=3, worker_only=True, worker=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0}, "step must be a whole number >= 1, got 0; steps are numbered from 1"),
        ({"step": 1, "node": -1}, "node must be a whole number >= 0, got -1; nodes are numbered from 0"),
        ({"step": "5"}, "step must be a whole number >= 1, got '5'; steps are numbered from 1"),
        ({"step": 2.0}, "step must be a whole number >= 1, got 2.0; steps are numbered from 1"),
        ({"step": 1, "node": None}, "node must be a whole number >= 0, got None; nodes are numbered from 0"),
        ({"step": 1, "worker": -1}, "worker must be a whole number >= 0, got -1; workers are numbered from 0"),
        ({"step": 1, "worker_only": 1},
         "worker_only must be True or False, got 1; leave it out to kill the whole node"),
        ({"step": 1, "phase": "lunch"},
         "phase must be one of forward, send, backward, part, weight, return, gather, scatter, exchange, "
         "reduce, prepare, commit, save, regroup, connect, copy, verify, assign, got 'lunch'; choose one; of one unit, "
         "as in vision.forward: forward, send, backward, part, weight, return"),
    ],
)  # fmt: skip
def test_failure_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fail_at(**arguments)


def test_job_without_its_script_is_refused(tmp_path: Path) -> None:
    message = "script must be a file, got 'nowhere.py'; give the path of the job's script"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run_job("nowhere.py", directory=tmp_path, nodes=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": "2"}, "nodes must be a whole number >= 1, got '2'; a job has one at least"),
        ({"nodes": 0}, "nodes must be a whole number >= 1, got 0; a job has one at least"),
        ({"workers_per_node": 1.5}, "workers_per_node must be a whole number >= 1, got 1.5; a node has one at least"),
        ({"failures": fail_at(step=5)},
         f"failures must be a sequence of fail_at, got {fail_at(step=5)!r}; write [fail_at(step=5)]"),
        ({"failures": ["node=2"]}, "failures must be a sequence of fail_at, got ['node=2']; write [fail_at(step=5)]"),
    ],
)  # fmt: skip
def test_job_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.ArgumentError, match=f"^{re.escape(message)}$"):
        run_job(__file__, directory=tmp_path, **{"nodes": 2, **changes})


def test_arguments_of_a_script_are_text(tmp_path: Path) -> None:
    arguments: list[Any] = ["--steps", 20]
    message = "arguments must be a sequence of text, got ('--steps', 20); write numbers as str(20)"
    with pytest.raises(rs.ArgumentError, match=f"^{re.escape(message)}$"):
        run_job(__file__, *arguments, directory=tmp_path, nodes=2)


def test_run_without_failures_has_none(tmp_path: Path) -> None:
    assert JobRun(tmp_path, 0).failures == []


def test_job_on_nodes_checks_its_membership_and_begins_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchOptions] = []

    def run(self: Launcher) -> int:
        asked.append(self._options)
        return 0

    monkeypatch.setattr(Launcher, "run", run)
    (tmp_path / "job.py").touch()
    run_job(tmp_path / "job.py", directory=tmp_path / "run", nodes=3, resume=tmp_path / "step")
    (options,) = asked
    assert (options.validate, options.num_nodes, options.resume) == (True, 3, str(tmp_path / "step"))
