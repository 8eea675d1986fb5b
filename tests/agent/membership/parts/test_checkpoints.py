"""A checkpoint on the way that cannot be written costs nobody the training, and is never offered to resume from."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from resilient.agent.membership.parts.checkpoints import Parts
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import ManifestFailed, Send, StopWanted, Tick
from resilient.protocol.messages import Failed, Finished, Generation, NotSaved
from resilient.state.manifest import Manifest, SavedState
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.agent.membership.simulated import PROFILE, RECIPE, STATES, Job, job_spec

ERROR = "/runs/x/checkpoints/step-00000003 cannot be written ([Errno 28] No space left on device); make room there"


def path_of(step: int) -> str:
    return f"/runs/x/checkpoints/step-{step:08d}"


def started(**changes: Any) -> Job:
    job = Job(**changes)
    job.start()
    assert job.machine.phase is Phase.RUNNING
    return job


def save(job: Job, step: int) -> None:
    """Have all placed workers save a part of the step's checkpoint."""
    for worker in job.placed():
        job.say(worker, job.saved(job.machine.generation, step, job.workers[worker].current))


def stop(job: Job) -> str:
    """End the job now; return the reason given, which names what to resume from."""
    job.feed(StopWanted(exit_code=1, reason="enough"))
    assert job.stop is not None
    return job.stop.reason


def test_part_that_cannot_be_written_is_told_and_training_goes_on() -> None:
    job = started()
    job.step(3)
    victim, other, *_ = job.placed()
    job.say(other, job.saved(1, 3, STATES[1:]))
    job.say(victim, NotSaved(step=3, error=ERROR))
    assert job.last("checkpoint_failed") == {"step": 3, "node": victim[0], "error": ERROR, "newest": None}
    assert (job.machine.phase, job.machine.generation, job.manifests) == (Phase.RUNNING, 1, [])
    job.step(6)
    save(job, 6)
    assert [made.path for made in job.manifests] == [path_of(6)]
    assert job.last("checkpoint") == {"step": 6, "path": path_of(6)}
    job.step(9)
    job.say(victim, NotSaved(step=9, error=ERROR))
    assert job.last("checkpoint_failed")["newest"] == path_of(6)
    assert stop(job) == f"enough; resume with: resilient run --nodes 4 --resume {path_of(6)} train.py"


def test_checkpoint_without_its_manifest_is_told_and_training_goes_on() -> None:
    job = started()
    job.step(3)
    save(job, 3)
    job.feed(ManifestFailed(path=path_of(3), error=ERROR))
    assert job.last("checkpoint_failed") == {"step": 3, "node": None, "error": ERROR, "newest": None}
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    assert stop(job) == "enough; there is no checkpoint; start again with: resilient run --nodes 4 train.py"


def test_states_that_nobody_holds_come_from_the_newest_whole_checkpoint() -> None:
    job = started(num_nodes=4)
    job.step(3)
    save(job, 3)
    job.step(6)
    save(job, 6)
    job.feed(ManifestFailed(path=path_of(6), error=ERROR))
    for _ in range(2):
        job.ready(job.connect())
    job.lose(*(pipeline.nodes[0] for pipeline in job.plan.pipelines[:2]))
    job.answer()
    assert job.last("generation")["version"] == 3
    assert f"everybody loads {path_of(3)}" in job.last("output")["text"]


def fail_manifest(job: Job, step: int) -> None:
    job.feed(ManifestFailed(path=path_of(step), error=ERROR))


def tick_at(job: Job, now: float) -> None:
    job.now = now
    job.feed(Tick())


def written(job: Job) -> list[str]:
    return [made.path for made in job.manifests]


def test_manifest_on_the_way_is_tried_again_and_counts_once_it_is_written() -> None:
    job = started()
    job.step(3)
    save(job, 3)
    fail_manifest(job, 3)
    tick_at(job, 0.5)
    assert written(job) == [path_of(3)]
    tick_at(job, 1.0)
    fail_manifest(job, 3)
    assert job.kinds().count("checkpoint_failed") == 2
    for now in (2.5, 3.0, 3.5):
        tick_at(job, now)
    assert written(job) == [path_of(3)] * 3, "the pauses are a second, then two"
    assert job.last("checkpoint") == {"step": 3, "path": path_of(3)}
    assert stop(job) == f"enough; resume with: resilient run --nodes 4 --resume {path_of(3)} train.py"


def end(job: Job) -> None:
    """Have all workers finish the job's last step, of which the manifest cannot be written at first."""
    job.step(10)
    generation = job.machine.generation
    for worker in job.placed():
        job.say(worker, job.saved(generation, 10, job.workers[worker].current))
    fail_manifest(job, 10)
    for worker in job.placed():
        job.say(worker, Finished(generation=generation))
    assert job.machine.phase is Phase.RUNNING


def test_last_manifest_is_tried_again_and_the_job_finishes_once_it_is_written() -> None:
    job = started()
    end(job)
    tick_at(job, 1.0)
    assert written(job) == [path_of(10)] * 2
    tick_at(job, 1.5)
    assert job.last("finished") == {"step": 10, "path": path_of(10)}
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 0


def test_last_manifest_that_cannot_be_written_for_as_long_as_files_ends_the_job() -> None:
    job = started()
    job.step(3)
    save(job, 3)
    end(job)
    now = 0.0
    while job.stop is None:
        now += 0.5
        before = len(job.manifests)
        tick_at(job, now)
        if len(job.manifests) > before:
            fail_manifest(job, 10)
    assert 120 <= now < 140
    assert job.stop.exit_code == 1
    assert job.stop.reason == f"{ERROR}; resume with: resilient run --nodes 4 --resume {path_of(3)} train.py"


