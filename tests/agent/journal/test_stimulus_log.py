"""The log of what the machine was told: what is read is what was written, and no disk keeps the job from going on."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from resilient.agent.journal.stimulus_log import StimulusLog, read_stimuli
from resilient.agent.membership.parts.events import (
    FailureWanted,
    Interrupted,
    ManifestFailed,
    ManifestWritten,
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    PlansPrepared,
    Stimulus,
    StopWanted,
    Tick,
    WorkerEnded,
    WorkerSaid,
)
from resilient.protocol.messages import Injection, Note, Ready, Report, StepDone, StepOutcome, WorkerProgress
from resilient.state.manifest import Manifest, SavedState
from resilient.templates.inputs.cluster import Link
from resilient.templates.replan.schedule_choice import ScheduleChoice, SimulatedSchedule
from resilient.templates.schedules.kind import ScheduleKind
from tests.agent.membership.simulated import RECIPE, job_spec, settings

STIMULI: tuple[Stimulus, ...] = (
    NodeConnected(node=0, host="höst", pid=3, num_workers=2, domain="a"),
    WorkerSaid(
        node=0, local_rank=1, message=Ready(job=job_spec(memory_bytes=None), store_address="h:1", pid=5, device="cpu")
    ),
    WorkerSaid(node=0, local_rank=0, message=Note(name="accuracy", value="0.5")),
    WorkerSaid(
        node=0,
        local_rank=0,
        message=Report(generation=2, progress=WorkerProgress(version=1, complete=True, begun=True)),
    ),
    PlansPrepared(num_nodes=2),
    PlansPrepared(
        num_nodes=3,
        choice=ScheduleChoice(
            chosen=SimulatedSchedule(schedule=ScheduleKind.ZB_V, num_chunks=2, step_ms=9.5),
            others=(SimulatedSchedule(schedule=ScheduleKind.ZB_H1, num_chunks=1, step_ms=10.0),),
        ),
    ),
    Tick(),
    FailureWanted(injection=Injection(node=1, at_step=3, at_phase="copy")),
    NodeLeaving(node=1, reason="drain"),
    WorkerEnded(node=1, local_rank=0, exit_code=-9),
    NodeCutOff(node=2),
    NodeBack(node=2),
    NodeLost(node=1, cause="node lost"),
    ManifestWritten(path="/w"),
    ManifestFailed(path="/x", error="full"),
    Interrupted(reason="SIGTERM"),
    StopWanted(exit_code=1, reason="no"),
)


def written(path: Path, *stimuli: Stimulus) -> Path:
    log = StimulusLog(path, settings())
    for number, stimulus in enumerate(stimuli):
        log.write(stimulus, number + 0.1)
    log.flush()
    return path


def test_every_stimulus_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert {type(stimulus) for stimulus in STIMULI} == set(get_args(Stimulus))
    read_settings, read = read_stimuli(written(tmp_path / "log", *STIMULI))
    assert read_settings == settings()
    assert list(read) == [(number + 0.1, stimulus) for number, stimulus in enumerate(STIMULI)]


def test_settings_of_a_resumed_job_are_read_as_they_were_written(tmp_path: Path) -> None:
    manifest = Manifest(step=7, recipe=RECIPE, states={"a": (SavedState(file="a", num_bytes=1, sha256="f"),)})
    told = settings(resume=("/c", manifest), network=Link(bytes_per_s=1e9), failure_interval_s=math.inf, validate=True)
    StimulusLog(tmp_path / "log", told).flush()
    assert read_stimuli(tmp_path / "log")[0] == told


def ready(rank: int, **changes: Any) -> WorkerSaid:
    message = Ready(job=job_spec(**changes), store_address=f"h:{rank}", pid=rank, device="cpu")
    return WorkerSaid(node=rank // 2, local_rank=rank % 2, message=message)


def test_each_job_is_written_once_and_read_wherever_it_was_told(tmp_path: Path) -> None:
    told = [ready(0), ready(1), ready(2, comm_timeout_s=60.0), ready(3), ready(4, comm_timeout_s=60.0)]
    path = written(tmp_path / "log", *told)
    assert [stimulus for _, stimulus in read_stimuli(path)[1]] == told
    first, second, other, *again = map(len, path.read_bytes().splitlines()[1:])
    assert min(first, other) > 1000
    assert max(second, *again) < 300


def test_job_that_no_line_holds_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log", ready(0), ready(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(ValueError, match=r"^line 2 of ") as error:
        list(read_stimuli(path)[1])
    got = "Expected `object`, got `null` - at `$.message.job`"
    assert str(error.value) == f"line 2 of {path} must be a stimulus, got {got}"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number_is_kept(tmp_path: Path, loss: float) -> None:
    outcome = StepOutcome(step=1, loss=loss, grad_norm=1.0)
    done = StepDone(generation=1, outcome=outcome, num_samples=1, step_ms=1.0, learning_rate=0.1, at=2.0)
    _, read = read_stimuli(written(tmp_path / "log", WorkerSaid(node=0, local_rank=0, message=done)))
    ((_, stimulus),) = read
    assert isinstance(stimulus, WorkerSaid)
    assert isinstance(stimulus.message, StepDone)
    assert str(stimulus.message.outcome.loss) == str(loss)


def test_dropped_stimulus_is_not_written(tmp_path: Path) -> None:
    log = StimulusLog(tmp_path / "log", settings())
    log.write(NodeLost(node=1, cause="x"), 1.0)
    log.write(Tick(), 2.0)
    log.drop_last()
    log.flush()
    assert list(read_stimuli(tmp_path / "log")[1]) == [(1.0, NodeLost(node=1, cause="x"))]


def test_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "log", Tick(), Tick())
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_stimuli(path)[1]) == [(0.1, Tick())]


def test_log_that_cannot_be_written_is_given_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.mkdir()
    log = StimulusLog(path, settings())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            log.write(Tick(), 1.0)
            log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write {path}, the run cannot be replayed: [Errno 21] Is a directory: '{path}'"
    ]
    path.rmdir()
    log.write(Tick(), 2.0)
    log.flush()
    assert not path.exists(), "a log with a gap leads to other decisions"


def test_text_that_is_not_unicode_is_no_end_of_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = StimulusLog(tmp_path / "log", replace(settings(), script="\udcff.py"))
    log.flush()
    assert not (tmp_path / "log").exists()
    assert "the run cannot be replayed" in caplog.text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "line 1 of {} must hold a job's settings, version 2, got nothing recorded; choose another run"),
        (
            b'{"version":1,"settings":{}}\n',
            "line 1 of {} must hold a job's settings, version 2, got version 1; replay it with the release that wrote "
            "it",
        ),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, lines: bytes, message: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(lines)
    with pytest.raises(ValueError, match=r"^line 1 of ") as error:
        read_stimuli(path)
    assert str(error.value) == message.format(path)


def test_unknown_stimulus_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log", Tick())
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"kind":"Earthquake","stimulus":{}}\n')
    with pytest.raises(ValueError, match=r"^line 3 of .*log must be a stimulus, got kind 'Earthquake'$"):
        list(read_stimuli(path)[1])
