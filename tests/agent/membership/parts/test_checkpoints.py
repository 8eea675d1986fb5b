"""A checkpoint on the way that cannot be written costs nobody the training, and is never offered to resume from."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from resilient.agent.membership.parts.checkpoints import Parts
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Interrupted, Send, StopWanted, Tick
from resilient.protocol.checkpoint_pace import CheckpointPace
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


def save(job: Job, step: int, *, error: str = "") -> None:
    """Have the placed workers save each state of a step once; ``error``: why it gets no manifest."""
    job.manifest_error = error
    left = set(STATES)
    for worker in job.placed():
        mine = left & set(job.workers[worker].current)
        left -= mine
        job.say(worker, job.saved(job.machine.generation, step, mine))
    job.manifest_error = ""


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
    save(job, 3, error=ERROR)
    assert job.last("checkpoint_failed") == {"step": 3, "node": None, "error": ERROR, "newest": None}
    assert "checkpoint" not in job.kinds()
    assert (job.machine.phase, job.machine.generation, job.stop) == (Phase.RUNNING, 1, None)
    assert stop(job) == "enough; there is no checkpoint; start again with: resilient run --nodes 4 train.py"


def test_states_that_nobody_holds_come_from_the_newest_whole_checkpoint() -> None:
    job = started(num_nodes=4)
    job.step(3)
    save(job, 3)
    job.step(6)
    save(job, 6, error=ERROR)
    for _ in range(2):
        job.ready(job.connect())
    job.lose(*(pipeline.nodes[0] for pipeline in job.plan.pipelines[:2]))
    job.answer()
    assert job.last("generation")["version"] == 3
    assert f"everybody loads {path_of(3)}" in job.last("output")["text"]


def tick_at(job: Job, now: float, *, error: str = "") -> None:
    job.now, job.manifest_error = now, error
    job.feed(Tick())


def written(job: Job) -> list[str]:
    return [made.path for made in job.manifests]


def test_manifest_on_the_way_is_tried_again_and_counts_once_it_is_written() -> None:
    job = started()
    job.step(3)
    save(job, 3, error=ERROR)
    tick_at(job, 0.5)
    assert written(job) == [path_of(3)]
    tick_at(job, 1.0, error=ERROR)
    assert job.kinds().count("checkpoint_failed") == 2
    for now in (2.5, 3.0, 3.5):
        tick_at(job, now)
    assert written(job) == [path_of(3)] * 3, "the pauses are a second, then two"
    assert job.last("checkpoint") == {"step": 3, "path": path_of(3)}
    assert stop(job) == f"enough; resume with: resilient run --nodes 4 --resume {path_of(3)} train.py"


def end(job: Job) -> None:
    """Have all workers finish the job's last step, of which the manifest cannot be written at first."""
    job.step(10)
    save(job, 10, error=ERROR)
    for worker in job.placed():
        job.say(worker, Finished(generation=job.machine.generation))
    assert job.machine.phase is Phase.RUNNING


def test_last_manifest_is_tried_again_and_the_job_finishes_once_it_is_written() -> None:
    job = started()
    end(job)
    tick_at(job, 1.0)
    assert written(job) == [path_of(10)] * 2
    assert job.last("finished") == {"step": 10, "path": path_of(10)}
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 0


def tick_until_stopped(job: Job) -> float:
    """Let time pass while no manifest can be written; return when the job stops."""
    while job.stop is None:
        tick_at(job, job.now + 0.5, error=ERROR)
    return job.now


def test_last_manifest_that_cannot_be_written_for_as_long_as_files_ends_the_job() -> None:
    job = started()
    job.step(3)
    save(job, 3)
    end(job)
    assert 120 <= tick_until_stopped(job) < 140
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == f"{ERROR}; resume with: resilient run --nodes 4 --resume {path_of(3)} train.py"


def test_files_that_are_not_there_are_not_waited_for() -> None:
    job = started()
    job.step(10)
    job.lacking_node = 2
    save(job, 10, error=ERROR)
    assert job.stop is not None
    assert job.stop.exit_code == 1


TOO_FEW = "3 nodes are live ([0, 2, 3]), 4 are needed"
AGAIN = "start again with: resilient run --nodes 4 train.py"


def stopping(lacking_node: int | None = None) -> Job:
    """Return a job with too few nodes after step 3, all parts of whose last checkpoint are there, and no manifest."""
    job = started(num_nodes=4)
    job.step(3)
    job.manifest_error, job.lacking_node = ERROR, lacking_node
    job.lose(1)
    job.answer()
    assert written(job) == [path_of(3)]
    return job