def test_files_that_are_not_there_are_not_waited_for() -> None:
    job = started()
    job.step(10)
    save(job, 10)
    job.feed(ManifestFailed(path=path_of(10), error=ERROR, node=2))
    assert job.stop is not None
    assert job.stop.exit_code == 1


def test_checkpoint_before_a_stop_without_its_manifest_ends_the_job_with_that_as_the_reason() -> None:
    job = started(num_nodes=4)
    job.step(3)
    job.lose(1)
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, [made.path for made in job.manifests]) == (3, [path_of(3)])
    job.feed(ManifestFailed(path=path_of(3), error=ERROR))
    assert job.stop.exit_code == 1
    assert job.stop.reason == f"{ERROR}; there is no checkpoint; start again with: resilient run --nodes 4 train.py"


def test_file_that_is_not_there_is_told_with_its_node() -> None:
    job = started()
    job.step(3)
    save(job, 3)
    (write,) = job.manifests
    assert write.nodes.keys() == {f"{name}.safetensors" for name in STATES}
    assert set(write.nodes.values()) <= {node for node, _ in job.placed()}
    job.feed(ManifestFailed(path=path_of(3), error=ERROR, node=2))
    assert job.last("checkpoint_failed") == {"step": 3, "node": 2, "error": ERROR, "newest": None}


def fail_at_checkpoint(num_steps_before: int) -> Job:
    """A node is lost when a part of the checkpoint of step 3 is missing and so many steps are done."""
    job = started(num_nodes=7, spec=job_spec(checkpoint_every=3))
    job.step(3)
    job.say(job.placed()[0], job.saved(1, 3, STATES[1:]))
    for step in range(4, num_steps_before + 1):
        job.step(step)
    job.lose(job.placed()[-1][0])
    return job


def due(job: Job) -> set[bool]:
    """Return what the workers are told about a checkpoint of the step that the next generation begins from."""
    begun = len(job.history)
    job.answer()
    sent = [each.message for _, _, told in job.history[begun:] for each in told if isinstance(each, Send)]
    return {message.checkpoint_due for message in sent if isinstance(message, Generation)}


def test_checkpoint_of_the_step_that_a_failure_came_after_is_written_by_the_next_generation() -> None:
    job = fail_at_checkpoint(3)
    assert due(job) == {True}
    assert "checkpoint_failed" not in job.kinds()
    for worker in job.placed():
        job.say(worker, job.saved(2, 3, job.workers[worker].current))
    assert job.last("checkpoint") == {"step": 3, "path": path_of(3)}
    job.lose(job.placed()[-1][0])
    assert due(job) == {False}


def test_checkpoint_that_a_failure_left_behind_is_told() -> None:
    job = fail_at_checkpoint(4)
    assert due(job) == {False}
    assert [record.fields for record in job.records if record.kind == "checkpoint_failed"] == [
        {"step": 3, "node": None, "error": "the job was regrouped before all parts were written", "newest": None}
    ]


def resumed_from_damaged(instead: str) -> Job:
    manifest = Manifest(step=6, recipe=RECIPE, states={})
    job = Job(num_nodes=4, resume=("/runs/y/checkpoints/step-00000006", manifest))
    job.start()
    job.say((1, 0), Failed(error="damaged", damaged="/runs/y/checkpoints/step-00000006", instead=instead))
    return job


def test_newest_sound_checkpoint_is_named_for_a_damaged_one() -> None:
    sound = "/runs/y/checkpoints/step-00000004"
    job = resumed_from_damaged(sound)
    assert stop(job) == f"enough; resume with: resilient run --nodes 4 --resume {sound} train.py"
    assert job.last("stopped")["path"] == sound


def test_job_whose_only_checkpoint_is_damaged_is_started_again() -> None:
    again = "start again with: resilient run --nodes 4 train.py"
    assert stop(resumed_from_damaged("")) == f"enough; there is no checkpoint; {again}"


def test_checkpoint_that_is_written_after_a_damaged_one_was_found_is_the_newest() -> None:
    job = resumed_from_damaged("/runs/y/checkpoints/step-00000004")
    job.answer()
    assert job.stop is not None
    assert job.stop.reason == f"node 1: damaged; resume with: resilient run --nodes 4 --resume {path_of(6)} train.py"


def test_checkpoint_is_whole_when_every_byte_of_each_state_is_saved() -> None:
    job, parts, size = started(), Parts(), PROFILE.layers[0].state_bytes
    for start, end, node in ((0, 8, 1), (16, size, 2), (0, 8, 1)):
        file = SavedState(file=f"at-{start}", num_bytes=1, sha256="f", intervals=ByteIntervals.of(start, end))
        parts.add(replace(job.saved(1, 3, STATES[1:]), states={STATES[0]: (file,)}), node)
    parts.add(job.saved(1, 3, STATES[1:]), 3)
    assert parts.lacking(3, PROFILE) == (STATES[0],)
    rest = SavedState(file="rest", num_bytes=1, sha256="f", intervals=ByteIntervals.of(8, 16))
    parts.add(replace(job.saved(1, 3, STATES[1:]), states={STATES[0]: (rest,)}), 4)
    assert parts.lacking(3, PROFILE) == ()
    assert [saved.file for saved in parts.states(3)[STATES[0]]] == ["at-0", "at-16", "rest"]
    assert parts.nodes(3) == {f"{name}.safetensors": 3 for name in STATES[1:]} | {"at-0": 1, "at-16": 2, "rest": 4}
