"""A worker answers every message of the coordinator as the protocol says."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from resilient.comm import Communicator
from resilient.errors import CheckpointError
from resilient.pipeline.stage_timer import MIN_MEASURED_STEPS
from resilient.protocol.checkpoint_pace import CheckpointPace
from resilient.protocol.messages import (
    INIT,
    Arm,
    Failed,
    Finish,
    Finished,
    FromWorkerMessage,
    Generation,
    Installed,
    NotSaved,
    Ready,
    Regroup,
    Report,
    Save,
    Saved,
    StepDone,
    Suspect,
    ToWorkerMessage,
)
from resilient.runtime.job import Job
from resilient.runtime.worker import Worker
from resilient.state.fingerprint import fingerprint
from resilient.state.manifest import Manifest, folder, write_manifest
from resilient.state.witnesses import HeldCopy, witness
from tests.resilient.ranks import HOST, SECRET, join
from tests.resilient.small import Tokens, make_job, make_plan, make_profile

ALONE = make_plan(((0, 6), 8))
NAMES = {"embed", "block.0", "block.1", "block.2", "block.3", "head"}


class ScriptedClient:
    """Hands out messages in order; ``hears`` may add some, as the reader thread would."""

    def __init__(self, path: Path, *messages: ToWorkerMessage) -> None:
        self.run_directory = str(path)
        self.on_regroup: Callable[[Regroup], None] | None = None
        self.on_arm: Callable[[Arm], None] | None = None
        self.sent: list[FromWorkerMessage] = []
        self.inbox = deque(messages)
        self.hears: Callable[[FromWorkerMessage], None] = lambda _: None

    def send(self, message: FromWorkerMessage) -> None:
        self.sent.append(message)
        self.hears(message)

    def receive(self) -> ToWorkerMessage:
        return self.inbox.popleft()

    def announce(self, message: Regroup) -> None:
        self.inbox.append(message)
        assert self.on_regroup is not None
        self.on_regroup(message)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.sent]

    def last(self, kind: type) -> Any:
        return next(message for message in reversed(self.sent) if isinstance(message, kind))


def generation(number: int = 1, version: int = 0, **changes: Any) -> Generation:
    arguments: dict[str, Any] = {
        "rank": 0, "plan": ALONE, "roll_forward": None, "transfers": (), "source": INIT, "store_address": "", **changes,
    }  # fmt: skip
    return Generation(generation=number, version=version, **arguments)


def make_worker(client: ScriptedClient, num_steps: int = 3, **changes: Any) -> Worker:
    job: Job = make_job(**changes).until(num_steps)
    return Worker(job, make_profile(job), client, HOST, SECRET)


def test_undisturbed_job_runs_to_its_end(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Finish(is_main=True))
    worker = make_worker(client, checkpoint_every=2)
    worker.run()
    assert client.kinds() == ["Ready", "Installed", "StepDone", "StepDone", "Saved", "StepDone", "Saved", "Finished"]
    assert worker.is_main
    steps = [message for message in client.sent if isinstance(message, StepDone)]
    assert [message.outcome.step for message in steps] == [1, 2, 3]
    assert [message.step for message in client.sent if isinstance(message, Saved)] == [2, 3]
    assert set(client.last(Saved).states) == NAMES
    assert client.last(Ready).store_address.startswith(f"{HOST}:")
    assert client.last(Installed).generation == client.last(Finished).generation == 1


def test_worker_of_rank_0_chooses_when_checkpoints_are_written_and_tells_what_one_cost(tmp_path: Path) -> None:
    """Losses are so frequent that one is due whenever the one before is measured."""
    client = ScriptedClient(tmp_path, generation(pace=CheckpointPace(risk_s=1e-9)), Finish())
    make_worker(client, num_steps=7, checkpoint_every="auto").run()
    assert [message.step for message in client.sent if isinstance(message, Saved)] == [3, 5, 7]
    steps = {message.outcome.step: message for message in client.sent if isinstance(message, StepDone)}
    assert [step for step, done in steps.items() if done.outcome.saves] == [3, 5, 7], "one follows the last step anyway"
    assert steps[3].checkpoint_s is None
    assert steps[4].checkpoint_s is not None


def test_checkpoint_on_the_way_that_cannot_be_written_is_told_and_the_next_one_is_tried(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Finish())
    checkpoints = tmp_path / "checkpoints"
    checkpoints.write_text("in the way")

    def make_room(message: FromWorkerMessage) -> None:
        if isinstance(message, NotSaved):
            checkpoints.unlink()

    client.hears = make_room
    make_worker(client, num_steps=3, checkpoint_every=1).run()
    assert client.kinds() == [
        "Ready", "Installed", "StepDone", "NotSaved", "StepDone", "Saved", "StepDone", "Saved", "Finished",
    ]  # fmt: skip
    error = f"{folder(tmp_path, 1)} cannot be written ([Errno 20] Not a directory: '{folder(tmp_path, 1)}'); make room "
    assert client.last(NotSaved) == NotSaved(step=1, error=f"{error}there, or choose another folder")


def test_last_checkpoint_that_cannot_be_written_fails_the_job(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Finish())
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written \(\[Errno 20\] Not a directory: "):
        make_worker(client, num_steps=2, checkpoint_every=1, comm_timeout_s=1.0).run()
    assert client.kinds() == ["Ready", "Installed", "StepDone", "NotSaved", "StepDone", "Failed"]


def test_last_checkpoint_is_tried_again_until_there_is_room(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Finish())
    checkpoints = tmp_path / "checkpoints"
    checkpoints.write_text("in the way")

    def make_room(message: FromWorkerMessage) -> None:
        if isinstance(message, NotSaved):
            checkpoints.unlink()

    client.hears = make_room
    make_worker(client, num_steps=1).run()
    assert client.kinds() == ["Ready", "Installed", "StepDone", "NotSaved", "Saved", "Finished"]
    path = folder(tmp_path, 1)
    message = (
        rf"{path} cannot be written \(\[Errno 20\] Not a directory: '{path}'\); make room "
        r"there, or choose another folder; trying again for (600|599) s"
    )
    assert re.fullmatch(message, client.last(NotSaved).error)


def test_checkpoint_that_is_due_is_written_before_the_next_step(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, msgspec.structs.replace(generation(), checkpoint_due=True), Finish())
    make_worker(client, num_steps=1).run()
    assert client.kinds() == ["Ready", "Installed", "Saved", "StepDone", "Saved", "Finished"]
    assert [message.step for message in client.sent if isinstance(message, Saved)] == [0, 1]


def test_worker_pauses_at_the_boundary_and_goes_on_without_losing_the_step(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation())

    def join_in_step_1(message: FromWorkerMessage) -> None:
        if isinstance(message, Installed) and message.generation == 1:
            client.announce(Regroup(generation=2, at_boundary=True))
        if isinstance(message, Report):
            client.inbox.extend([generation(2, version=1), Finish()])

    client.hears = join_in_step_1
    make_worker(client).run()
    assert client.kinds() == [
        "Ready", "Installed", "StepDone", "Report", "Installed", "StepDone", "StepDone", "Saved", "Finished",
    ]  # fmt: skip
    progress = client.last(Report).progress
    assert (progress.version, progress.complete, progress.passed.step) == (1, False, 1)
    assert set(progress.current) == NAMES


@pytest.mark.parametrize("num_steps", [MIN_MEASURED_STEPS - 1, MIN_MEASURED_STEPS])
def test_time_of_a_stage_is_reported_once_it_is_known(num_steps: int, tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation())

    def join_after_the_steps(message: FromWorkerMessage) -> None:
        if isinstance(message, StepDone) and message.outcome.step == num_steps - 1:
            client.announce(Regroup(generation=2, at_boundary=True))
        if isinstance(message, Report):
            client.inbox.append(Finish())

    client.hears = join_after_the_steps
    make_worker(client, num_steps=2 * MIN_MEASURED_STEPS).run()
    progress = client.last(Report).progress
    assert progress.version == num_steps
    assert (progress.stage_ms > 0) == (num_steps >= MIN_MEASURED_STEPS)


def test_broken_generation_is_suspected_and_reported(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(4))

    def fail_before_connecting(message: FromWorkerMessage) -> None:
        if isinstance(message, Ready):
            client.inbox.append(Regroup(generation=5))
            assert client.on_regroup is not None
            client.on_regroup(Regroup(generation=5))
        if isinstance(message, Report):
            client.inbox.extend([generation(5), Finish()])

    client.hears = fail_before_connecting
    make_worker(client, num_steps=1).run()
    assert client.kinds() == ["Ready", "Suspect", "Report", "Installed", "StepDone", "Saved", "Finished"]
    suspect = client.last(Suspect)
    assert (suspect.generation, suspect.reason) == (4, "the generation ended, 5 is being formed (generation 4)")
    assert client.last(Report).generation == 5


def test_worker_without_a_place_stands_by_and_does_not_speak_for_the_job(tmp_path: Path) -> None:
    client = ScriptedClient(
        tmp_path,
        generation(),
        Regroup(generation=2),
        generation(2, version=3, rank=None),
        Regroup(generation=3),
        Finish(),
    )
    worker = make_worker(client)
    worker.run()
    assert not worker.is_main
    progress = client.last(Report).progress
    assert (progress.version, progress.current) == (3, ())
    assert progress.retained, "until the others have committed, its states may be needed"


def test_worker_that_only_sends_says_when_it_is_done_and_keeps_its_states(tmp_path: Path) -> None:
    """With nothing to send: that the bytes arrive is seen where all ranks are real."""
    client = ScriptedClient(tmp_path, generation())
    address = ""
    peers: list[Future[Communicator]] = []

    with ThreadPoolExecutor(1) as pool:

        def send_after_step_1(message: FromWorkerMessage) -> None:
            nonlocal address
            if isinstance(message, Ready):
                address = message.store_address
                peers.append(pool.submit(join, address, 0, 1, generation=2, num_sources=1))
            if isinstance(message, Installed) and message.generation == 1:
                client.announce(Regroup(generation=2, at_boundary=True))
            if isinstance(message, Report) and message.generation == 2:
                change = generation(2, version=1, rank=1, num_sources=1, store_address=address)
                client.inbox.extend([change, Regroup(generation=3), Finish()])
            if isinstance(message, Installed) and message.generation == 2:
                peers[0].result()  # one that still connects would take the next regroup for a lost peer

        client.hears = send_after_step_1
        make_worker(client).run()
    assert [peer.result().size for peer in peers] == [1]
    assert client.kinds() == ["Ready", "Installed", "StepDone", "Report", "Installed", "Report"]
    assert client.last(Installed).generation == 2
    progress = client.last(Report).progress
    assert (progress.version, progress.current, set(progress.retained)) == (1, (), NAMES)


def test_change_at_the_boundary_after_the_last_step_does_not_keep_it_from_being_saved(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation())

    def pause(message: FromWorkerMessage) -> None:
        if isinstance(message, Installed):
            client.announce(Regroup(generation=2, at_boundary=True))
            client.inbox.append(Finish(is_main=True))

    client.hears = pause
    make_worker(client, num_steps=1).run()
    assert client.kinds() == ["Ready", "Installed", "StepDone", "Saved", "Finished", "Report"]


def test_states_are_saved_on_demand(tmp_path: Path) -> None:
    path = folder(tmp_path, 3)
    save = Save(generation=2, version=3, roll_forward=None, states=("embed", "head"), path=str(path))
    client = ScriptedClient(tmp_path, generation(), Regroup(generation=2), save, Finish())
    make_worker(client).run()
    saved = client.last(Saved)
    assert (saved.generation, saved.step, set(saved.states)) == (2, 3, {"embed", "head"})
    assert list(path.glob("embed.*.safetensors"))


def test_all_that_is_held_is_told_with_what_is_saved_of_it(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Regroup(generation=2))

    def save_nothing(message: FromWorkerMessage) -> None:
        if isinstance(message, Report):
            path = str(tmp_path / "nothing")
            client.inbox.append(Save(generation=2, version=3, roll_forward=None, states=(), path=path))
            client.inbox.append(Finish())

    client.hears = save_nothing
    worker = make_worker(client)
    worker.run()
    saved, states = client.last(Saved), worker._ledger.retained  # pyright: ignore[reportPrivateUsage]
    assert (saved.states, saved.held.keys()) == ({}, NAMES)
    assert saved.held == {
        name: HeldCopy(fingerprint=fingerprint(state.bytes), origin=witness(0, 0), device=make_job().device_name)
        for name, state in states.items()
    }
    assert not (tmp_path / "nothing").exists()


def test_failure_of_the_script_is_told_with_its_traceback_and_raised(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Finish())
    message = "sample 7 of Tokens: tokens must be < 11, got "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make_worker(client, dataset=Tokens(bad=7)).run()
    failed = client.last(Failed)
    assert failed.error.startswith(f"SampleError: {message}")
    assert failed.kind == "", "it can only be the job's"
    assert re.search(r"; fix the data \(generation 1, step \d+, action 0F\d of row 0\)$", failed.error), failed.error
    assert "in check" in failed.traceback
    if sys.version_info >= (3, 11):
        assert re.search(r"^row 0 .*\[0F\d\]", failed.traceback, re.MULTILINE)
    assert "Finished" not in client.kinds()


def test_worker_whose_script_failed_saves_what_it_holds_first(tmp_path: Path) -> None:
    client = ScriptedClient(tmp_path, generation(), Regroup(generation=2))

    def save_what_is_reported(message: FromWorkerMessage) -> None:
        if isinstance(message, Report):
            states, version = message.progress.current, message.progress.version
            path = str(folder(tmp_path, version))
            client.inbox.append(Save(generation=2, version=version, roll_forward=None, states=states, path=path))
            client.inbox.append(Finish())

    client.hears = save_what_is_reported
    with pytest.raises(ValueError, match=r"^sample 7 of Tokens"):
        make_worker(client, dataset=Tokens(bad=7)).run()
    assert set(client.last(Saved).states) == NAMES
    assert client.kinds()[-3:] == ["Failed", "Report", "Saved"]


def test_error_that_this_node_alone_may_have_is_told_with_its_kind(tmp_path: Path) -> None:
    class Unreadable(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index == 7:
                raise OSError("disk gone")
            return super().__getitem__(index)

    client = ScriptedClient(tmp_path, generation(), Finish())
    with pytest.raises(OSError, match=r"^disk gone"):
        make_worker(client, dataset=Unreadable()).run()
    line = Unreadable.__getitem__.__code__.co_firstlineno + 2
    assert client.last(Failed).kind == f"OSError at {__file__}:{line}"


def test_states_come_from_a_checkpoint_when_told(tmp_path: Path) -> None:
    first = ScriptedClient(tmp_path, generation(), Finish())
    make_worker(first, num_steps=2).run()
    saved = first.last(Saved)
    path = folder(tmp_path, 2)
    write_manifest(path, Manifest(step=2, recipe=make_job().recipe(), states=saved.states))
    second = ScriptedClient(tmp_path / "second", generation(version=2, source=str(path)), Finish())
    make_worker(second, num_steps=3).run()
    assert [message.outcome.step for message in second.sent if isinstance(message, StepDone)] == [3]
    through = ScriptedClient(tmp_path / "through", generation(), Finish())
    make_worker(through, num_steps=3).run()
    assert second.last(Saved).states == through.last(Saved).states