def test_manifest_of_an_early_stop_is_tried_again_and_the_job_stops_once_it_is_written() -> None:
    job = stopping()
    assert (job.machine.phase, job.stop) == (Phase.SAVING, None)
    assert job.last("checkpoint_failed") == {"step": 3, "node": None, "error": ERROR, "newest": None}
    tick_at(job, 1.0, error=ERROR)
    for now in (2.0, 2.5, 3.0):
        assert job.stop is None
        tick_at(job, now)
    assert job.stop is not None
    resume = f"resume with: resilient run --nodes 4 --resume {path_of(3)} train.py"
    assert (job.stop.exit_code, job.stop.reason) == (3, f"{TOO_FEW}; {resume}")
    assert written(job) == [path_of(3)] * 3
    assert job.last("checkpoint") == {"step": 3, "path": path_of(3)}


def test_manifest_of_an_early_stop_that_cannot_be_written_for_as_long_as_files_ends_the_job_without() -> None:
    job = stopping()
    assert 120 <= tick_until_stopped(job) < 140
    assert job.stop is not None
    unsaved = f"{TOO_FEW}, and there is no checkpoint of step 3: {ERROR}; there is no checkpoint; {AGAIN}"
    assert (job.stop.exit_code, job.stop.reason) == (1, unsaved)


def test_files_that_are_not_there_at_an_early_stop_are_not_waited_for() -> None:
    job = stopping(lacking_node=2)
    assert job.stop is not None
    unsaved = f"{TOO_FEW}, and there is no checkpoint of step 3: {ERROR}; there is no checkpoint; {AGAIN}"
    assert (job.stop.exit_code, job.stop.reason) == (1, unsaved)


def test_second_interruption_ends_a_job_that_waits_for_its_manifest() -> None:
    job = stopping()
    for now in (0.1, 2.0):
        job.now = now
        job.feed(Interrupted(reason="SIGTERM"))
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        130,
        f"interrupted twice (SIGTERM); there is no checkpoint; {AGAIN}",
    )


def test_job_that_stops_waits_for_its_last_manifest_and_not_for_one_on_the_way() -> None:
    job = started(num_nodes=4)
    job.step(3)
    save(job, 3, error=ERROR)
    job.step(4)
    job.manifest_error = ERROR
    job.lose(1)
    job.answer()
    assert (job.machine.phase, job.stop, written(job)) == (Phase.SAVING, None, [path_of(3), path_of(4)])
    tick_at(job, 1.0)
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert written(job)[2:] == [path_of(3), path_of(4)]


def test_file_that_is_not_there_is_told_with_its_node() -> None:
    job = started()
    job.step(3)
    job.lacking_node = 2
    save(job, 3, error=ERROR)
    (write,) = job.manifests
    assert write.nodes.keys() == {f"{name}.safetensors" for name in STATES}
    assert set(write.nodes.values()) <= {node for node, _ in job.placed()}
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


def chosen(job: Job, step: int, cost_s: float | None = None) -> None:
    """Have a step be committed after which a checkpoint is to follow."""
    done = job.done(step, job.machine.generation)
    saves = replace(done.outcome, saves=True)
    for worker in job.placed():
        state = job.workers[worker]
        state.version, state.passed, state.retained, state.begun = step, saves, (), True
    job.say(job.placed()[0], replace(done, outcome=saves, checkpoint_s=cost_s))


def paces(job: Job, generation: int) -> set[CheckpointPace | None]:
    """Return by what the workers of a generation, after the running one or the first, choose their checkpoints."""
    job.answer()
    sent = [each.message for _, _, told in job.history for each in told if isinstance(each, Send)]
    return {each.pace for each in sent if isinstance(each, Generation) and each.generation == generation}


def test_generation_is_told_what_a_checkpoint_costs_how_often_one_is_needed_and_when_there_was_one() -> None:
    job = started(num_nodes=7, spec=job_spec(checkpoint_every="auto"), failure_interval_s=100.0)
    assert paces(job, 1) == {CheckpointPace(risk_s=1000.0)}
    job.now = 40.0
    chosen(job, 2, cost_s=3.0)
    save(job, 2)
    job.now = 100.0
    job.lose(job.placed()[-1][0])
    assert paces(job, 2) == {CheckpointPace(risk_s=(100.0 + 100.0) / 2 * 11, cost_s=3.0, since_s=60.0)}
    assert job.last("generation")["checkpoint_pace"] == {"risk_s": 1100.0, "cost_s": 3.0}


def test_chosen_checkpoint_that_a_failure_came_after_is_written_by_the_next_generation() -> None:
    job = started(num_nodes=7, spec=job_spec(checkpoint_every="auto"))
    chosen(job, 2)
    job.lose(job.placed()[-1][0])
    assert due(job) == {True}
    job.step(3)
    job.lose(job.placed()[-1][0])
    assert due(job) == {False}
    assert job.last("checkpoint_failed")["step"] == 2


def test_jobs_with_fixed_steps_between_checkpoints_have_no_pace() -> None:
    job = started(num_nodes=7, spec=job_spec(checkpoint_every=3))
    job.lose(job.placed()[-1][0])
    assert paces(job, 2) == {None}


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
